"""Gradients that are there when a step ends, in no checkpoint, and that a later update uses: nothing has set them to
zero, or an optimizer that has fewer updates than the guard's own gathers them over several steps."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rollback.train.sharded import is_sharded, local_of, storage_version
from rollback.train.updates.backward import BackwardWatch
from rollback.train.updates.hooks import before_update

_SAMPLED = 16  # updates; to look may wait for a device


class _Left(NamedTuple):
    """What was there when a step ended."""

    gradient: Tensor
    """Held, so that its memory is no other gradient's."""
    version: tuple[int, int]
    norm: Tensor


class CarriedGradients:
    """Of one optimizer, on one rank, by the gradient of one parameter. Without a telltale nothing is noticed. model:
    as the script calls it; None: not known, and nothing is noticed where the telltale is sharded."""

    def __init__(self, optimizer: Optimizer, telltale: nn.Parameter | None, model: nn.Module | None = None) -> None:
        self.updates = 0
        """How many have used what was there when an earlier step ended."""
        self._telltale, self._looks = telltale, _SAMPLED
        self._left: _Left | None = None
        self._is_first = False
        """Whether the next update is the first one since that step."""
        self._backwards, self._added = 0, False
        """How many there were since that step, and whether each has added to what it has left."""
        self._found: list[Tensor] = []
        """Of a sharded telltale: whether each of them found a gradient there that was not zero."""
        self._watch = BackwardWatch(model, telltale, self._accumulated, self._before_backward)
        self._hook = before_update(optimizer, self._before_update)

    @torch.no_grad()
    def end_step(self) -> bool:
        """A step of the guard's has ended, behind which a checkpoint may be taken. False: enough has been seen, and
        this need not be called again."""
        gradient, self._left, self._is_first = self._gradient(), None, True
        self._backwards, self._added, self._found = 0, False, []
        if not self._looks:  # not within the hook: torch goes through the optimizer's hooks then
            self._watch.remove()
            self._hook.remove()
            return False
        if gradient is not None:
            norm = torch.linalg.vector_norm(local_of(gradient))
            self._left = _Left(gradient, storage_version(gradient), norm)
        return True

    def _accumulated(self, *_: object) -> None:
        self._backwards += 1
        if self._left is not None and not is_sharded(self._telltale):
            self._added = self._is_written_by(self._backwards, self._left)

    @torch.no_grad()
    def _before_backward(self) -> None:
        """A backward of a sharded model begins. Versions do not tell whether the gradient was set to zero: torch counts
        no write to many sharded tensors at once, and how FSDP2's addition counts depends on whose memory they share."""
        if self._left is not None and self._telltale is not None:
            gradient = self._gradient()
            none = local_of(self._telltale).new_zeros((), dtype=torch.bool)
            self._found.append(none if gradient is None else local_of(gradient).any())

    def _before_update(self, _: Optimizer) -> None:
        if not self._is_first:
            return
        if self._left is not None:
            self.updates += self._is_used(self._left)
        self._left, self._is_first = None, False
        self._looks -= 1

    def _is_used(self, left: _Left) -> bool:
        """By the update that begins."""
        if is_sharded(self._telltale):
            return bool(self._found) and bool(torch.stack(self._found).all())
        used = self._added if self._backwards else self._is_written_by(0, left)
        return used and bool(left.norm)

    def _is_written_by(self, backwards: int, left: _Left) -> bool:
        """Whether so many backwards have written to the gradient since, and nothing else has, as far as torch counts.
        A backward's write counts before DDP's own."""
        gradient, (memory, version) = self._gradient(), left.version
        return gradient is not None and storage_version(gradient) == (memory, version + backwards)

    def _gradient(self) -> Tensor | None:
        """The telltale's, if there is one and it is dense."""
        gradient = self._telltale.grad if self._telltale is not None else None
        return gradient if gradient is not None and gradient.layout == torch.strided else None
