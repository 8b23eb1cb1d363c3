"""The durable ring of a run without a supervisor: rank 0 fetches from it and fills it."""

import json
import os
from collections.abc import Sequence

from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import candidates, on_record
from rollback.config import Settings
from rollback.environment import ENV_SETTINGS, text_in
from rollback.errors import CheckpointDamaged, RollbackError, message_of
from rollback.facts.history import History, in_durable_ring
from rollback.ring.drainer import Drainer, DrainPhase, drainer_for
from rollback.ring.shard_copier import ShardCopier
from rollback.ring.url.fetch import read_manifest_at
from rollback.ring.url.store import Store
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder, say
from rollback.train.run import supervised

_PATIENCE_AT_START = 30.0
_PATIENCE_AT_THE_END = 60.0


def reach_ring(settings: Settings) -> Store | None:
    """Rank 0: the ring to fetch from, after a test object was written and read back. None: there is nothing to fetch.

    A supervisor that knows of the ring has fetched already. If only the script names the ring, it has not.
    Raises UsageError or RingUnavailable.
    """
    if settings.ring is None or (supervised() and _is_the_operators()):
        return None
    store = Store(settings.ring, patience=_PATIENCE_AT_START)
    store.probe()
    return store


def only_at_url(
    paths: RunPaths, settings: Settings, history: History, here: Sequence[Manifest]
) -> tuple[list[Manifest], str | None]:
    """Rank 0: the manifests of the checkpoints at the URL that are newer than what the run would go on with here, and
    why they are not known; None: they are.

    A host that was lost has taken with it what the slots had: then the newest checkpoint is at the URL. Where the slots
    have it, nothing is asked; nor is of those that a rollback has cut off. What cannot be read there is said, and left
    out.
    """
    if settings.ring is None:
        return [], None
    newest = next((manifest.seq for manifest in candidates(history, here)), -1)
    try:
        there = [*in_durable_ring(fold_journal(paths.supervisor_journal).history)]
        if history.pending is not None and history.pending.checkpoint is not None:
            there.append(history.pending.checkpoint)  # whoever has copied it
        wanted = [name for name in on_record(history, there) if name.seq > newest]
        store = Store(settings.ring, patience=_PATIENCE_AT_START) if wanted else None
        found = [_manifest_at(store, name) for name in wanted] if store is not None else []
    except (RollbackError, OSError) as error:
        say(f"what the ring {settings.ring} has is not known: {message_of(error)}")
        return [], message_of(error)
    return [manifest for manifest in found if manifest is not None], None


def _manifest_at(store: Store, name: CheckpointName) -> Manifest | None:
    """None: it is not there, or damaged, which is said."""
    try:
        return read_manifest_at(store, name)
    except CheckpointDamaged as error:
        say(f"checkpoint {name} in the ring is left out: {error.message}")
        return None


def start_draining(paths: RunPaths, settings: Settings, record: Recorder, ranks: Ranks) -> Drainer | ShardCopier | None:
    """Called by every rank when it is attached. Without supervisors, rank 0 fills the ring from a thread, and the first
    rank of each other host copies the parts of its host. Where there is no thread to be had, the rest trains on."""
    if supervised() or not ranks.first_of_host:
        return None
    copier = None if ranks.is_rank_0 else ShardCopier(paths, f"rank-{ranks.rank:05d}", say)
    drainer = copier or drainer_for(paths, settings, record.note, say)
    try:
        if drainer is not None:
            drainer.start()
    except RollbackError as error:
        say(f"the durable ring is not filled: {error}")
        return None
    return drainer


def end_draining(drainer: Drainer | ShardCopier | None) -> None:
    """Wait until the rest is copied, or is known to fail."""
    if drainer is None:
        return
    if isinstance(drainer, ShardCopier):
        drainer.linger(_PATIENCE_AT_THE_END)
        drainer.close(over=True)
        return
    drainer.finish()
    if not drainer.wait(DrainPhase.FINISHED, _PATIENCE_AT_THE_END):
        say("there is no time left to copy the newest checkpoint to the durable ring")
        drainer.give_up()
    drainer.close()
    drainer.wait(DrainPhase.CLOSED, _PATIENCE_AT_THE_END)


def _is_the_operators() -> bool:
    given = text_in(os.environ, ENV_SETTINGS)
    return bool(given and json.loads(given).get("ring"))
