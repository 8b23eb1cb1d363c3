"""What goes into the sentinel and what comes out: observations, hints, verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, Flag, auto


class Hint(Flag):
    """What the guard knows about a step and the numbers do not show."""

    NONE = 0
    LR_CHANGED = auto()  # the learning rate jumped (restart, resume with another rate), not a smooth schedule
    RESUMED = auto()  # first step after a restore: running averages of the training start anew
    EPOCH = auto()  # an epoch begins with this step
    SCALER_SKIPPED = auto()  # GradScaler skipped this update; its Inf norm is routine
    ANNOUNCED = auto()  # the user announced a new phase: other data, other loss


@dataclass(frozen=True, slots=True)
class Observation:
    """One optimizer step as all ranks saw it."""

    step: int
    """The step's number. May jump by a stride (sparse logs); the sentinel counts observations."""
    loss: float | None
    """Mean over ranks; NaN or Inf when any rank's was not finite; None if the script never gave one."""
    grad_norm: float | None
    """Global norm, before clipping where known; NaN or Inf when not finite; None if not measured."""
    hints: Hint = Hint.NONE


class Kind(str, Enum):
    """What the sentinel says of a step. `SPIKE` and `NONFINITE` demand action."""

    HEALTHY = "healthy"
    WATCH = "watch"
    SPIKE = "spike"
    NONFINITE = "nonfinite"

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
    """`recovered`: went back by itself; `accepted`: the level persisted and is the baseline now."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the sentinel says of one observation, and why."""

    kind: Kind
    step: int
    onset: int | None = None
    """First step held to be part of it (watch, spike, nonfinite)."""
    rule: str = ""
    """Short stable identifier such as `loss-spike`."""
    witness: str = ""
    """`loss` or `grad_norm`: whose value is quoted."""
    value: float | None = None
    threshold: float | None = None
    explanation: str = ""
    window: tuple[float, ...] = ()
    """The recent accepted values that it was judged against, oldest first (spike and nonfinite only)."""
    ended: Blip | None = None
    """Set on the step at which an excursion ended without action being due."""
