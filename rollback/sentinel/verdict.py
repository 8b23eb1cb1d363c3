"""Input and output of the sentinel: observations with hints, verdicts with blips."""

import math
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import NamedTuple


class Hint(Flag):
    """What the guard knows about a step and the numbers do not show."""

    NONE = 0
    LR_CHANGED = auto()
    """The learning rate jumped, as `learning_rate_hint` defines it; not every step of a smooth schedule."""
    RESUMED = auto()
    """First step after a restore that lost something: optimizer state, data order, running averages."""
    EPOCH = auto()
    """An epoch begins with this step."""
    SCALER_SKIPPED = auto()
    """GradScaler skipped this update: an infinite norm is routine."""
    ANNOUNCED = auto()
    """The user announced a new phase: other data, another loss."""


def learning_rate_hint(previous: float | None, now: float | None, highest: float | None) -> Hint:
    """`LR_CHANGED` if the learning rate rose at once, by half or more, to a value that this run has seen before.

    Such a rise is a warm restart, or the warm-up after a resume; the loss may go up a little with it. A rate above all
    earlier rates excuses nothing: it is a common cause of divergence. highest: the largest rate before `now`.
    """
    if previous is None or now is None or highest is None:
        return Hint.NONE
    return Hint.LR_CHANGED if 1.5 * previous <= now <= 1.01 * highest else Hint.NONE


class Observation(NamedTuple):
    """One optimizer step as all ranks saw it."""

    step: int
    """The step's number. It may jump by a stride (sparse logs); the sentinel counts observations."""
    loss: float | None
    """Mean over ranks; NaN or Inf when any rank's loss was not finite; None if the script did not report one."""
    grad_norm: float | None
    """Global norm, before clipping where known; NaN or Inf when not finite; None if not measured."""
    hints: Hint = Hint.NONE

    @property
    def not_finite(self) -> tuple[str, float] | None:
        """Which value is not finite, and what it is; the norm of a step that GradScaler skipped is not looked at."""
        if self.loss is not None and not math.isfinite(self.loss):
            return "loss", self.loss
        if self.grad_norm is None or math.isfinite(self.grad_norm) or Hint.SCALER_SKIPPED in self.hints:
            return None
        return "grad_norm", self.grad_norm


class Kind(str, Enum):
    """The verdict on a step. `SPIKE`, `NONFINITE` and `DAMAGED` demand action."""

    HEALTHY = "healthy"
    WATCH = "watch"
    SPIKE = "spike"
    NONFINITE = "nonfinite"
    DAMAGED = "damaged"
    """Not of a step's numbers: what the model has answered (`rollback.sentinel.probe`)."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Blip:
    """An excursion that ended and was left alone, or a new level that was accepted."""

    first_step: int
    last_step: int
    peak: float
    threshold: float
    rule: str
    fate: str
    """`recovered`: the loss returned by itself; `accepted`: the level persisted and is the baseline now."""


NORM_COLLAPSE = "grad-norm-collapse"
"""The rule whose `Verdict.window` holds gradient norms; those of all others hold losses."""


class Verdict(NamedTuple):
    """The verdict on one observation, and its reason."""

    kind: Kind
    step: int
    onset: int | None = None
    """First step that belongs to the excursion (watch, spike, nonfinite)."""
    rule: str = ""
    """Short stable identifier such as `loss-spike`."""
    witness: str = ""
    """`loss` or `grad_norm`: the one whose value is quoted."""
    value: float | None = None
    threshold: float | None = None
    explanation: str = ""
    window: tuple[float, ...] = ()
    """The values that the observation was compared with, oldest first (spike and nonfinite only): the recent accepted
    losses, or what the explanation of a slow rule names."""
    advice: str = ""
    """What would have been called if the loss measured progress; empty otherwise."""
    ended: Blip | None = None
    """Set on the step at which an excursion ended without a call."""
