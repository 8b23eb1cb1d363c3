"""The table of faults."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from rollback.errors import UsageError
from rollback.rundir.exercise import FaultName


class Expected(Enum):
    CAUGHT = "an incident, a rewind, and a run that goes on"
    CAUGHT_OR_HARMLESS = "an incident and a rewind; or no incident, and a loss that is back where it would have been"
    FOUND = "a silent difference between ranks that is found"
    RELAUNCHED = "another attempt that goes on from a checkpoint"
    STOPPED = "a stop that can be resumed, and a resume"
    LIVED_WITH = "one attempt that goes on, and a checkpoint once there is room again"


@dataclass(frozen=True)
class PlannedFault:
    """A row of the drill. ranks: how many a job needs for it to mean anything."""

    name: FaultName
    says: str
    expected: Expected
    ranks: int = 1


FAULTS: tuple[PlannedFault, ...] = (
    PlannedFault("nan-loss", "what the model gives is NaN, on one rank", Expected.CAUGHT),
    PlannedFault("gradient-x10", "the gradient of one update is 10 times as large", Expected.CAUGHT_OR_HARMLESS),
    PlannedFault("gradient-x1e4", "the gradient of one update is 10,000 times as large", Expected.CAUGHT_OR_HARMLESS),
    PlannedFault("corrupt-batch", "a batch is noise, on one rank", Expected.CAUGHT_OR_HARMLESS),
    PlannedFault("weight-bit", "one bit of one weight flips, on one rank", Expected.FOUND, ranks=2),
    PlannedFault("killed-rank", "SIGKILL to one rank", Expected.RELAUNCHED),
    PlannedFault("hung-rank", "one rank stands still", Expected.RELAUNCHED),
    PlannedFault("sigterm", "SIGTERM to rollback launch", Expected.STOPPED),
    PlannedFault("full-disk", "the run directory's disk is full for a while", Expected.LIVED_WITH),
)


def choose(names: Sequence[str] | None) -> list[PlannedFault]:
    """The faults of these names in the table's order, all by default. Raises UsageError for one that there is not."""
    known = {fault.name: fault for fault in FAULTS}
    for name in names or ():
        if name not in known:
            raise UsageError(f"--only: there is no fault {name!r}", hint=f"one of {', '.join(known)}")
    return [fault for fault in FAULTS if not names or fault.name in names]
