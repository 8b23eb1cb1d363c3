"""What is judged at a step's end, and what may be decided then."""

from dataclasses import dataclass
from typing import NamedTuple

from rollback.data_stream import DataStream
from rollback.facts.ending import GivingUp
from rollback.facts.training import Incident, Planned, Window
from rollback.sentinel import Hint, Observation
from rollback.train.comm.beat import Beat


class StepSpan(NamedTuple):
    """A step, and the batches that went into it."""

    step: int
    first_batch: int
    last_batch: int
    batches_per_step: int
    """Batches of a whole update, as far as known."""
    hints: Hint
    phase: str | None = None
    """The phase that this rank announced for this step."""
    batches: int = 1
    """Batches of this update; skipped batches in between do not count."""
    epoch_end: int | None = None
    """The batch after the last batch of the epoch; None: epochs have no length."""
    epoch_batches: int | None = None
    """Batches of that epoch; None as above."""

    def observation(self, beat: Beat, *, announced: bool) -> Observation:
        """What the sentinel is told of this step. announced: whether an announced phase begins here."""
        hints = self.hints
        if beat.scaler_skipped:
            hints |= Hint.SCALER_SKIPPED
        if announced:
            hints |= Hint.ANNOUNCED
        return Observation(self.step, beat.loss, beat.grad_norm, hints)

    @property
    def over_the_end(self) -> bool:
        """Whether it is a whole update with batches of two epochs: the script's count runs on from epoch to epoch."""
        if self.epoch_end is None or self.epoch_batches is None or self.batches != self.batches_per_step:
            return False
        return self.first_batch < self.epoch_end - self.epoch_batches <= self.last_batch


@dataclass(frozen=True)
class Rewind:
    """Decision: carry out this plan."""

    incident: Incident
    plan: Planned
    stream: DataStream


@dataclass(frozen=True)
class Halt:
    """Decision: stop together. `account` is for people. giving_up: as in the plan; None: the run can go on."""

    account: str
    save: bool
    giving_up: GivingUp | None = None


@dataclass(frozen=True)
class Undo:
    """Decision: undo the last update, which was screened out. The journal has its batches, which are skipped now."""

    window: Window


@dataclass(frozen=True)
class ServeRequests:
    """Decision: an operator has asked for something. Take it up together."""


Decision = Rewind | Halt | Undo | ServeRequests
