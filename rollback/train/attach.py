"""Attaching to a run directory: is it ours, where do we go on, and only then: write.

Rank 0 reads, every rank gets what it read. All refusals happen before anything in the directory is changed, and on
all ranks alike.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from rollback import errors
from rollback.config import ENV_ATTEMPT, ENV_REFUSAL, ENV_RUN, ENV_SUPERVISOR, Settings
from rollback.errors import NoUsableCheckpoint, RollbackError, RunDirectoryError
from rollback.events import Accepted, Attached, Blamed, Evicted, Quarantined, Restored, SkipAdded, Tier
from rollback.events import Record as JournalRecord
from rollback.rundir import ring, tiers
from rollback.rundir.history import History, fold
from rollback.rundir.identity import Identity, Job, new_identity, read_identity, require_same_job, write_identity
from rollback.rundir.journal import read_journal
from rollback.rundir.lock import RunLock
from rollback.rundir.manifest import Manifest
from rollback.rundir.paths import RunPaths
from rollback.rundir.resume import candidates, is_provisional, next_seq, of_present_timeline
from rollback.rundir.slots import SlotPaths
from rollback.train.draining import fetch_run, reach_ring
from rollback.train.inventory import take_inventory
from rollback.train.ranks import Ranks
from rollback.train.record import Record, say
from rollback.train.restoring import Place, restore
from rollback.train.state import TrainingState


def supervised(environment: Mapping[str, str] = os.environ) -> bool:
    return bool(environment.get(ENV_SUPERVISOR))


def run_paths(given: str | os.PathLike[str] | None, environment: Mapping[str, str] = os.environ) -> RunPaths:
    """The supervisor's run directory, else the script's, else runs/<script name>."""
    chosen = environment.get(ENV_RUN) or given or Path("runs") / (Path(sys.argv[0]).stem or "python")
    return RunPaths(Path(chosen).absolute())


def refuse(error: RollbackError, rank: int) -> NoReturn:
    """End this rank because of `error`. All ranks must come here with the same error.

    Under a supervisor the error goes to it by file and the rank exits with 0: torchrun would bury both message and
    status. Otherwise the error is raised as it is.
    """
    destination = os.environ.get(ENV_REFUSAL)
    if not destination:
        raise error
    if rank == 0:
        body = {"exit_code": int(error.exit_code), "message": error.message, "hint": error.hint}
        Path(destination).write_text(json.dumps(body), encoding="utf-8")
    raise SystemExit(0)


@dataclass
class Reading:
    """What rank 0 found in the run directory, and the first rank of each host in its slots; the same on all ranks.

    manifests: of all checkpoints, oldest first. slots: those in the slots of all hosts, with their numbers. in_ring:
    those in the run directory. damaged: those in the run directory whose manifest cannot be believed, and why. strays:
    names of those that are in the slots of some hosts only.
    """

    attempt: int
    history: History
    manifests: list[Manifest]
    slots: dict[str, int]
    in_ring: list[str]
    damaged: dict[str, str]
    strays: list[str]
    blamed: list[SkipAdded]
    """Skips that the supervisor has decided on."""
    identity: Identity | None
    accepted: list[Accepted]


def read_run(paths: RunPaths, job: Job, ranks: Ranks, settings: Settings) -> tuple[Reading, RunLock | None]:
    """Collective: read the run directory and check that this job is the run's. Changes nothing but what is fetched.

    Raises RollbackError, the same on all ranks. The lock is taken by rank 0 where no supervisor holds it; where there
    is a ring at a URL from which nobody has fetched yet, it does that too.
    """
    lock: RunLock | None = None
    body: dict[str, Any] = {}
    accepted: list[Accepted] = []
    if ranks.first:
        try:
            identity = read_identity(paths)
            if identity is not None:
                require_same_job(paths, identity.job, job, accept_data_change=settings.accept_data_change)
            store = reach_ring(settings)
            lock = None if supervised() else RunLock(paths, "the guard of an unsupervised job")
            fetch_run(store, paths, settings)
            if (identity := read_identity(paths)) is not None:  # once more: it may have been fetched
                accept = settings.accept_data_change
                accepted = require_same_job(paths, identity.job, job, accept_data_change=accept)
            body = {**_read(paths, identity), "accepted": [fact.model_dump(mode="json") for fact in accepted]}
        except (RollbackError, OSError) as failure:
            error = failure if isinstance(failure, RollbackError) else _refused_by_disk(paths, failure)
            body = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            if lock is not None:
                lock.release()
    body = ranks.from_first(body)
    if "error" in body:
        raise getattr(errors, body["error"])(body["message"], hint=body["hint"])
    in_memory = take_inventory(paths, ranks)
    in_ring = [Manifest.model_validate(manifest) for manifest in body["manifests"]]
    manifests = {manifest.name: manifest for manifest in [*in_memory.manifests, *in_ring]}
    reading = Reading(
        attempt=body["attempt"],
        history=fold(JournalRecord.model_validate(record) for record in body["records"]),
        manifests=sorted(manifests.values(), key=lambda manifest: manifest.seq),
        slots=in_memory.slots,
        in_ring=[manifest.name for manifest in in_ring],
        damaged=body["damaged"],
        strays=in_memory.strays,
        blamed=[SkipAdded.model_validate(added) for added in body["blamed"]],
        identity=Identity.model_validate(body["identity"]) if body["identity"] else None,
        accepted=[Accepted.model_validate(fact) for fact in body["accepted"]],
    )
    return reading, lock


def _refused_by_disk(paths: RunPaths, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(
        f"reading the run directory {paths.root}: {error}",
        hint="see whether its disk can be read, then run the same command again; nothing was changed",
    )


def _read(paths: RunPaths, identity: Identity | None) -> dict[str, Any]:
    records = read_journal(paths.train_journal).records
    last = max((record.attempt for record in records), default=0)
    manifests, damaged = ring.manifests(paths)
    if identity is None and (manifests or damaged):
        raise RunDirectoryError(
            f"{paths.root} has checkpoints but no run.json, so it cannot be told whose they are",
            hint="restore run.json from a copy, or use another run directory",
        )
    return {
        "attempt": int(os.environ.get(ENV_ATTEMPT) or last + 1),
        "records": [json.loads(record.model_dump_json()) for record in records],
        "manifests": [json.loads(manifest.model_dump_json()) for manifest in manifests],
        "damaged": damaged,
        "blamed": [added.model_dump() for added in _blamed(paths)],
        "identity": identity.model_dump(mode="json") if identity else None,
    }


def _blamed(paths: RunPaths) -> list[SkipAdded]:
    """What the supervisor's journal says about batches on which a rank raised twice."""
    facts = [record.fact for record in read_journal(paths.supervisor_journal).records]
    return [
        SkipAdded(
            window=fact.window,
            who="the supervisor",
            why=f"the same exception in attempts {' and '.join(map(str, fact.attempts))} (fingerprint "
            f"{fact.fingerprint}): {fact.error}",
        )
        for fact in facts
        if isinstance(fact, Blamed)
    ]


@dataclass
class Attachment:
    """An attached run: where it stands and with what it goes on. slots: in use, by checkpoint."""

    run_id: str
    record: Record
    history: History
    manifests: list[Manifest]
    slots: dict[str, int]
    restored: Manifest | None
    attempt: int
    next_seq: int


def attach(paths: RunPaths, reading: Reading, state: TrainingState, ranks: Ranks, settings: Settings) -> Attachment:
    """Collective: restore what the run's record says, then write the first lines of this attempt.

    The first write happens here. Raises RollbackError, the same on all ranks.
    """
    history, damaged, slots = reading.history, dict(reading.damaged), dict(reading.slots)
    state.cursor.accepts_other_length = history.other_data or any(fact.what == "data" for fact in reading.accepted)
    chosen: Manifest | None = None
    source: Place | None = None
    places = _places(paths, reading)
    for manifest in candidates(history, reading.manifests):
        result = restore(manifest.name, places[manifest.name], ranks, state)
        if any(place.in_slot for place, _ in result.faults):
            del slots[manifest.name]
            say(f"checkpoint {manifest.name} in the fast tier cannot be used: {result.fault}")
        if result.place is not None:
            chosen, source = manifest, result.place
            break
        damaged[manifest.name] = result.fault
    lost = history.committed.keys() - history.gone - history.discarded
    if chosen is None and (reading.manifests or damaged or lost):
        damaged = {**dict.fromkeys(sorted(lost, reverse=True), "it is not in the ring any more"), **damaged}
        listed = "".join(f"\n  - {name}: {why}" for name, why in list(damaged.items())[:6])
        raise NoUsableCheckpoint(
            f"none of the checkpoints in {paths.ring} can be used:{listed}",
            hint="restore the ring from a copy, or start anew with another run directory (--run DIR)",
        )
    run_id, record = _first_writes(paths, reading, state, ranks)
    for fact in reading.accepted:
        record.note(fact, fact.in_words())
    for name, reason in damaged.items():
        if ranks.first and os.path.lexists(paths.checkpoint(name)):
            _quarantine(paths, name)
        record.note(Quarantined(checkpoint=name, reason=reason), f"checkpoint {name} cannot be used: {reason}")
    given = [SkipAdded(window=w, who="settings", why="given at the start of an attempt") for w in settings.skip]
    for added in [*given, *reading.blamed]:
        if added.window not in [known.window for known in history.added]:
            history.added.append(added)
            record.note(added)
    record.note(
        Attached(
            world_size=ranks.world_size, host=socket.gethostname(), pid=os.getpid(), supervised=supervised(),
            checkpoint=chosen.name if chosen else None, step=state.counters.step, batch=state.cursor.batch,
            torch=torch.__version__, settings=settings.model_dump(mode="json", exclude_defaults=True),
            ranks_before=chosen.world_size if chosen and chosen.world_size != ranks.world_size else None,
            tier=source.tier if source else None,
        ),
        _where(history, chosen) if chosen else None,
    )  # fmt: skip
    if chosen is not None:
        _finish_pending_plan(history, chosen, source.tier if source else None, record)
    sound = [manifest for manifest in reading.manifests if manifest.name not in damaged]
    held = [
        manifest for manifest in of_present_timeline(history, sound)
        if manifest == chosen or not is_provisional(history, manifest)
    ]  # fmt: skip
    if ranks.first:
        cut_off = [m.name for m in sound if m not in held and m.name in reading.in_ring]
        _evict_what_was_cut_off(paths, cut_off, record)
    seq = next_seq(history, [*damaged, *reading.strays, *(manifest.name for manifest in reading.manifests)])
    slots = {manifest.name: slots[manifest.name] for manifest in held if manifest.name in slots}
    return Attachment(run_id, record, history, held, slots, chosen, reading.attempt, seq)


def _where(history: History, chosen: Manifest) -> str:
    """For people: where the run goes on."""
    end = history.finished
    if end is None or chosen.name != end.checkpoint:
        return f"resuming at step {chosen.step}, batch {chosen.batch} ({chosen.name})"
    by = f", by {end.by}" if end.by else ""
    lost = f"; {end.left_over} batches behind its last update do not count if it goes on" if end.left_over else ""
    return f"the run is complete: it ended at step {end.step}{by} (final state: {end.checkpoint}){lost}"


def _places(paths: RunPaths, reading: Reading) -> dict[str, list[Place]]:
    """Where this rank looks for each checkpoint: as many places on every rank, though its host may not have them."""
    tier = tiers.fast_tier_of(paths)
    places = {}
    for manifest in reading.manifests:
        name, found = manifest.name, []
        if (number := reading.slots.get(name)) is not None:
            found.append(Place((tier or SlotPaths(paths.fast_pointer)).slot(number), in_slot=True))
        if name in reading.in_ring:
            found.append(Place(paths.checkpoint(name)))
        places[name] = found
    return places


def _first_writes(paths: RunPaths, reading: Reading, state: TrainingState, ranks: Ranks) -> tuple[str, Record]:
    """The run's id, and the pen that its journal is written with."""
    fault, run_id = "", ""
    record: Record | None = None
    advised = reading.history.advised
    if ranks.first:
        try:
            for directory in (paths.ring, paths.ranks, paths.skips):
                directory.mkdir(parents=True, exist_ok=True)
            job = state.job(ranks.world_size)
            if reading.identity is None:
                write_identity(paths, new_identity(job))
            elif reading.accepted:
                write_identity(paths, reading.identity.model_copy(update={"job": job}))
            ring.sweep(paths)
            identity = read_identity(paths)
            run_id = identity.run_id if identity else ""
            record = Record(paths, reading.attempt, first=True, advised=advised)
        except (OSError, RollbackError) as error:
            fault = f"writing to the run directory {paths.root}: {error}"
    fault, run_id = ranks.from_first([fault, run_id])
    if fault:
        raise RunDirectoryError(fault, hint="check the permissions and the free space of the run directory")
    return run_id, record or Record(paths, reading.attempt, first=False)


def _quarantine(paths: RunPaths, name: str) -> None:
    try:
        ring.quarantine(paths, name)
    except OSError as error:
        say(f"moving checkpoint {name} to quarantine failed ({error}); it stays where it is and is not used")


def _evict_what_was_cut_off(paths: RunPaths, names: list[str], record: Record) -> None:
    """Rank 0: a crash came between a plan and the eviction of what it discards."""
    for name in names:
        try:
            evicted = ring.evict(paths, name)
        except OSError as error:
            say(f"evicting checkpoint {name} failed ({error}); it stays where it is and is not used")
            continue
        if evicted:
            record.note(Evicted(checkpoint=name, reason="beyond where the run goes on"))


def _finish_pending_plan(history: History, chosen: Manifest, tier: Tier | None, record: Record) -> None:
    """The plan that a crash interrupted has just been carried out by way of this attempt."""
    if history.pending is None:
        return
    case = history.cases[-1]
    case.restored = Restored(
        incident=case.incident.incident, checkpoint=chosen.name, step=chosen.step, batch=chosen.batch,
        steps_lost=case.incident.step - chosen.step, seconds=0.0, route="relaunch", tier=tier,
    )  # fmt: skip
    record.note(case.restored, f"the rollback that was under way is carried out: step {chosen.step}")
