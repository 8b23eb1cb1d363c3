"""Where a rank stands: at the end of a step, behind which nothing has begun to change the state."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.train.last_snapshot.device import Read
from rollback.train.last_snapshot.peers import HostMarks
from rollback.train.last_snapshot.small_state import SharedState
from rollback.train.last_snapshot.write import NotProved, digest_of_large_state, versions_of
from rollback.train.state.state import TrainingState


class HeldEnd(NamedTuple):
    """A step's end, and how much had begun to change the state until then."""

    end: StepEnd
    changes: int
    versions: int
    small: SharedState
    digest: int | None
    """Of the parameters and the optimizer's tensors, where a script may write to them and torch does not count it:
    in an attempt's first steps, and in the work between two epochs. None: not needed."""


class CommonEnd(NamedTuple):
    """A step's end at which this rank stands and of which all ranks of its host have told."""

    held: HeldEnd
    marks: HostMarks


class HeldEnds:
    """The ends whose state this rank holds, newest first: more than one behind an epoch's last step, before and behind
    the work between two epochs. The main thread adds and counts; any thread asks."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._versions = partial(versions_of, list(state.model.parameters()), state.optimizer)
        self._ends: tuple[HeldEnd, ...] = ()
        self.changes = 0
        """How often something has begun to change the state. Whoever is about to, adds one."""

    def add(self, end: StepEnd, small: SharedState, digest: int | None) -> None:
        """The state is that of this end."""
        ends = self._ends
        before = ends[:1] if ends and ends[0].end != end and self.is_still(ends[0]) else ()
        self._ends = HeldEnd(end, self.changes, self._versions(), small, digest), *before

    @property
    def newest(self) -> HeldEnd | None:
        """Whether or not the state is still that one."""
        return next(iter(self._ends), None)

    @property
    def still(self) -> tuple[HeldEnd, ...]:
        """Those that are held still: none once something has begun to change the state."""
        ends = self._ends
        return ends if ends and self.is_still(ends[0]) else ()

    def is_still(self, held: HeldEnd) -> bool:
        return held.changes == self.changes

    def require_unchanged(self, held: HeldEnd) -> None:
        """Raise NotProved if anything has been written since that end."""
        if not self.is_still(held) or held.versions != self._versions():
            raise NotProved(f"the state of step {held.end.step} was changed while it was read")

    def as_they_were(self, ends: Sequence[CommonEnd], read: Read) -> Sequence[CommonEnd]:
        """Those of these ends whose weights and optimizer this rank still has. Raises NotProved: it has none."""
        if all(held.digest is None for held, _ in ends):
            return ends
        digest = digest_of_large_state(self._state, read)
        if not (same := [each for each in ends if each.held.digest in (None, digest)]):
            step = ends[0].held.end.step
            raise NotProved(f"weights or optimizer are not those of step {step} any more")
        return same
