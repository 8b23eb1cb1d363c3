"""Events of a whole training, for all objects that keep something of it."""

from dataclasses import dataclass
from enum import Enum

from rollback.facts.history import Case
from rollback.facts.training import Window


class RollbackCause(Enum):
    """The reason why training was put back to a checkpoint."""

    PLAN = "plan"
    """An incident, or an operator's request: a plan that was in the journal has been carried out."""
    REHEARSAL = "rehearsal"
    """The first step of a resumed process was a rehearsal and is done again (`incidents.rewinder.needs_rehearsal`)."""
    EPOCH_START = "epoch start"
    """The script has run code of its own since a resume or a rollback; the effects are undone."""
    SCREEN = "screen"
    """An update in a screen stood out and was undone. The journal says so, and training is where it was before it."""
    PROBE = "probe"
    """A step with a probe batch was undone, or a rehearsal within an update: no step of the run, and the position
    in the data is what it was."""


@dataclass(frozen=True)
class RollbackApplied:
    """Training was put back: the live objects have an earlier state, on all ranks. It is that of a checkpoint, except
    where the cause is `SCREEN` or `PROBE`."""

    cause: RollbackCause
    step: int
    """Completed updates."""
    batch: int
    """Position of the next batch."""
    checkpoint: str
    """Empty where the cause is `SCREEN` or `PROBE`."""
    epoch_left: bool = False
    """At an epoch's end: whether the script has already done its work between this epoch and the next."""
    case: Case | None = None
    """The incident with its plan and the restore, all of it in the journal. None: there is no plan, and the journal
    says nothing about this event."""
    screened_out: Window | None = None
    """The batches of the update that was undone."""

    @property
    def undid_one(self) -> bool:
        """Whether no more than the last update was undone, which nobody had counted yet."""
        return self.cause in (RollbackCause.SCREEN, RollbackCause.PROBE)

    @property
    def skip(self) -> Window | None:
        """The batches that are skipped from now on because of this event."""
        if self.screened_out is not None:
            return self.screened_out
        plan = self.case.plan if self.case is not None else None
        return plan.skip if plan is not None and plan.action == "rollback" else None
