"""The step in hand: what the script has been given and has told since the last step's end."""

from __future__ import annotations

import torch
from torch import Tensor

from rollback.sentinel import Hint
from rollback.train.arguments import scalar
from rollback.train.data.cursor import Cursor
from rollback.train.incidents.judge import StepMark
from rollback.train.state.state import Counters
from rollback.train.updates.habits import Habit


class StepInHand:
    """One rank's step in progress.

    first_batch: position of its first batch, None before that. batches: how many it has so far. losses: of its batches,
    as observed. grad_norm: as observed, None if the script does not say. epoch_began: whether an epoch begins with it.
    phase: announced phase that begins with it. next_phase: one that begins with the step after it.
    """

    def __init__(self, phase: str | None = None) -> None:
        self.losses: list[Tensor] = []
        self.grad_norm: Tensor | None = None
        self.first_batch: int | None = None
        self.batches = 0
        self.epoch_began = False
        self.phase = phase
        self.next_phase: str | None = None

    def take(self, position: int) -> None:
        """A batch is handed out."""
        if self.first_batch is None:
            self.first_batch = position
        self.batches += 1

    def observe(self, loss: Tensor | float, grad_norm: Tensor | float | None) -> None:
        """The script tells a loss. Raises UsageError where it is not one number."""
        self.losses.append(scalar(loss, "loss"))
        if grad_norm is not None:
            self.grad_norm = scalar(grad_norm, "grad_norm")

    def mark(self, counters: Counters, cursor: Cursor, hints: Hint, habit: Habit) -> StepMark:
        """The step, now that its update is done."""
        assert self.first_batch is not None
        return StepMark(
            counters.step, self.first_batch, cursor.batch - 1, counters.batches_per_step, hints, self.phase, habit,
            self.batches, cursor.epoch_end, cursor.epoch_batches,
        )  # fmt: skip

    def mean_loss(self) -> Tensor | None:
        """Over its batches; None if none was told."""
        if len(self.losses) == 1:
            return self.losses[0]
        return torch.stack([loss.float() for loss in self.losses]).mean() if self.losses else None
