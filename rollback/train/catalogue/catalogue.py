"""The catalogue of all checkpoints: their status, and where they lie.

It never looks at the disk. Its input is the same on all ranks: landings, verdicts, and what one rank saw and told the
others. So all ranks have the same catalogue.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.retention import choose_evictions
from rollback.facts.training import Tier
from rollback.policy import PolicyCheckpoint
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.train.run import CheckpointAtStart


class CheckpointStatus(Enum):
    """The status of an entry."""

    SNAPSHOT = "snapshot"  # in flight
    CANDIDATE = "candidate"  # committed
    GOOD = "good"  # has survived probation


_HELD = (CheckpointStatus.CANDIDATE, CheckpointStatus.GOOD)


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a checkpoint lies. run: the run directory, which has the frozen weights. memory: this rank's own shard, if
    this process has it mapped (fast tier). bring: collective; makes sure that it is there, on every host where each has
    a run directory of its own. Raises CheckpointUnusable, on all ranks."""

    directory: Path
    run: RunPaths
    in_slot: bool = False
    memory: memoryview | None = None
    bring: Callable[[str], object] | None = None

    @property
    def tier(self) -> Tier:
        return "fast" if self.in_slot else "durable"


@dataclass
class CatalogueEntry:
    """A checkpoint, or a snapshot that may become one."""

    manifest: Manifest
    status: CheckpointStatus
    slot: int | None = None
    """The slot of the fast tier in which it lies on every host. Without one it lies in the run directory's ring."""
    healthy: int = 0
    """Healthy verdicts since it was taken, of a snapshot or candidate."""


class Catalogue:
    """Checkpoints of the present timeline. Those that were committed and lie here are *held*: candidates and good ones.

    probation: the number of healthy verdicts after a checkpoint that make it good. held: at the start.
    """

    def __init__(self, probation: int, held: Iterable[CheckpointAtStart] = ()) -> None:
        self._probation = probation
        self._entries: dict[str, CatalogueEntry] = {}
        self._on_probation: dict[str, CatalogueEntry] = {}
        """The snapshots and candidates of them, for which every step asks."""
        self._left: dict[str, str] = {}
        """Manifests of those that were good in the fast tier and have left it: the run directory's ring may have them.
        As text and without shards, since a long run has thousands of them, and a manifest a line for each rank."""
        self._offered: dict[str, PolicyCheckpoint] = {}
        """What is not held here, and can be fetched from the ring at the URL."""
        for item in held:
            status = CheckpointStatus.GOOD if item.good else CheckpointStatus.CANDIDATE
            self._add(item.manifest, status, item.slot, item.healthy)

    # What comes and goes -------------------------------------------------------------------------------------------

    def add_snapshot(self, manifest: Manifest, slot: int | None = None) -> None:
        """Add a snapshot. Its probation begins now, not with its commit."""
        self._add(manifest, CheckpointStatus.SNAPSHOT, slot)

    def land(self, manifest: Manifest) -> bool:
        """Note that a checkpoint was committed. Returns whether it is good at once, as the state before any step is."""
        entry, good = self._entries[manifest.name], manifest.step == 0
        entry.manifest = manifest
        entry.status = CheckpointStatus.GOOD if good else CheckpointStatus.CANDIDATE
        if good:
            del self._on_probation[manifest.name]
        return good

    def _add(self, manifest: Manifest, status: CheckpointStatus, slot: int | None = None, healthy: int = 0) -> None:
        entry = self._entries[manifest.name] = CatalogueEntry(manifest, status, slot, healthy)
        if status is not CheckpointStatus.GOOD:
            self._on_probation[manifest.name] = entry

    def drop(self, name: str) -> None:
        for known in (self._entries, self._on_probation, self._left, self._offered):
            known.pop(name, None)

    def leave(self, name: str) -> None:
        """Note that a checkpoint leaves the fast tier. A good one can still be restored if the ring has it."""
        entry = self._entries[name]
        self.drop(name)
        if entry.status is CheckpointStatus.GOOD:
            self._left[name] = entry.manifest.model_copy(update={"shards": ()}).model_dump_json()

    def admit(self, manifest: Manifest, good: bool) -> None:
        """Hold a checkpoint again, or one that this attempt has never held."""
        if self.is_held(manifest.name):
            return
        self.drop(manifest.name)
        self._add(manifest, CheckpointStatus.GOOD if good else CheckpointStatus.CANDIDATE)

    def consult(self, in_ring: Collection[str]) -> None:
        """Note what the ring holds, as one rank saw it. Good checkpoints that left the fast tier are held again."""
        for name, entry in list(self._entries.items()):
            if self.is_held(name) and entry.slot is None and name not in in_ring:
                self.drop(name)
        for name in in_ring:
            if (left := self._left.get(name)) is not None:
                self.admit(Manifest.model_validate_json(left), good=True)

    def offer(self, remote: Iterable[PolicyCheckpoint]) -> None:
        """Note what the ring at the URL has, as one rank saw it. What is held here need not be fetched."""
        self._offered = {point.name: point for point in remote if not self.is_held(point.name)}

    # Probation -----------------------------------------------------------------------------------------------------

    def judge(self, healthy: bool, onset: int | None) -> list[Manifest]:
        """Count a verdict. Returns the checkpoints that became good.

        An onset (a watch or a call) stops all probations. When it has passed, checkpoints from after the onset start
        their probation again; those from before it go on. Until then it is not known what they led to.
        """
        if not healthy:
            for entry in self._on_probation.values():
                if onset is not None and entry.manifest.step > onset:
                    entry.healthy = 0
            return []
        passed: list[Manifest] = []
        for entry in self._on_probation.values():
            entry.healthy += 1
            if entry.healthy >= self._probation and entry.status is CheckpointStatus.CANDIDATE:
                entry.status = CheckpointStatus.GOOD
                passed.append(entry.manifest)
        for manifest in passed:
            del self._on_probation[manifest.name]
        return passed

    def about_to_pass(self) -> list[str]:
        """The checkpoints that will be good with the next healthy verdict."""
        passing, candidate = self._probation - 1, CheckpointStatus.CANDIDATE
        waiting = self._on_probation.items()
        return [name for name, entry in waiting if entry.status is candidate and entry.healthy >= passing]

    def restart_probation(self) -> None:
        """Start the probation of all candidates again: the steps after them will be run again."""
        for entry in self._on_probation.values():
            entry.healthy = 0

    # What there is -------------------------------------------------------------------------------------------------

    def is_held(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.status in _HELD

    def is_remote(self, name: str) -> bool:
        """Whether a checkpoint has to be fetched from the ring at the URL before it can be restored."""
        return name in self._offered

    def as_held(self) -> list[PolicyCheckpoint]:
        """The held checkpoints, oldest first, as the policy needs them."""
        good = self._good()
        return [PolicyCheckpoint(m.name, m.step, m.batch, m.name in good) for m in self._in_order()]

    def to_choose_from(self) -> list[PolicyCheckpoint]:
        """The checkpoints that can be restored: those that are held, and those that can be fetched. Oldest first."""
        points = [*self.as_held(), *self._offered.values()]
        return sorted(points, key=lambda point: CheckpointName(point.name).sort_key)

    def manifest(self, name: str) -> Manifest:
        """The manifest of a held checkpoint."""
        return self._entries[name].manifest

    def slot(self, name: str) -> int | None:
        entry = self._entries.get(name)
        return entry.slot if entry is not None else None

    def in_slots(self) -> set[str]:
        """Names of the checkpoints held in the fast tier."""
        return {name for name, entry in self._entries.items() if entry.slot is not None and entry.status in _HELD}

    def newest(self) -> Manifest | None:
        held = self._in_order()
        return held[-1] if held else None

    def surplus(self, keep: int, counted: Collection[str] | None = None) -> list[tuple[str, str]]:
        """Of `counted` (default: all that are held), those that must leave a ring of capacity `keep`, and why."""
        names = [m.name for m in self._in_order() if counted is None or m.name in counted]
        return choose_evictions(names, self._good(), (), keep)

    def _good(self) -> set[str]:
        return {name for name, entry in self._entries.items() if entry.status is CheckpointStatus.GOOD}

    def _in_order(self) -> list[Manifest]:
        held = [entry.manifest for entry in self._entries.values() if entry.status in _HELD]
        return sorted(held, key=lambda manifest: manifest.sort_key)
