"""From a URL into a run directory: the parts of the record and the checkpoints that a start needs, verified on the
way."""

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from rollback.checkpoints import ring, tiers
from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.manifest import MANIFEST_LIMIT, FrozenRecord, Manifest, parse_manifest
from rollback.checkpoints.format.shard import Written, read_verified
from rollback.checkpoints.resume import candidates
from rollback.errors import (
    CheckpointDamaged,
    CheckpointUnusable,
    JournalDamaged,
    RunDirectoryError,
    RunDoesNotFit,
    once_more_if_unreadable,
    reporting,
)
from rollback.ring.url import record
from rollback.ring.url.index import Index, RecordFile, checkpoint_key, frozen_key, read_indexes
from rollback.ring.url.record import Relation, read_piece
from rollback.ring.url.store import Store
from rollback.rundir import seal
from rollback.rundir.identity import Identity, read_identity, require_key_for, require_seal
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import read_journal, require_sealed
from rollback.rundir.metrics.column_file import column_path
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import open_regular
from rollback.system.small_json import SIZE, fault_of, parse_model
from rollback.terminal.quantities import size

_IDENTITY = "run.json"
_JOURNALS = ("journal/train.jsonl", "journal/supervisor.jsonl")
_GOOD = 2  # good checkpoints that a start has at hand: the newest may lie behind the onset of a trouble to come
Say = Callable[[str], None]


def fetch(store: Store, paths: RunPaths, say: Say) -> tuple[str, ...]:
    """Make a run directory as new as the URL, and make sure that it holds the checkpoint with which the run goes on.

    The caller holds the run directory, which may be empty. Where the run directory is newer, it stays. Where the URL is
    empty, nothing is done. Returns what `unfetch` takes.

    Raises RunDoesNotFit where the URL belongs to another run, or where both have gone on differently; nothing is
    changed then. Raises RingUnavailable where the URL cannot be read; RunDirectoryError where the run directory cannot
    be written.
    """
    indexes = read_indexes(store)
    if not indexes:
        return ()
    if is_abandoned(store, indexes[0], read_identity(paths)):
        say(f"the ring {store.url} has no checkpoint; what there is of a record is left aside")
        return ()
    holds = (paths.identity, paths.train_journal, paths.supervisor_journal, paths.frozen)
    is_new = not any(path.exists() for path in holds) and not ring.names(paths)
    hint = "check the permissions and the free space of the run directory"
    with reporting(RunDirectoryError, f"fetching {store.url} into {paths.root}", hint):
        index = complete_record(store, indexes, paths, say)
        _fetch_checkpoints(store, index, paths, say)
        if not paths.identity.exists():
            run = index.record_file(_IDENTITY)
            assert run is not None
            with record.explained(store.url):
                record.download(store, run, paths.root)
    return tuple(kept.path for kept in index.record) if is_new else ()


def unfetch(paths: RunPaths, brought: Iterable[str]) -> None:
    """Undo a fetch into a directory that held no run, where the job turns out to be another one. What else is there
    stays. brought: what `fetch` returned. Raises OSError and CheckpointDamaged.

    Only the ranks know their job, and they are started when all is fetched.
    """
    made = [paths.root / path for path in brought]
    if not made:
        return
    for name in ring.names(paths):
        files.unlink(paths.pin(name))  # it came with the record
        ring.evict(paths, name)
    frozen.sweep(paths, ())
    for path in (column_path(paths.metrics), *made):
        files.unlink(path)
    folders = {paths.ring, paths.frozen, *(folder for path in made for folder in path.parents)}
    for folder in sorted((folder for folder in folders if paths.root in folder.parents), reverse=True):
        with contextlib.suppress(OSError):  # not there, or not empty
            folder.rmdir()


def complete_record(store: Store, indexes: list[Index], paths: RunPaths, say: Say) -> Index:
    """Fetch the missing parts of the record, except run.json, and return the index that they came from.

    The older index is used where a piece that the newer one names fails verification.
    """
    *newer, oldest = indexes
    for index in newer:
        try:
            _complete_record(store, index, paths, say)
            return index
        except CheckpointDamaged as error:
            say(f"the newest record at the ring cannot be used ({error.message}); trying the one before it")
    with record.explained(store.url):
        _complete_record(store, oldest, paths, say)
    return oldest


def _complete_record(store: Store, index: Index, paths: RunPaths, say: Say) -> None:
    identity = read_identity(paths)
    if identity is None:
        _require_identity_of(store, index)  # before anything is written: it is what would be missing
    else:
        require_same_run(store.url, index, paths, identity.run_id)
    relations = {path: _relation(store, index, paths, path) for path in _JOURNALS}
    if "diverged" in relations.values():
        raise RunDoesNotFit(
            f"the run directory {paths.root} and the ring {store.url} have gone on differently from the same run",
            hint="to go on from the ring, name a new run directory (--run DIR); to go on from the run directory, name "
            "another URL; nothing was changed",
        )
    behind = [path for path, relation in relations.items() if relation == "behind"]
    if not behind:
        return
    _require_sealed_journals(store, index, behind)
    if identity is None:
        say(f"fetching the record of run {index.run_id} from {store.url}")
    else:
        say(f"the record at {store.url} is newer than the one in {paths.root}: taking it")
    files.unlink(column_path(paths.metrics))  # of the lines that were here
    for kept in sorted(index.record, key=lambda kept: kept.path in _JOURNALS):  # these last: nothing is missing then
        if kept.path in behind or (kept.path not in (*_JOURNALS, _IDENTITY) and not _is_there(paths.root / kept.path)):
            record.download(store, kept, paths.root)


def _require_identity_of(store: Store, index: Index) -> None:
    """Raise CheckpointDamaged unless the record at the URL has a sound run.json, and as `require_key_for`."""
    if (run := index.record_file(_IDENTITY)) is None:
        raise CheckpointDamaged(f"the index names no run.json for run {index.run_id}")
    try:
        found = parse_model(record.read_record_file(store, run, SIZE), Identity)
    except ValueError as error:
        raise CheckpointDamaged(f"its run.json is damaged ({fault_of(error)})") from error
    require_key_for(found.seal is not None, store.url)
    require_seal(found, f"run.json at {store.url}")


def _is_there(path: Path) -> bool:
    """Whether a file of a record that is behind needs no download. Metrics and skip records have grown elsewhere."""
    return path.suffix != ".jsonl" and path.exists()


def _require_sealed_journals(store: Store, index: Index, paths: Iterable[str]) -> None:
    """Verify the seals before a fetched journal replaces a local one. Raises CheckpointDamaged."""
    if seal.present() is None:
        return
    for path in paths:
        if (kept := index.record_file(path)) is not None:
            try:
                require_sealed(record.read_record_file(store, kept, kept.size), Path(path).stem)
            except JournalDamaged as error:
                raise CheckpointDamaged(error.message) from error


def is_abandoned(store: Store, index: Index, identity: Identity | None) -> bool:
    """Whether a ring belongs to no run: another run began it, and was lost before its first checkpoint."""
    another = identity is None or identity.run_id != index.run_id
    return another and all(store.size(checkpoint_key(name)) is None for name in index.checkpoints)


def require_same_run(url: str, index: Index, paths: RunPaths, run_id: str) -> None:
    if index.run_id != run_id:
        raise RunDoesNotFit(
            f"the ring {url} belongs to run {index.run_id}; the run directory {paths.root} to run {run_id}",
            hint="every run has a ring of its own: name another URL, or the other run directory; nothing was changed",
        )


def relation_of(store: Store, index: Index, paths: RunPaths) -> Relation:
    """How the journals of a run directory compare with those at the URL, taken together. Raises RingUnavailable."""
    with record.explained(store.url):
        found = {_relation(store, index, paths, path) for path in _JOURNALS}
    order: tuple[Relation, ...] = ("diverged", "behind", "ahead")
    return next((word for word in order if word in found), "same")


def _relation(store: Store, index: Index, paths: RunPaths, path: str) -> Relation:
    kept = index.record_file(path) or RecordFile(path=path, pieces=())
    local = paths.root / path
    sound = read_journal(local).sound_bytes
    content = b""
    if sound:
        with open_regular(local) as file:
            content = file.read(sound)
    return record.relate(content, kept, partial(read_piece, store))


def read_manifest_at(store: Store, name: str) -> Manifest | None:
    """The manifest of a checkpoint at the URL; None where it does not exist. Raises CheckpointDamaged."""
    data = store.get(checkpoint_key(name), MANIFEST_LIMIT)
    return None if data is None else parse_manifest(data, name, f"{store.url}/{checkpoint_key(name)}")


def _fetch_checkpoints(store: Store, index: Index, paths: RunPaths, say: Say) -> None:
    """Make sure that the checkpoint which the ranks will restore is here and sound, and the newest good ones too.

    This reads the local checkpoints once: a damaged file then costs a fetch, not a return to an older checkpoint.
    """
    there: dict[str, Manifest] = {}
    for name in index.checkpoints:
        try:
            if (manifest := read_manifest_at(store, name)) is not None:
                there[name] = manifest
        except CheckpointDamaged as error:
            say(f"checkpoint {name} at the ring cannot be used: {error.message}")
    history = fold_journal(paths.train_journal).history
    here = {place.name: place.manifest for place in tiers.locate(paths)}
    ranked = candidates(history, sorted({**there, **here}.values(), key=lambda manifest: manifest.sort_key))
    settled: dict[str, bool] = {}
    needed: dict[FrozenRecord, None] = {}
    for wanted, count in ((ranked, 1), ([manifest for manifest in ranked if manifest.name in history.good], _GOOD)):
        found = 0
        for manifest in wanted:
            name = manifest.name
            if name not in settled:
                settled[name] = _is_sound_here(paths, name, say) or (
                    name in there and fetch_checkpoint(store, there[name], paths, say)
                )
            if settled[name] and manifest.frozen is not None:
                needed[manifest.frozen] = None
            found += settled[name]
            if found == count:
                break
    for weights in needed:
        try:
            _require_sound(paths.frozen / weights.file, weights.written)
        except CheckpointUnusable:
            _bring_frozen(store, weights, paths, say)


def _is_sound_here(paths: RunPaths, name: str, say: Say) -> bool:
    """Whether a checkpoint can be restored from this machine alone. One in the ring that is damaged is put aside. What
    cannot be read stays: it may be sound, and the ranks decide what that means for the start."""
    for place in tiers.locate(paths):
        if place.name != name or not tiers.is_whole(place):
            continue
        if (fault := _fault_of(place)) is None:
            return True
        say(f"checkpoint {name} in {place.directory} cannot be used: {fault.message}")
        if place.tier == "durable" and isinstance(fault, CheckpointDamaged):
            ring.quarantine(paths, name)
    return False


def _fault_of(place: tiers.Located) -> CheckpointUnusable | None:
    def read() -> None:
        with tiers.hold_slot(place):
            for shard in place.manifest.shards:
                _require_sound(place.directory / shard.file, shard.written, shard.start)

    try:
        once_more_if_unreadable(read)
    except CheckpointUnusable as error:
        return error
    return None


def _require_sound(path: Path, expected: Written, start: int | None = None) -> None:
    """Raise CheckpointUnusable unless every bit of a file, or of a shard in a pack, is what it should be."""
    for _ in read_verified(path, expected, start):
        pass


def _bring_frozen(store: Store, needed: FrozenRecord, paths: RunPaths, say: Say) -> None:
    """Fetch frozen weights. Where they are not at the URL what they should be, that is said and no more: the script may
    load the same.

    Raises RingUnavailable, and OSError where the run directory cannot be written.
    """
    say(f"fetching frozen weights ({size(needed.size)}) from {store.url}")
    files.make_directory(paths.frozen)
    try:
        store.get_file(frozen_key(needed), frozen.arriving_at(paths, needed), needed.written)
    except CheckpointDamaged as error:
        say(f"the frozen weights at the ring cannot be used: {error.message}")
    else:
        frozen.settle(paths, needed)


def fetch_checkpoint(store: Store, manifest: Manifest, paths: RunPaths, say: Say) -> bool:
    """Fetch one checkpoint into the local ring. False, with a message: it is not what its manifest says.

    Raises RingUnavailable, and OSError where the run directory cannot be written.
    """
    say(f"fetching checkpoint {manifest.name} ({size(manifest.bytes)}) from {store.url}")
    try:
        bring(store, manifest, paths, say)
    except CheckpointDamaged as error:
        say(f"checkpoint {manifest.name} at the ring cannot be used: {error.message}")
        return False
    return True


def bring(store: Store, manifest: Manifest, paths: RunPaths, say: Say) -> None:
    """Fetch one checkpoint into the local ring, where it exists on return, verified and synced.

    Raises CheckpointDamaged where it is not what its manifest says, RingUnavailable, and OSError where the run
    directory cannot be written; the checkpoint then does not exist there.
    """
    if manifest.frozen is not None and not frozen.is_there(paths, manifest.frozen):
        _bring_frozen(store, manifest.frozen, paths, say)
    directory = paths.writing(manifest.name, manifest.attempt)
    files.remove_directory(directory)
    files.make_new_directory(directory)
    try:
        for file in manifest.files:
            store.get_files(checkpoint_key(manifest.name, file.name), directory / file.name, file.contents)
        if os.path.lexists(paths.checkpoint(manifest.name)):  # not to be used: else nobody would fetch it
            ring.quarantine(paths, manifest.name)
        ring.complete(paths, manifest, directory)
    except CheckpointDamaged:
        files.remove_directory(directory)
        raise
