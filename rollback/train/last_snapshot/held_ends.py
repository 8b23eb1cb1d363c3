"""Where a rank stands: at the end of a step, behind which nothing has begun to change the state."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.train.last_snapshot.peers import HostMarks
from rollback.train.last_snapshot.small_state import SharedState


class HeldEnd(NamedTuple):
    """A step's end, and how much had begun to change the state until then."""

    end: StepEnd
    changes: int
    versions: int
    small: SharedState
    alike: Mapping[str, Any]
    digest: int | None
    """Of the parameters and the optimizer's tensors, where a script may write to them and torch does not count it:
    in an attempt's first steps, and in the work between two epochs. None: not needed."""


class CommonEnd(NamedTuple):
    """A step's end at which this rank stands and of which all ranks of its host have told."""

    standing: HeldEnd
    marks: HostMarks
