"""Makes the parts of a guard that take, keep and drain checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass

from rollback.checkpoints import tiers
from rollback.ring.drainer import Drainer
from rollback.ring.helper import Helper
from rollback.train.catalogue.catalogue import Catalogue
from rollback.train.catalogue.draining import start_draining
from rollback.train.catalogue.host_copies import HostCopies
from rollback.train.catalogue.remote import RemoteRing
from rollback.train.run import AttachedRun
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.snapshots.tier_choice import open_tier
from rollback.train.state.state import TrainingState


@dataclass(frozen=True)
class CheckpointSide:
    """The parts of a guard that see to its checkpoints."""

    snapshots: Snapshots
    """Snapshots on their way to becoming checkpoints."""
    manager: CheckpointManager
    """The manager of the existing checkpoints."""
    schedule: SnapshotSchedule
    """Decides when the next snapshot is taken."""
    drainer: Drainer | Helper | None
    """Copies checkpoints to the durable ring; None: another process does."""


def checkpoint_side(run: AttachedRun, state: TrainingState, show: Callable[[str], None]) -> CheckpointSide:
    """Collective: make these parts. show: gets what this rank is doing, for its heartbeat."""
    paths, ranks, record, settings = run.paths, run.ranks, run.record, run.settings
    tier = open_tier(paths, ranks, run.run_id, tiers.base_of(settings.fast_tier))
    drainer = start_draining(paths, settings, record, ranks)
    fast, taken = None, run.slots.values()
    if tier[0] is not None:
        fast = FastTier(tier[0], ranks.rank, leads=ranks.first_of_host, here=ranks.on_this_host, taken=taken)
    snapshots = Snapshots(paths, ranks, run.next_seq, run.attempt, fast)
    in_slots = run.slots if fast is not None else {}
    catalogue = Catalogue(settings.probation, run.manifests, run.history.good, in_slots)
    remote = RemoteRing(paths, ranks, record, settings.ring, show) if settings.ring else None
    copies = HostCopies(paths, ranks, settings.ring, show) if ranks.apart else None
    manager = CheckpointManager(paths, ranks, snapshots, catalogue, record, settings.keep, remote, copies)
    began_at = run.restored.step if run.restored is not None else None
    schedule = SnapshotSchedule(settings, ranks, state, snapshots, manager, record, tier, began_at)
    return CheckpointSide(snapshots, manager, schedule, drainer)
