"""The writing end of a ring at a URL. One process holds it at a time; docs/format.md has the order of writes."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from rollback.checkpoints.format.manifest import CheckpointFile, FrozenRecord, Manifest
from rollback.errors import (
    MOVED,
    CheckpointDamaged,
    IndexDamaged,
    RingUnavailable,
    RunDirectoryError,
    RunDoesNotFit,
    reporting,
)
from rollback.ring.copy_requests import CopyingHosts
from rollback.ring.url import record
from rollback.ring.url.fetch import bring, is_abandoned, read_manifest_at, relation_of, require_same_run
from rollback.ring.url.index import (
    Index,
    checkpoint_folder,
    checkpoint_key,
    first_index,
    frozen_key,
    index_key,
    next_index,
    read_indexes,
)
from rollback.ring.url.store import Source, Store
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import CheckpointName, RunPaths, has_packs, shard_name
from rollback.system import files

_LOOK_EVERY = 3600.0


class RingAtUrl:
    """Checkpoints and record of a run at a URL. Call `open` first; every method may raise RingUnavailable.

    RunDoesNotFit, from any method, means that the URL belongs to another run: stop writing there.

    say: takes a line for people.
    """

    def __init__(
        self, paths: RunPaths, store: Store, say: Callable[[str], None], others: CopyingHosts | None = None
    ) -> None:
        self._paths = paths
        self._store = store
        self._say = say
        self._can_list = True
        self._looked: float | None = None  # for the pieces of the record; None: not since `open`
        self._others = others or CopyingHosts(paths, store.url)
        self._writer = uuid.uuid4().hex
        self._index: Index | None = None
        self._previous: Index | None = None
        self._held: dict[str, FrozenRecord | None] = {}  # with the frozen weights that each needs
        self._remains: set[str] = set()  # without a manifest, and perhaps with files
        self._forgotten: set[str] = set()  # keys of pieces of the record that no index names any more
        self._can_delete = True
        self._frozen: set[FrozenRecord] = set()  # what there may be
        self._world_size = 0

    @property
    def place(self) -> str:
        return self._store.url

    def open(self) -> None:
        """Read what is there. Raises RunDoesNotFit unless the record there is a prefix of the run directory's
        record, and RunDirectoryError where that cannot be read."""
        identity = read_identity(self._paths)
        if identity is None:  # it was there before any rank attached
            hint = MOVED.format(self._paths.root)
            raise RunDirectoryError(f"reading {self._paths.identity}: it is gone", hint=hint)
        try:
            indexes = read_indexes(self._store)
        except IndexDamaged as error:
            if self._index is None or not self._index.record:  # an index that was nowhere yet
                raise
            indexes = self._put_back(self._index, error)
        start = first_index(identity.run_id, self._writer)
        if indexes and is_abandoned(self._store, indexes[0], identity):
            # Taken over: generations go on, so that ours is the newer one.
            start = start.model_copy(update={"generation": indexes[0].generation, "writer": indexes[0].writer})
            indexes = []
        if indexes:
            require_same_run(self._store.url, indexes[0], self._paths, identity.run_id)
            if relation_of(self._store, indexes[0], self._paths) in ("behind", "diverged"):
                raise _another_goes_on(self._store.url)
        self._index = indexes[0] if indexes else start
        self._previous = indexes[1] if len(indexes) > 1 else None
        self._looked = None
        self._world_size = identity.job.world_size
        names, self._frozen = self._index.checkpoints, {*self._index.frozen}
        whole = {name: manifest for name in names if (manifest := self._whole(name)) is not None}
        self._held = {name: manifest.frozen for name, manifest in whole.items()}
        self._remains = {*names} - {*self._held}
        self._others.meet()

    def held(self) -> tuple[CheckpointName, ...]:
        """The checkpoints that exist there, oldest first."""
        return tuple(CheckpointName.sorted(self._held))

    def if_stuck(self, act: Callable[[], None]) -> AbstractContextManager[None]:
        """In this block: call it once, in a thread, when nothing has got through to the URL for `STUCK` seconds."""
        return self._store.if_stuck(act)

    def put(self, manifest: Manifest, directory: Path) -> None:
        """Add a checkpoint from a local directory, and the record with it.

        Raises CheckpointUnusable where a shard is not, or no longer, what the manifest says, or cannot be read; nothing
        then exists there.
        """
        name, frozen = manifest.name, manifest.frozen
        if frozen is not None:
            self._frozen.add(frozen)
        self._remains.add(name)  # until its manifest is there; for good where it turns out to be damaged
        self._write_index()
        if frozen is not None and self._store.size(frozen_key(frozen)) != frozen.size:
            self._store.put_files(frozen_key(frozen), [(0, Source(self._paths.frozen / frozen.file, frozen.written))])
        with self._others.copying(manifest, directory) as shares:
            for file in own_files(manifest, shares.own):
                put_checkpoint_file(self._store, file, manifest, directory)
        stored = manifest.packed(shares.all)
        for key, expected in _objects(stored):
            if (size := self._store.size(key)) != expected:
                found = "does not have" if size is None else f"has {size} bytes, not {expected}, of"
                raise CheckpointDamaged(f"{self.place} {found} {key}, which {name} needs")
        self._store.put(checkpoint_key(name), stored.to_json())
        self._held[name] = frozen
        self._remains.remove(name)
        if self._can_delete:
            with contextlib.suppress(RingUnavailable):  # the checkpoint is there; `keep_record` tries again
                self._delete_forgotten()

    def evict(self, name: str) -> bool:
        """Remove a checkpoint, its manifest first. True: it has left."""
        manifest = self._manifest(name)
        self._store.delete(checkpoint_key(name))
        del self._held[name]
        self._remains.add(name)  # until its files are gone
        self._delete_files(name, [file.name for file in manifest.files] if manifest else self._shard_names())
        self._remains.remove(name)
        self._delete_frozen()
        return True

    def keep_record(self) -> bool:
        """Bring the record up to date. True: it was written."""
        self._write_index()
        self._clear_away()
        return True

    def give_up(self) -> None:
        """Cancel the present operation; any thread may call this."""
        self._store.give_up()
        self._others.give_up()

    def close(self) -> None:
        """Nothing more will be put."""
        self._others.close()

    def _write_index(self) -> None:
        assert self._index is not None
        self._require_ours()
        files = record.upload(self._store, self._paths, self._index)
        new = next_index(self._index, self._writer, {*self._held, *self._remains}, self._frozen, files)
        self._store.put(index_key(new.generation), new.to_json())
        self._forgotten |= self._previous.keys if self._previous else set()
        self._forgotten -= self._index.keys | new.keys
        self._previous, self._index = self._index, new
        self._look_for_pieces()

    def _put_back(self, last: Index, error: IndexDamaged) -> list[Index]:
        """Somebody has damaged what this process wrote last, or read at its start. It knows what was there: without
        this nothing could be copied any more for as long as the run lives. Returns what the URL then shows: where that
        is damaged again, as behind a proxy that answers itself, no object there can be judged."""
        self._store.put(index_key(last.generation), last.to_json())
        indexes = read_indexes(self._store)
        self._say(f"the durable ring: {error.message}. The last one that this process knows is put there again")
        return indexes

    def _delete_forgotten(self) -> None:
        self._can_delete = False
        for key in sorted(self._forgotten):
            self._store.delete(key)
            self._forgotten.remove(key)
        self._can_delete = True

    def _look_for_pieces(self) -> None:
        """Put again, once in a while, what others have removed of the record: without it nobody could go on from
        here, and nobody would know before the machine is lost. Where something was gone, the next index looks again:
        who removes objects may still be at it, and come to those that were there a moment ago."""
        assert self._index is not None
        if self._looked is not None and time.monotonic() - self._looked < _LOOK_EVERY:
            return
        if gone := record.put_again(self._store, self._paths, self._index):
            self._say(
                f"the durable ring {self.place} had lost {gone} objects of the run's record: they are put there again. "
                "See whether a rule of the bucket removes old objects, which must not apply to a ring"
            )
        self._looked = None if gone else time.monotonic()

    def _require_ours(self) -> None:
        """Raise RunDoesNotFit where another process has written an index since: this process must not overwrite it.
        Raise RingUnavailable where one of the last two is gone: who empties a ring while an index is written leaves
        that one. What else has been removed is seen by opening it anew."""
        assert self._index is not None
        indexes = read_indexes(self._store)
        written = [index for index in (self._index, self._previous) if index is not None and index.generation]
        if len(indexes) < len(written):
            raise RingUnavailable(f"an index of {self.place} is gone or damaged: what is there is looked at anew")
        for index in indexes:
            newer = index.generation > self._index.generation and index.writer != self._writer
            instead = index.generation == self._index.generation and index.writer != self._index.writer
            if newer or instead:
                require_same_run(self._store.url, index, self._paths, self._index.run_id)
                raise _another_goes_on(self._store.url)

    def _whole(self, name: str) -> Manifest | None:
        """The manifest of a checkpoint; None: it does not exist, as far as a look without reading its shards can
        tell."""
        manifest = self._manifest(name)
        if manifest is None or any(self._store.size(key) != size for key, size in _objects(manifest)):
            return None
        return manifest

    def _manifest(self, name: str) -> Manifest | None:
        """None: there is none, or none that can be believed."""
        with contextlib.suppress(CheckpointDamaged):
            return read_manifest_at(self._store, name)
        return None

    def _clear_away(self) -> None:
        """Delete pieces that no index names any more, and what is left of checkpoints without a manifest where a newer
        one exists: an object that cannot be seen may yet be there, and other hosts may still write."""
        self._delete_forgotten()
        held = self.held()
        for name in CheckpointName.sorted(self._remains):
            if not held or name.sort_key >= held[-1].sort_key:
                break
            self._store.delete(checkpoint_key(name))
            self._delete_files(name, self._shard_names())
            self._remains.remove(name)

    def _delete_frozen(self) -> None:
        """Delete frozen weights that no checkpoint needs any more."""
        for frozen in self._frozen - {*self._held.values()}:
            self._store.delete(frozen_key(frozen))
            self._frozen.remove(frozen)

    def _delete_files(self, name: str, known: Iterable[str]) -> None:
        """Delete these files of a checkpoint without a manifest, and what a listing shows of other tries to put it:
        hosts may have shared it out otherwise, and that is written nowhere. What it does not show stays for good."""
        others = filter(files.OF_A_CHECKPOINT.fullmatch, self._listed(name))
        for file in sorted({*known, *others}):
            self._store.delete(checkpoint_key(name, file))

    def _listed(self, name: str) -> list[str]:
        """What a listing shows of a checkpoint; nothing where it fails. It may be forbidden, which each cloud says in
        its own words, so no failure can be told from an outage: the first is waited out and reported, and from then on
        each need asks once, until it works again."""
        try:
            shown = self._store.names(checkpoint_folder(name), patiently=self._can_list)
        except RingUnavailable as error:
            self._store.require_not_given_up()
            if self._can_list:
                self._say(
                    f"the durable ring: {error.message}; files of interrupted copies may stay there. It is asked again "
                    "with the next checkpoint that leaves"
                )
            self._can_list = False
            return []
        self._can_list = True
        return shown

    def _shard_names(self) -> list[str]:
        """What may be there of a checkpoint without a manifest. Names of packs follow from nothing that is known."""
        return [] if has_packs(self._world_size) else [shard_name(rank) for rank in range(self._world_size)]


class RunFromUrl:
    """The run directory's ring, filled from the URL: where every host has a run directory of its own, no host's memory
    has a whole checkpoint. Methods raise as `bring`, and RingUnavailable with the place where the disk refuses."""

    def __init__(self, paths: RunPaths, store: Store, say: Callable[[str], None]) -> None:
        self._paths, self._store, self._say = paths, store, say

    def open(self) -> None:
        with reporting(RingUnavailable, f"opening {self._paths.ring}"):
            files.make_directory(self._paths.ring)

    def put(self, manifest: Manifest, directory: Path) -> None:
        """directory: this host's part, which is not needed."""
        with reporting(RingUnavailable, f"copying {manifest.name} from {self._store.url} into {self._paths.ring}"):
            bring(self._store, manifest, self._paths, self._say)


def own_files(manifest: Manifest, own: tuple[int, ...]) -> list[CheckpointFile]:
    """The files at a URL that the host with these shards writes: nobody else writes to them."""
    return [file for file in manifest.packed([own]).files if {*file.shards} <= {*own}]


def put_checkpoint_file(store: Store, file: CheckpointFile, manifest: Manifest, directory: Path) -> None:
    """Write a file of a checkpoint from the shards in it, which lie in a directory as the manifest says.

    Raises as `Store.put_files`.
    """
    sources = {rank: manifest.shards[rank] for rank in file.shards}
    parts = [
        (file.shards[rank].start or 0, Source(directory / shard.file, shard.written, shard.start))
        for rank, shard in sources.items()
    ]
    store.put_files(checkpoint_key(manifest.name, file.name), parts)


def _objects(manifest: Manifest) -> list[tuple[str, int]]:
    """Key and size of each object that a checkpoint needs besides its manifest."""
    frozen = [(frozen_key(manifest.frozen), manifest.frozen.size)] if manifest.frozen else []
    return [(checkpoint_key(manifest.name, file.name), file.size) for file in manifest.files] + frozen


def _another_goes_on(url: str) -> RunDoesNotFit:
    return RunDoesNotFit(
        f"the ring {url} holds what this run directory has not: another process goes on with this run, or went on",
        hint="to go on from the ring, name a new run directory (--run DIR); to go on from the run directory, name "
        "another URL",
    )
