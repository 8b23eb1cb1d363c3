"""What happens to a training as a whole, and is told to all who keep something of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rollback.facts.history import Case
from rollback.facts.training import Window


class RollbackCause(Enum):
    """Why training was put back to a checkpoint."""

    PLAN = "plan"
    """An incident, or an operator's request: a plan that was in the journal has been carried out."""
    REHEARSAL = "rehearsal"
    """The first step of a resumed process was a rehearsal and is taken again (`rollback.train.process.rehearsal`)."""
    EPOCH_START = "epoch start"
    """The script has run code of its own since a resume or a rollback; what that did is undone."""


@dataclass(frozen=True)
class RollbackApplied:
    """The live objects are those of `checkpoint` again, on this rank as on all others.

    step: completed updates. batch: position of the next one. epoch_left: behind an epoch, that the script has done
    there what it does between two. case: the incident with its plan and what was restored, all of it in the journal
    already; None where there is no plan: then training stands where it was put before, and the record says nothing of
    it.
    """

    cause: RollbackCause
    step: int
    batch: int
    checkpoint: str
    epoch_left: bool = False
    case: Case | None = None

    @property
    def skip(self) -> Window | None:
        """The batches that are to be passed over from now on because of it."""
        plan = self.case.plan if self.case is not None else None
        return plan.skip if plan is not None and plan.action == "rollback" else None
