"""Restoring a checkpoint: all ranks verify it and agree on it first, then it is read into the live tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import (
    CheckpointDamaged,
    CheckpointForbidden,
    CheckpointOutOfReach,
    CheckpointUnreadable,
    CheckpointUnusable,
)
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.restore.reader import AllShards, OwnShard, Reading
from rollback.train.restore.reads import threads_of
from rollback.train.state.state import TrainingState

_TRIES = 2  # a disk that refuses may recover, but a checkpoint that cannot be read twice is bad


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
        for _ in range(_TRIES):
            reading, fault = _verify(name, place, ranks, state)
            if reading is None:
                break  # it is not what was written: no use in trying again
            result.reread = reading.frozen.reread
            if (fault := _load(reading, ranks, state)) is None:
                result.place = place
                return result
        assert fault is not None
        result.faults.append((place, fault))
    return result


def verify(name: str, places: Sequence[CheckpointPlace], ranks: Ranks) -> CheckpointUnusable | None:
    """Collective: whether `restore` would find a usable place. Returns None, or the faults of all places as one.

    Frozen weights are not verified: their file is needed only if the live ones differ.
    """
    faults = []
    for place in places:
        reading, fault = _verify(name, place, ranks, None)
        if reading is not None:
            reading.close()
            return None
        assert fault is not None
        faults.append(fault)
    return _together(faults)


def _verify(
    name: str, place: CheckpointPlace, ranks: Ranks, state: TrainingState | None
) -> tuple[Reading | None, CheckpointUnusable | None]:
    """Collective: open and verify a checkpoint on all ranks. If one rank finds a fault, it is open on none of them."""
    if place.bring is not None and (why := place.bring(name)) is not None:
        return None, why
    reading, fault = _open(name, place, ranks)
    fault = _first(ranks, fault)
    if fault is None and isinstance(reading, OwnShard):
        fault = _first(ranks, reading.meet(ranks))
    if fault is None and state is not None and reading is not None and reading.frozen.digests:
        fault = _first(ranks, reading.frozen.compare(place.run, state, threads_of(ranks)))
    if fault is None:
        return reading, None
    if reading is not None:
        reading.close()
    return None, fault


def _open(name: str, place: CheckpointPlace, ranks: Ranks) -> tuple[Reading | None, CheckpointUnusable | None]:
    """Open a checkpoint on this rank. Returns it, or the fault. Only a failure of the disk is tried again."""
    fault: CheckpointUnusable | None = None
    for _ in range(_TRIES):
        try:
            # Read from there even where the caller has a manifest: it may hold something else by now.
            manifest = read_manifest(place.directory, in_slot=place.in_slot)
            if manifest.name != name:
                raise CheckpointDamaged(f"{place.directory} holds {manifest.name}, not {name}")
            made = OwnShard if place.in_slot and ranks.host_count > 1 else AllShards
            return made(manifest, place.directory, place.memory, ranks), None
        except CheckpointUnreadable as error:
            fault = error
        except CheckpointUnusable as error:
            return None, error
    return None, fault


def _load(reading: Reading, ranks: Ranks, state: TrainingState) -> CheckpointUnusable | None:
    """Collective: read every tensor into its place and load the rest. Returns what failed on some rank. Raises, on all
    ranks, what their objects refuse."""
    try:
        ranks.agreed(lambda: reading.load(ranks, state))
    except CheckpointUnusable as error:
        return error
    finally:
        reading.close()
    return None


def _first(ranks: Ranks, fault: CheckpointUnusable | None) -> CheckpointUnusable | None:
    """Collective: the fault of the first rank that has one. Of its kind it counts whether it is one of permission."""
    told = ranks.from_each([fault.message, isinstance(fault, CheckpointForbidden)] if fault is not None else None)
    if (found := next(filter(None, told), None)) is None:
        return None
    words, forbidden = found
    return CheckpointForbidden(words) if forbidden else CheckpointDamaged(words)


def _together(faults: Sequence[CheckpointUnusable]) -> CheckpointUnusable:
    """Out of reach where one of the places is: it may be of use at another time."""
    far = any(isinstance(error, CheckpointOutOfReach) for error in faults)
    return (CheckpointOutOfReach if far else CheckpointDamaged)("; ".join(error.message for error in faults))
