"""Noticing a script that draws its next batch while the update of the one in hand is still open.

nanoGPT does so by hand: forward, draw the next batch, backward, step. The guard takes what it has handed out before an
update for what went into it; of such a script it would take the wrong batches for trained ones, and a run that resumes
would be a batch off. There is no telling from outside which of the batches drawn ahead were used, so it is refused.

What tells it apart from a script that leaves out a batch, or draws all batches of an update first, is the order of the
model's forward passes (with gradients), of backward, and of what is handed out:

| seen                                             | as in                                | ahead? |
|--------------------------------------------------|--------------------------------------|--------|
| hand out, forward, backward, step                | the usual loop, accumulation         | no     |
| hand out, hand out, forward, backward, ...       | all batches of an update drawn first | no     |
| hand out, forward, hand out, forward, backward   | a batch that is left out             | no     |
| forward, hand out, backward (no forward between) | nanoGPT's loop                       | yes    |
| forward, backward, hand out, step, twice running | drawn between backward and step      | yes    |
| hand out, step (in its closure: forward, backward) | a step that is given a closure       | no     |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rollback.errors import UsageError
from rollback.train.updates.closures import before_update

_WATCHED = 16  # updates; the structure of a loop does not change later


class PrefetchWatch:
    """Watches one rank's script for its first updates. Does nothing where the model's forward cannot be seen.

    model: what the script calls. telltale: a parameter that every backward reaches, None where there is none.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, telltale: nn.Parameter | None) -> None:
        self._updates = 0
        self._forward = self._suspect = self._backward = False
        self._idle = True
        """Whether there was no forward since the last batch was handed out."""
        self._forward_in_update = False
        """Whether there has been a forward in this update at all."""
        self._between = 0
        """Updates in a row before whose step a batch was handed out that nothing was done with."""
        self._ahead = False
        # A hook inside what torch.compile has compiled in place would be compiled with it.
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self._hooks: list[Any] = []
        if telltale is not None and not compiled:
            self._hooks = [
                model.register_forward_pre_hook(self._before_forward),
                telltale.register_post_accumulate_grad_hook(self._after_backward),  # type: ignore[no-untyped-call]
                before_update(optimizer, self._before_update),
            ]

    def handed_out(self) -> None:
        """A batch was handed out. Raises UsageError where that is known to be too early."""
        if self._ahead:
            raise UsageError(
                "the script draws its next batch before optimizer.step() of the one before: the guard could not tell "
                "which batches an update was made of, and a run that resumes would leave one out",
                hint="ask the guard for the next batch after optimizer.step(). To have data read meanwhile, use a "
                "DataLoader with num_workers and pin_memory",
            )
        self._suspect = self._forward
        self._idle = True
        if self._updates >= _WATCHED:
            self._suspect = self._forward = False
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._forward, self._suspect, self._idle, self._forward_in_update = True, False, False, True

    def _after_backward(self, parameter: nn.Parameter) -> None:
        self._ahead = self._ahead or self._suspect
        self._forward, self._backward = False, True

    def _before_update(self, optimizer: Optimizer) -> None:
        self._between = self._between + 1 if self._backward and self._idle and self._forward_in_update else 0
        self._ahead = self._ahead or self._between > 1
        self._backward = self._forward_in_update = False
        self._updates += 1
