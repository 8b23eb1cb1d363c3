"""Habits of the script: what it does with the gradients of an update, and when. Found by hooks.

Everything is read on the host: versions of tensors, flags, the order of calls. What is uncertain stays None.
"""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollback.train.introspection import frame_of
from rollback.train.sharded import is_sharded, local_of, storage_version, version_of
from rollback.train.updates.backward import BackwardWatch
from rollback.train.updates.hooks import watch_method, weak_hook
from rollback.train.updates.optimizer import Updates
from rollback.train.updates.wrappers import ddp_inside

_SAMPLED = 16  # updates of a process; a look at a loss's graph costs microseconds, one at late writes may wait for CUDA


class Habit(NamedTuple):
    """What was noticed of one update on this rank. None means not known."""

    batches: int
    """Number of batches."""
    written: bool | None = None
    """Whether the script wrote to the gradients between backward and step."""
    while_scaled: bool | None = None
    """Whether it did so, if it did, while the gradient scaler's factor was still in them."""
    late: bool | None = None
    """Whether it made them smaller after the step that used them."""
    undivided: bool | None = None
    """Whether no batch's loss was divided, in a real accumulation."""
    always_averaged: bool | None = None
    """Whether DDP averaged after every batch."""


class _Noticed:
    """What has been noticed of the update in progress."""

    written: bool | None = None
    while_scaled: bool | None = None
    unscaled: bool = False
    stepped: tuple[Tensor, int, Tensor] | None = None
    last: tuple[int, int] | None = None
    additions: int = 0
    """Backwards that added to the gradients of the one before."""
    undivided: tuple[bool, ...] = ()
    averaged: int = 0
    unaveraged: int = 0


class Habits:
    """Watches one rank's script. Without a telltale nothing is noticed. model: as the script calls it."""

    def __init__(
        self, updates: Updates, optimizer: torch.optim.Optimizer, scaler: object | None, model: nn.Module
    ) -> None:
        self._telltale = telltale = updates.telltale
        self._scaler = scaler
        self._thread = threading.get_ident()
        self._looks = self._late_looks = _SAMPLED
        self._now = _Noticed()
        self._hook: Any = None
        self._watch: BackwardWatch | None = None
        self._averages = False
        updates.on_begin.append(self._before_step)
        updates.on_forget.append(self._forget)
        if telltale is None:
            return
        self._watch = BackwardWatch(model, telltale, self._accumulated)
        self._hook = optimizer.register_step_post_hook(weak_hook(self._after_step))
        ddp = ddp_inside(model)
        if ddp is not None and ddp.process_group.size() > 1:  # one rank alone exchanges nothing
            self._averages = True
            ddp.register_forward_pre_hook(weak_hook(self._before_forward))
        self._optimizer = optimizer
        if scaler is not None and hasattr(scaler, "unscale_"):
            watch_method(scaler, "unscale_", weak_hook(self._before_unscaling))

    def _before_step(self, written: bool | None) -> None:
        """The optimizer, or its scaler, is about to begin. written: as in `Habit`."""
        now = self._now
        if now.written is None:
            now.written = written
            now.while_scaled = written is not False and self._scaling and not now.unscaled

    def _forget(self) -> None:
        """What was noticed belongs to no step."""
        self._now = _Noticed()

    def end_step(self, batches: int) -> Habit:
        """What was noticed since the last step's end."""
        now, self._now = self._now, _Noticed()
        accumulated = batches > 1 and now.additions >= batches - 1
        self._looks -= bool(now.undivided)
        if self._late_looks == 0 and self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self._late_looks == self._looks == 0 and not self._averages and self._watch is not None:
            self._watch.remove()  # nothing of what it notices is asked any more
            self._watch = None
        return Habit(
            batches=batches,
            written=now.written,
            while_scaled=now.while_scaled,
            late=_was_late(*now.stepped) if now.stepped is not None else None,
            undivided=all(now.undivided) if accumulated and len(now.undivided) >= batches else None,
            always_averaged=now.unaveraged == 0 if accumulated and now.averaged >= batches else None,
        )

    def _accumulated(self, *_: object) -> None:
        """Backward has reached the telltale."""
        now, gradient = self._now, self._gradient()
        now.stepped = None
        if gradient is not None:
            version = storage_version(gradient)
            if now.last is not None:
                now.additions += version[0] == now.last[0] and version[1] > now.last[1]
            now.last = version
        elif is_sharded(self._telltale):  # FSDP2 holds it back and will add it to the next
            now.additions += 1
        else:
            return
        if self._looks > 0 and (undivided := self._loss_is_undivided()) is not None:
            now.undivided += (undivided,)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        gradient = self._gradient()
        if gradient is not None and self._late_looks > 0:
            self._late_looks -= 1
            # The tensor is small enough to keep: zero_grad usually frees the gradients before we look.
            self._now.stepped = gradient, version_of(gradient), torch.linalg.vector_norm(local_of(gradient))

    def _gradient(self) -> Tensor | None:
        """The telltale's, if there is one and it is dense."""
        gradient = self._telltale.grad if self._telltale is not None else None
        return gradient if gradient is not None and gradient.layout == torch.strided else None

    @property
    def _scaling(self) -> bool:
        """Whether there is an enabled gradient scaler."""
        return getattr(self._scaler, "_scale", None) is not None

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            if module.require_backward_grad_sync:
                self._now.averaged += 1
            else:
                self._now.unaveraged += 1

    def _before_unscaling(self, optimizer: Any, **_: Any) -> None:
        self._now.unscaled |= optimizer is self._optimizer

    def _loss_is_undivided(self) -> bool | None:
        """Whether the present loss is divided or multiplied by nothing, apart from the scaler."""
        root = _root_of_backward(self._thread)
        if root is None or root.grad_fn is None or root.numel() != 1:
            return None
        node: Any = root.grad_fn
        if self._scaling:
            if not node.name().startswith("Mul"):
                return None
            node = node.next_functions[0][0]
        return not _weighs(node)


@torch.no_grad()
def _was_late(gradient: Tensor, version: int, used: Tensor) -> bool:
    """Whether the gradient became smaller after its step. Zero does not count, since zero_grad does that. version,
    used: its version and norm then."""
    written = version_of(gradient) != version
    if not written and not is_sharded(gradient):
        return False
    now = float(torch.linalg.vector_norm(local_of(gradient)))
    return 0.0 < now <= float(used) * (1 + (1e-6 if written else -1e-6))


def _root_of_backward(thread: int) -> Tensor | None:
    """The tensor whose `backward()` runs in the training thread, if it can be found.

    Autograd has no reference from a graph to its root, but the call is on that thread's stack.
    """
    code = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
    frame = frame_of(thread)
    while frame is not None:
        if frame.f_code is code:
            roots = frame.f_locals.get("t_outputs", ())
            return roots[0] if len(roots) == 1 and isinstance(roots[0], Tensor) else None
        frame = frame.f_back
    return None


def _weighs(root: Any) -> bool:
    """Whether a loss is made with a product or quotient of scalars."""
    waiting, seen = [root], 0
    while waiting and seen < 64:
        node = waiting.pop()
        seen += 1
        if node is None or any(len(made.shape) for made in node._input_metadata):
            continue
        if any(word in node.name() for word in ("Div", "Mul", "Dot", "Accumulate", "Compiled", "CheckpointFunction")):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False
