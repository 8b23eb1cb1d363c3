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
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
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
    fast, taken, held = None, run.slots.values(), run.manifests
    if tier[0] is not None:
        fast = FastTier(tier[0], ranks.rank, leads=ranks.first_of_host, here=ranks.on_this_host, taken=taken)
    else:  # what is in slots alone is not lost: a later attempt may find it
        held = [manifest for manifest in run.manifests if manifest.name in run.in_ring]
    if out_of_reach := [manifest.name for manifest in run.manifests if manifest not in held]:
        _tell_what_is_out_of_reach(out_of_reach, tier[1], ranks)
    snapshots = Snapshots(paths, ranks, run.next_seq, run.attempt, fast)
    in_slots = run.slots if fast is not None else {}
    catalogue = Catalogue(settings.probation, held, run.history.good, in_slots)
    remote = RemoteRing(paths, ranks, record, settings.ring, show) if settings.ring else None
    copies = HostCopies(paths, ranks, settings.ring, show) if ranks.apart else None
    manager = CheckpointManager(paths, ranks, snapshots, catalogue, record, settings.keep, remote, copies)
    manager.wanting = bool(out_of_reach)
    began_at = run.restored.step if run.restored is not None else None
    schedule = SnapshotSchedule(settings, ranks, state, snapshots, manager, record, tier, began_at)
    return CheckpointSide(snapshots, manager, schedule, drainer)


def _tell_what_is_out_of_reach(names: list[str], why: str, ranks: Ranks) -> None:
    if ranks.first:
        count = "1 checkpoint is" if len(names) == 1 else f"{len(names)} checkpoints are"
        say(
            f"{count} in memory alone, and this attempt cannot go back there, since it has no fast tier ({why}); the "
            "next checkpoint is taken as soon as there is room for it"
        )
