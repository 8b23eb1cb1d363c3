"""Restoring a checkpoint: all ranks verify it and agree on it first, then it is read into the live tensors."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial

from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import (
    CheckpointDamaged,
    CheckpointForbidden,
    CheckpointOutOfReach,
    CheckpointUnusable,
    once_more_if_unreadable,
)
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.reader import AllShards, OpenShards, OwnShard
from rollback.train.restore.reads import threads_of
from rollback.train.state.state import TrainingState


@dataclass
class RestoreOutcome:
    """The result of a restore."""

    place: CheckpointPlace | None = None
    """Where the state came from. None: no place was usable."""
    faults: list[tuple[CheckpointPlace, CheckpointUnusable]] = field(default_factory=list)
    """The faults of the other places."""
    reread: int = 0
    """How many frozen weights of this rank had changed and were put back."""

    @property
    def fault(self) -> CheckpointUnusable:
        """The faults of all places, as one."""
        return _together([error for _, error in self.faults])

    @property
    def unsettled(self) -> CheckpointForbidden | CheckpointOutOfReach | None:
        """Why the first place is of no use that may be of use once somebody has acted, where none was usable."""
        refused = (error for _, error in self.faults if isinstance(error, CheckpointForbidden | CheckpointOutOfReach))
        return next(refused, None) if self.place is None else None


def restore(name: str, places: Sequence[CheckpointPlace], ranks: Ranks, state: TrainingState) -> RestoreOutcome:
    """Collective: load a checkpoint into the live objects of every rank, from the first place that all ranks can read.

    Nothing is changed before all ranks have verified a place. If reading then fails twice, the live objects are
    incomplete: the caller must restore another checkpoint, or stop. Raises StateRefused and RunDoesNotFit, on all
    ranks, where the objects of one do not load the state.
    """
    result = RestoreOutcome()
    for place in places:
        try:
            result.reread = _restore_from(place, name, ranks, state)
        except CheckpointUnusable as error:
            result.faults.append((place, error))
        else:
            result.place = place
            break
    return result


def verify(name: str, places: Sequence[CheckpointPlace], ranks: Ranks) -> CheckpointUnusable | None:
    """Collective: whether `restore` would find a usable place. Returns None, or the faults of all places as one.

    Frozen weights are not verified: their file is needed only if the live ones differ.
    """
    faults = []
    for place in places:
        try:
            _verified(place, name, ranks, None).close()
        except CheckpointUnusable as error:
            faults.append(error)
        else:
            return None
    return _together(faults)


def _restore_from(place: CheckpointPlace, name: str, ranks: Ranks, state: TrainingState) -> int:
    """Collective: returns how many frozen weights of this rank were put back. Raises CheckpointUnusable, on all ranks,
    and what their objects refuse. What is not what was written is not tried again."""
    reading = _verified(place, name, ranks, state)
    try:
        _load(reading, ranks, state)
    except CheckpointUnusable:  # a disk that refuses may recover, but a checkpoint that cannot be read twice is bad
        reading = _verified(place, name, ranks, state)
        _load(reading, ranks, state)
    return reading.frozen.reread


def _verified(place: CheckpointPlace, name: str, ranks: Ranks, state: TrainingState | None) -> OpenShards:
    """Collective: open and verify a checkpoint on all ranks. Raises CheckpointUnusable where one finds a fault: then it
    is open on none of them."""
    if place.bring is not None:
        place.bring(name)
    with ExitStack() as opened:
        reading = ranks.agreed(lambda: opened.enter_context(closing(_open(place, name, ranks))))
        if isinstance(reading, OwnShard):
            reading.meet(ranks)
        if state is not None and reading.frozen.digests:
            ranks.agreed(partial(reading.frozen.compare, place.run, state, threads_of(ranks)))
        opened.pop_all()
    return reading


def _open(place: CheckpointPlace, name: str, ranks: Ranks) -> OpenShards:
    """Open a checkpoint on this rank, once more where the disk refuses. Raises CheckpointUnusable."""

    def once() -> OpenShards:
        # Read from there even where the caller has a manifest: it may hold something else by now.
        manifest = read_manifest(place.directory, in_slot=place.in_slot)
        if manifest.name != name:
            raise CheckpointDamaged(f"{place.directory} holds {manifest.name}, not {name}")
        made = OwnShard if place.in_slot and ranks.host_count > 1 else AllShards
        return made(manifest, place.directory, place.memory, ranks)

    return once_more_if_unreadable(once)


def _load(reading: OpenShards, ranks: Ranks, state: TrainingState) -> None:
    """Collective: read every tensor into its place, load the rest, and close. Raises, on all ranks, what one meets."""
    with closing(reading):
        trees = reading.read(ranks, state)
        # Once all have read theirs: where one has to read again, no object of another loads its state twice.
        ranks.agreed(lambda: state.load(*trees))


def _together(faults: Sequence[CheckpointUnusable]) -> CheckpointUnusable:
    """Out of reach where one of the places is: it may be of use at another time."""
    far = any(isinstance(error, CheckpointOutOfReach) for error in faults)
    return (CheckpointOutOfReach if far else CheckpointDamaged)("; ".join(error.message for error in faults))
