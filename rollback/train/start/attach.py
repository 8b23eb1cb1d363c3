"""Attaches to a run directory: checks that the run is this job's, restores, and only then writes.

Every refusal comes before anything in the directory is changed, and on all ranks.
"""

import contextlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from rollback.checkpoints import resume, ring, tiers
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.manifest import Manifest
from rollback.config import Settings
from rollback.environment import ENV_NO_RUN, ENV_REFUSAL, ENV_RUN, guard_mark, host_name
from rollback.errors import (
    LET_IT_BE_READ,
    CheckpointForbidden,
    CheckpointOutOfReach,
    CheckpointUnusable,
    NoUsableCheckpoint,
    RollbackError,
    RunDirectoryError,
    RunDoesNotFit,
    StateRefused,
    UsageError,
    message_of,
)
from rollback.facts.history import History, in_durable_ring
from rollback.facts.training import Attached
from rollback.rundir.identity import Identity, new_identity, read_identity, require_key, write_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths, format_for
from rollback.system import files
from rollback.train.advice.own_snapshot import traces_of
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.catalogue.remote import HostCopies
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder, say
from rollback.train.data import rng
from rollback.train.restore.restore import restore
from rollback.train.run import AttachedRun, CheckpointAtStart, require_first, supervised
from rollback.train.sharded import sharding_of
from rollback.train.snapshots.capture import share_of
from rollback.train.start import start_record
from rollback.train.start.found_run import FoundRun, read_run
from rollback.train.start.initial import INIT_NOT_READ, begin_with
from rollback.train.state.module_buffers import NOT_IN_CHECKPOINT, NOT_KEPT
from rollback.train.state.nonfinite import union
from rollback.train.state.state import TrainingState


def run_paths(given: str | os.PathLike[str] | None) -> RunPaths:
    """The supervisor's run directory, else the script's, else runs/<script name>."""
    chosen = os.environ.get(ENV_RUN) or given or Path("runs") / (Path(sys.argv[0]).stem or "python")
    return RunPaths(Path(chosen).absolute())


def meet() -> Ranks:
    """Collective. Tell the supervisor, if there is one, that the script has a guard. A guard does this first.

    Raises RollbackError, on all ranks, where the supervisor could not use the run directory; UsageError in a process
    that a rank starts.
    """
    _require_rank()
    if destination := os.environ.get(ENV_REFUSAL):
        with contextlib.suppress(OSError):  # then the supervisor finds the guard by the run directory
            guard_mark(destination).touch()
    if given := os.environ.get(ENV_NO_RUN):
        raise RollbackError(**json.loads(given))
    ranks = Ranks()
    ranks.meet()
    return ranks


def _require_rank() -> None:
    """Raises UsageError where this is a process of spawn or forkserver that imports the script of a rank: it would
    train a second time, on the same run."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "the script trains where it is imported: each process that it starts by spawn or forkserver, as workers of "
            "a DataLoader, runs it again",
            hint='put what trains into a function, and call that under `if __name__ == "__main__":`',
        )


def refuse(error: RollbackError, *, status: int = 0) -> NoReturn:
    """End this rank because of `error`.

    Under a supervisor the first rank writes the error to a file, since torchrun passes on neither message nor status.
    The rank then exits with `status`: 0 where all ranks come here; not 0 where other ranks may wait for this one, so
    that torchrun ends them. Without a supervisor, and where that file cannot be written, the error is raised.
    """
    destination = os.environ.get(ENV_REFUSAL)
    if not destination:
        raise error
    try:
        with contextlib.suppress(FileExistsError), open(destination, "x", encoding="utf-8") as file:
            file.write(json.dumps(error.fields))
    except OSError as failure:
        raise error from failure
    raise SystemExit(status)


def attach(paths: RunPaths, state: TrainingState, ranks: Ranks, settings: Settings) -> AttachedRun:
    """Collective: check the run, restore, then write the first lines of this attempt.

    Nothing is written before. Raises RollbackError, the same on all ranks.
    """
    if supervised():  # else the lock tells, and a guard that was closed may be followed by another, as in a notebook
        require_first(paths)
    ranks.agreed(lambda: start_record.require_samples(settings, state.cursor))  # a rank may have a data set of its own
    job = state.job(ranks.world_size)
    with contextlib.ExitStack() as if_refused:
        found = read_run(paths, job, ranks, settings, if_refused)
        run = _go_on(paths, found, state, ranks, settings)
        start_record.tell_of_unequal_epochs(ranks.from_each(job.data.get("batches")), run.record)
        if_refused.pop_all()
    return run


def _restore_newest(
    paths: RunPaths, found: FoundRun, state: TrainingState, ranks: Ranks, url: str | None
) -> tuple[Manifest, CheckpointPlace] | None:
    """Collective: restore the newest usable checkpoint. Returns it and its place; None: the run has no checkpoint yet.

    Unusable checkpoints are noted in `found`. Raises NoUsableCheckpoint where there are or were checkpoints, and none
    is usable; CheckpointOutOfReach where there may be one at the URL, which cannot be read; CheckpointForbidden where
    the next one to try may not be read; and RunDoesNotFit where an object of the job does not load the state that the
    run has of it.
    """
    history, damaged = found.history, found.damaged
    unreached: CheckpointOutOfReach | None = None
    if history.pending is None:  # else the plan's own order stands, in which an older one serves
        _require_known(found, url)
    places = _places(paths, found, HostCopies(paths, ranks, url).bring if ranks.apart or found.at_url else None)
    for manifest in resume.candidates(history, [*found.manifests, *found.at_url], found.ahead):
        try:
            result = restore(manifest.name, places[manifest.name], ranks, state)
        except StateRefused as error:
            raise RunDoesNotFit(f"{error.message}; nothing was written to {paths.root}", hint=error.hint) from error
        if any(place.in_slot for place, _ in result.faults):
            del found.slots[manifest.name]
            say(f"checkpoint {manifest.name} in the fast tier cannot be used: {result.fault.message}")
        if isinstance(result.unsettled, CheckpointForbidden):
            raise CheckpointForbidden(result.unsettled.message, hint=LET_IT_BE_READ)
        if result.unsettled is not None:  # also of one that is here and not whole, where a sound copy is to be fetched
            unreached = CheckpointOutOfReach(
                f"{manifest.name}, with which the run goes on, cannot be had{' on every host' if ranks.apart else ''}: "
                f"{result.unsettled.message}",
                hint="the checkpoint may be sound: the same command goes on with it once the ring can be reached and "
                "there is room for it",
            )
            if ranks.apart or history.pending is None:  # no older one either, if it has to be fetched
                raise unreached
            if ranks.is_rank_0:
                say(f"checkpoint {manifest.name} cannot be used in this attempt: {result.unsettled.message}")
            continue
        if result.place is not None:
            _note_restored(found, manifest, max(ranks.from_each(result.reread)), ranks)
            return manifest, result.place
        damaged[manifest.name] = result.fault.message
    if unreached is not None:
        raise unreached
    lost = history.committed.keys() - history.left_run_directory - history.discarded
    _require_known(found, url)
    if not (found.manifests or damaged or lost):
        return None
    raise _none_is_usable(paths, history, lost, damaged, ranks, url)


def _note_restored(found: FoundRun, manifest: Manifest, put_back: int, ranks: Ranks) -> None:
    """The run goes on with this checkpoint. put_back: how many frozen weights, on the rank with most of them."""
    if put_back and ranks.is_rank_0:
        say(f"{put_back} frozen weights of the model are not those of the run: they were put back")
    if manifest in found.at_url:
        found.manifests.append(manifest)
        found.in_ring.append(manifest.name)
    if resume.is_on_record(found.history, manifest, found.ahead):
        found.damaged.update(start_record.not_on_record(found.history, found.manifests, found.ahead))


def _require_known(found: FoundRun, url: str | None) -> None:
    """Raises CheckpointOutOfReach where the ring at the URL has a newer checkpoint by the record, and cannot be read:
    nothing speaks against that checkpoint."""
    if found.unknown_at_url is not None:
        raise CheckpointOutOfReach(
            f"the newest checkpoint is in the ring {url}, which cannot be read: {found.unknown_at_url}",
            hint="the same command goes on with it once the ring can be reached",
        )


def _none_is_usable(
    paths: RunPaths, history: History, lost: set[str], damaged: Mapping[str, str], ranks: Ranks, url: str | None
) -> NoUsableCheckpoint:
    """Collective: the refusal, with why each one is of no use. lost: those on record that are nowhere."""

    def copied_by_supervisor() -> list[str]:
        return sorted(in_durable_ring(fold_journal(paths.supervisor_journal).history)) if ranks.is_rank_0 else []

    copied = {*ranks.from_first(ranks.agreed(copied_by_supervisor))}.union(*history.drained.values())
    in_memory = {name for name in lost - copied if history.committed[name].tier == "fast"}
    gone = {
        name: "it was in memory only, which is gone" if name in in_memory else "it is not in the ring any more"
        for name in sorted(lost, reverse=True)
    }
    listed = "".join(f"\n  - {name}: {why}" for name, why in list({**gone, **damaged}.items())[:6])
    if in_memory == {*gone, *damaged}:
        return NoUsableCheckpoint(
            f"no checkpoint of the run {paths.root} is left; none had reached {url or paths.ring} yet:{listed}",
            hint="there is nothing to go on from: start anew with another run directory (--run DIR)",
        )
    return NoUsableCheckpoint(
        f"none of the checkpoints in {paths.ring} can be used:{listed}",
        hint="restore the ring from a copy, or start anew with another run directory (--run DIR)",
    )


def _go_on(paths: RunPaths, found: FoundRun, state: TrainingState, ranks: Ranks, settings: Settings) -> AttachedRun:
    """Collective: restore, and write the first lines of this attempt."""
    history, damaged = found.history, found.damaged
    state.cursor.accepts_other_length = history.other_data or settings.accept_data_change
    traces = traces_of(state)
    drawn_so_far = rng.capture()
    chosen, source = _restore_newest(paths, found, state, ranks, settings.ring) or (None, None)
    if history.finished is None:  # else no loop may begin any more, and what is behind it goes on from the end
        rng.restore(drawn_so_far)  # what the script draws before its loop begins is what it drew at the first start
    init = begin_with(settings.init, state, ranks) if settings.init and chosen is None else None
    found_so = state.finite.begin(share_of(state.image(), ranks).tensors)
    state.finite.accept(union(ranks.from_each(found_so)))
    run_id, record = _first_writes(paths, found, state, ranks)
    for fact in found.accepted:
        record.note(fact, fact.in_words())
    start_record.put_aside(paths, damaged, found.slots, ranks, record)
    there = {*damaged, *(manifest.name for manifest in found.manifests)}
    if ranks.is_rank_0:
        start_record.take_over_last_snapshot(paths, history, chosen, record)
    start_record.leave_out_what_is_new(history, found.blamed, settings, state.cursor.batch, record)
    if ranks.is_rank_0:
        start_record.tell_what_is_not_on_record(history, found.manifests, found.ahead, chosen, record)
    ranks_before = chosen.world_size if chosen and chosen.world_size != ranks.world_size else None
    begun = f"begins with {init.in_words()}" if init else None
    record.note(
        Attached(
            world_size=ranks.world_size, host=socket.gethostname(), pid=os.getpid(), supervised=supervised(),
            checkpoint=chosen.name if chosen else None, step=state.counters.step, batch=state.cursor.batch,
            torch=torch.__version__, settings=settings.model_dump(mode="json", exclude_defaults=True),
            ranks_before=ranks_before,
            tier=source.tier if source else None,
            writes=traces.writes,
            wrapped=traces.wrapped,
            init=init,
            sharding=sharding_of(state.model),
        ),
        start_record.where_it_goes_on(history, chosen, there) if chosen else begun,
    )  # fmt: skip
    record.advise(*traces.advice(history.first_writes.get(traces.wrapped), chosen.step if chosen else None))
    record.advise_of(NOT_KEPT, state.not_kept())
    if chosen is not None:
        record.advise_of(INIT_NOT_READ, [settings.init] if settings.init else [])
        record.advise_of(NOT_IN_CHECKPOINT, state.not_in_checkpoint, checkpoint=chosen.name)
        start_record.finish_pending_plan(history, chosen, source.tier if source else None, record)
    sound = [manifest for manifest in found.manifests if manifest.name not in damaged]
    held = [
        manifest for manifest in resume.of_present_timeline(history, sound)
        if manifest == chosen or not resume.is_provisional(history, manifest)
    ]  # fmt: skip
    if ranks.is_rank_0:
        start_record.evict_what_was_cut_off(paths, [m.name for m in sound if m not in held], found.in_ring, record)
    seq = resume.next_seq(history, [*there, *found.strays, *(manifest.name for manifest in found.at_url)])
    healthy = 0
    if ranks.is_rank_0 and chosen is not None:
        healthy = start_record.healthy_until(paths, history, chosen, record)
    healthy, restored_step = ranks.from_first(healthy), chosen.step if chosen is not None else 0
    held_at_start = [  # the state before any step is good, also where `history` lacks it: ranks have kept it at a death
        CheckpointAtStart(
            manifest, manifest.name in history.good or manifest.step == 0, found.slots.get(manifest.name),
            min(healthy, max(0, restored_step - manifest.step)), manifest.name in found.in_ring,
        )
        for manifest in held
    ]  # fmt: skip
    return AttachedRun(
        paths, ranks, settings, record, history, found.attempt, run_id, found.lock, held=held_at_start, next_seq=seq,
        restored=chosen, ranks_before=ranks_before,
    )  # fmt: skip


def _places(
    paths: RunPaths, found: FoundRun, bring: Callable[[str], object] | None
) -> dict[str, list[CheckpointPlace]]:
    """The places of each checkpoint. All ranks have the same number of places, even where a host lacks one."""
    slots = tiers.fast_tier_of(paths) or SlotPaths(paths.fast_pointer)
    places: dict[str, list[CheckpointPlace]] = {}
    for name in (manifest.name for manifest in [*found.manifests, *found.at_url]):
        slot = found.slots.get(name)
        places[name] = [] if slot is None else [CheckpointPlace(slots.slot(slot), paths, in_slot=True)]
        if name in found.in_ring or slot is None:
            places[name].append(CheckpointPlace(paths.checkpoint(name), paths, bring=bring))
    return places


def _first_writes(paths: RunPaths, found: FoundRun, state: TrainingState, ranks: Ranks) -> tuple[str, Recorder]:
    """Collective: make what is missing in the run directory. Returns the run's id and the recorder."""

    def write() -> tuple[str, Recorder]:
        with _writing(str(paths.root)):
            for directory in (paths.ring, paths.ranks, paths.skips):
                files.make_directory(directory)
            job = state.job(ranks.world_size)
            if found.identity is None:
                write_identity(paths, new_identity(job))
            elif found.accepted or found.identity.format < format_for(ranks.world_size):
                accepted = {"job": job} if found.accepted else {}
                newest = max(found.identity.format, format_for(ranks.world_size))
                write_identity(paths, found.identity.model_copy(update={**accepted, "format": newest}))
            ring.sweep(paths)
            _sweep_frozen(paths, found)
            require_key(paths)
            identity, advised = read_identity(paths), found.history.advised
            record = Recorder(paths, found.attempt, is_rank_0=True, advised=advised, journal=found.journal)
            return identity.run_id if identity else "", record

    made = ranks.agreed(lambda: write() if ranks.is_rank_0 else None)
    if ranks.apart:
        _first_writes_of_hosts(paths, ranks)
    run_id: str = ranks.from_first(made and made[0])
    return run_id, made[1] if made is not None else Recorder(paths, found.attempt, is_rank_0=False)


@contextlib.contextmanager
def _writing(directory: str) -> Iterator[None]:
    """What fails within is raised as RunDirectoryError."""
    try:
        yield
    except (OSError, RollbackError) as error:
        raise RunDirectoryError(
            f"writing to the run directory {directory}: {message_of(error)}",
            hint="check the permissions and the free space of the run directory",
        ) from error


def _sweep_frozen(paths: RunPaths, found: FoundRun) -> None:
    """Rank 0: remove the files of frozen weights that no checkpoint names, where it can be told what each names."""
    present = [manifest.frozen.file for manifest in found.manifests if manifest.frozen]
    try:
        if not found.damaged:
            frozen.sweep(paths, present)
    except (OSError, CheckpointUnusable) as error:
        say(f"removing frozen weights that no checkpoint needs failed ({error}); they stay")


def _first_writes_of_hosts(paths: RunPaths, ranks: Ranks) -> None:
    """Collective: make what is missing in the hosts' directories, as rank 0's is complete.

    They have no journals, but what their host keeps: the slots' place, heartbeats, failure records, stacks, evidence,
    skip records.
    """
    whose = read_identity(paths) if ranks.is_rank_0 else None
    body = ranks.from_first(whose.model_dump(mode="json") if whose is not None else None)

    def write() -> None:
        with _writing(f"{paths.root} on {host_name()}"):
            for directory in (paths.ring, paths.ranks, paths.skips):
                files.make_directory(directory)
            identity = Identity.model_validate(body)
            if read_identity(paths) != identity:  # as it is, it stays: a disk that is full by now ends no attempt
                write_identity(paths, identity)
            ring.sweep(paths)

    ranks.agreed(write if ranks.first_in_directory and not ranks.is_rank_0 else lambda: None)
