"""What a run directory and the memory of the hosts have of a run when an attempt starts.

Rank 0 reads the directory and sends the content to all ranks. Nothing is changed, except for a fetch from a URL.
"""

import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from rollback.checkpoints import ring, tiers
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.tiers import Located
from rollback.config import Settings
from rollback.environment import ENV_ATTEMPT, host_name
from rollback.errors import (
    LET_IT_BE_READ,
    MOVED,
    CheckpointForbidden,
    RollbackError,
    RunDirectoryError,
    RunDoesNotFit,
)
from rollback.facts.fact import escape_surrogates
from rollback.facts.history import History, copy_of, history_as_json
from rollback.facts.training import Accepted, Blamed
from rollback.ring.url.fetch import fetch, unfetch
from rollback.rundir.identity import Identity, JobIdentity, read_identity, require_key, require_same_job
from rollback.rundir.journal.folded_journal import FoldedJournal, fold_journal
from rollback.rundir.journal.journal import of_kind, read_journal
from rollback.rundir.lock import RunLock
from rollback.rundir.paths import RunPaths
from rollback.train.catalogue.draining import only_at_url, reach_ring
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
from rollback.train.run import supervised
from rollback.train.start.start_record import require_a_change


@dataclass
class DirectoryContents:
    """What rank 0 found in the run directory."""

    attempt: int
    manifests: list[Manifest]
    """Of the checkpoints, oldest first."""
    damaged: dict[str, str]
    """Checkpoints in the run directory whose manifest is damaged, and why."""
    blamed: list[Blamed]
    """The data that the supervisor blames crashes on."""
    identity: Identity | None
    accepted: list[Accepted]


_as_json: TypeAdapter[DirectoryContents] = TypeAdapter(DirectoryContents)


@dataclass
class FoundRun(DirectoryContents):
    """That, and what the first rank of each host found in its slots: there `manifests` are, too. All ranks have the
    same."""

    history: History
    slots: dict[str, int]
    """Checkpoints in the slots of all hosts, with the numbers of their slots."""
    in_ring: list[str]
    """Checkpoints in the run directory."""
    strays: list[str]
    """Checkpoints that only some hosts have in their slots."""
    ahead: frozenset[str]
    """Checkpoints in the slots, and nowhere else, that are ahead of the record (`tiers.SlotsLook`)."""
    at_url: list[Manifest]
    """Of newer checkpoints than the run would go on with, which are only in the ring at the URL."""
    unknown_at_url: str | None
    """Why it is not known whether there are any; None: it is."""
    journal: FoldedJournal | None = None
    """Rank 0: the ranks' journal, read once for the whole start."""
    lock: RunLock | None = None
    """Rank 0 has it where no supervisor holds the run directory."""


def read_run(
    paths: RunPaths, job: JobIdentity, ranks: Ranks, settings: Settings, if_refused: contextlib.ExitStack
) -> FoundRun:
    """Collective: read the run directory, and check that the run is this job's. Changes nothing, except for a fetch.

    Rank 0 takes the lock where no supervisor holds it, and fetches the run from a ring at a URL where nobody has done
    so. Raises RollbackError, the same on all ranks. if_refused: gets what the caller must do where it does not come to
    the run: the lock is to be released.
    """
    seen = ranks.first_does(lambda: _look(paths, job, settings, if_refused))
    contents, journal, lock = seen or (None, None, None)
    told: list[str] = []
    if contents is not None and journal is not None and ranks.distributed:  # the others have it from here
        told = [_as_json.dump_json(contents).decode(), history_as_json.dump_json(journal.history).decode()]
    told = ranks.from_first(told)
    contents = contents or _as_json.validate_json(told[0])
    if ranks.apart:
        _require_one_run(paths, contents.identity, ranks)
    in_ring = [manifest.name for manifest in contents.manifests]
    in_memory, slots, strays, ahead = _take_inventory(paths, ranks, in_ring)
    by_name = {manifest.name: manifest for manifest in [*in_memory, *contents.manifests]}
    manifests = sorted(by_name.values(), key=lambda manifest: manifest.sort_key)
    # Rank 0's recorder adds to what it has read; what the ranks decide by must stay alike on all.
    history = copy_of(journal.history) if journal else history_as_json.validate_json(told[1])
    newer, unknown = ranks.first_does(lambda: only_at_url(paths, settings, history, manifests)) or ([], None)
    at_url, unknown = ranks.from_first([[manifest.model_dump(mode="json") for manifest in newer], unknown])
    return FoundRun(
        **{**vars(contents), "manifests": manifests},
        history=history,
        slots=slots,
        in_ring=in_ring,
        strays=strays,
        ahead=ahead,
        at_url=[Manifest.model_validate(manifest) for manifest in at_url],
        unknown_at_url=unknown,
        journal=journal,
        lock=lock,
    )


def _look(
    paths: RunPaths, job: JobIdentity, settings: Settings, if_refused: contextlib.ExitStack
) -> tuple[DirectoryContents, FoldedJournal, RunLock | None]:
    """Rank 0: what the run directory has, the ranks' journal, and the lock."""
    brought: tuple[str, ...] = ()
    accepted: list[Accepted] = []
    try:
        require_key(paths)
        identity = read_identity(paths)
        if identity is not None:
            require_same_job(paths, identity.job, job, accept_data_change=settings.accept_data_change)
        store = reach_ring(settings)
        lock = None if supervised() else RunLock(paths, "the guard of an unsupervised job")
        if lock is not None:
            if_refused.callback(lock.release)
        brought = fetch(store, paths, say) if store is not None else ()
        if (identity := read_identity(paths)) is not None:  # again: it may have been fetched
            accept = settings.accept_data_change
            accepted = require_same_job(paths, identity.job, job, accept_data_change=accept)
        journal = fold_journal(paths.train_journal, to_keep=True)
        require_a_change(paths, settings, journal.history)
        contents = _read(paths, identity, journal.history, accepted)
    except (RollbackError, OSError) as error:
        if isinstance(error, RunDoesNotFit):
            with contextlib.suppress(OSError, RollbackError):
                unfetch(paths, brought)
        if isinstance(error, RollbackError):
            raise
        raise RunDirectoryError(
            f"reading the run directory {paths.root}: {error}",
            hint="see whether its disk can be read, then run the same command again; nothing was changed",
        ) from error
    return contents, journal, lock


def _read(paths: RunPaths, identity: Identity | None, history: History, accepted: list[Accepted]) -> DirectoryContents:
    manifests, damaged = ring.manifests(paths)
    if forbidden := next((error for error in damaged.values() if isinstance(error, CheckpointForbidden)), None):
        raise CheckpointForbidden(forbidden.message, hint=LET_IT_BE_READ)
    if identity is None and (manifests or damaged):
        raise RunDirectoryError(
            f"{paths.root} has checkpoints but no run.json, so it cannot be told whose they are",
            hint=f"restore run.json from a copy, or use another run directory; {MOVED.format(paths.root)}",
        )
    return DirectoryContents(
        attempt=int(os.environ.get(ENV_ATTEMPT) or history.last_attempt + 1),
        manifests=manifests,
        damaged={name: escape_surrogates(error.message) for name, error in damaged.items()},
        blamed=[fact for _, fact in of_kind(read_journal(paths.supervisor_journal).records, Blamed)],
        identity=identity,
        accepted=accepted,
    )


@dataclass(frozen=True)
class InSlot:
    """A checkpoint in a slot. content: its identity, by its hashes; see `Manifest.content`."""

    slot: int
    name: str
    content: str


def _take_inventory(
    paths: RunPaths, ranks: Ranks, in_ring: Collection[str]
) -> tuple[list[Manifest], dict[str, int], list[str], frozenset[str]]:
    """Collective: what is in the slots, the same on all ranks. The first rank of each host looks into them.

    Manifests and slots of the checkpoints that every host has in the slot of the same number: only these can be used.
    Then strays and what is ahead, as `FoundRun` has them. in_ring: names of the checkpoints in the run directory, which
    are these and not what memory has ahead of it.
    """
    look = tiers.look_into_slots(paths) if ranks.first_of_host else tiers.SlotsLook([], [], {})
    places = [place for place in [*look.usable, *look.ahead] if is_enough(place, ranks)]
    told = [[place.slot, place.name, place.manifest.content] for place in places]
    answers = ranks.from_each(told if ranks.first_of_host else None)
    names = set[str]().union(*ranks.from_each([place.name for place in look.ahead]))
    held, strays = common([[InSlot(*item) for item in answer] for answer in answers if answer is not None])
    held = [item for item in held if item.name not in names.intersection(in_ring)]
    slots = {item.name: item.slot for item in held}
    own = [place.manifest.model_dump(mode="json") for place in places if slots.get(place.name) == place.slot]
    manifests = [Manifest.model_validate(body) for body in ranks.from_first(own)]
    return manifests, slots, strays, frozenset(names & slots.keys())


def is_enough(place: Located, ranks: Ranks) -> bool:
    """Whether a slot of this host has the shards that its ranks read: all if there is one host, else their own."""
    shards = place.manifest.shards
    if ranks.host_count > 1:
        if place.manifest.world_size != ranks.world_size:
            return False
        shards = tuple(shards[rank] for rank in ranks.on_this_host)
    return all(os.path.exists(place.directory / shard.file) for shard in shards)


def common(hosts: Sequence[Sequence[InSlot]]) -> tuple[list[InSlot], list[str]]:
    """What all hosts have in common, and the names of the rest. Pure."""
    held = [item for item in hosts[0] if all(item in host for host in hosts)]
    return held, sorted({item.name for host in hosts for item in host} - {item.name for item in held})


def _require_one_run(paths: RunPaths, identity: Identity | None, ranks: Ranks) -> None:
    """Collective: raise RunDoesNotFit, on all ranks, where a host's directory holds another run than rank 0's. Each has
    the run's `run.json`, so that it is known whose it is.

    identity: the content of rank 0's run.json; None: the run begins.
    """

    def require_own() -> None:
        hint = "name another directory with --run DIR there; nothing was changed"
        try:
            own = read_identity(paths)
        except RollbackError as error:
            raise RunDoesNotFit(f"on {host_name()}: {error.message}", hint=hint) from error
        expected = identity.run_id if identity is not None else None
        if own is not None and own.run_id != expected:
            there = f"run {expected}" if expected is not None else "no run yet"
            raise RunDoesNotFit(
                f"the run directory {paths.root} on {host_name()} belongs to run {own.run_id}; rank 0's, and the ring, "
                f"have {there}",
                hint=hint,
            )

    ranks.agreed(require_own if ranks.first_in_directory and not ranks.is_rank_0 else lambda: None)
