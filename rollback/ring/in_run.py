"""The run directory's ring as the durable one, filled from the fast tier where there is one."""

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rollback.checkpoints import ring
from rollback.checkpoints.format.direct import write_direct
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import not_read
from rollback.errors import CheckpointDamaged, RingUnavailable, reporting
from rollback.ring.copy_requests import CopyingHosts
from rollback.rundir.paths import RunPaths, has_packs
from rollback.system import files
from rollback.system.durable import open_regular


class RingInRun:
    """Checkpoints in RUN/ring. The record is there already. What a disk refuses is a RingUnavailable that names the
    place; see `DurableRing`."""

    def __init__(self, paths: RunPaths, others: CopyingHosts | None = None) -> None:
        self._paths = paths
        self._others = others or CopyingHosts(paths)
        self._given_up = threading.Event()

    @property
    def place(self) -> str:
        return self._paths.place_of_ring(self._paths.ring.name)

    def open(self) -> None:
        """Remove half-written checkpoints of an earlier drainer."""
        with reporting(RingUnavailable, f"opening {self.place}"):
            files.make_directory(self._paths.ring)
            for path in self._paths.ring.glob(".draining-*"):
                _remove(path)
            self._others.meet()

    def held(self) -> Sequence[str]:
        return ring.names(self._paths)

    def if_stuck(self, act: Callable[[], None]) -> AbstractContextManager[None]:
        """It never is: a disk refuses at once."""
        return contextlib.nullcontext()

    def put(self, manifest: Manifest, directory: Path) -> None:
        """Copy a checkpoint past the page cache (the cache is for training), and commit it by a rename.

        Raises CheckpointUnusable where a shard is not, or no longer, what the manifest says, or cannot be read.
        """
        with reporting(RingUnavailable, f"copying {manifest.name} into {self.place}"):
            self._put(manifest, directory)

    def _put(self, manifest: Manifest, directory: Path) -> None:
        arriving = self._paths.draining(manifest.name)
        stored = manifest.packed()
        files.make_new_directory(arriving)
        try:
            with self._others.copying(manifest, directory, into_run=True) as shares:
                for rank in shares.own:
                    if self._given_up.is_set():
                        raise RingUnavailable(f"copying {manifest.name} into {self.place}: its time was up")
                    shard = stored.shards[rank]
                    copy_shard(directory / manifest.shards[rank].file, arriving / shard.file, shard)
            self._complete(stored, arriving)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(arriving)
            raise

    def _complete(self, stored: Manifest, arriving: Path) -> None:
        try:
            ring.complete(self._paths, stored, arriving)  # others may have written some of the shards
        except CheckpointDamaged as error:
            if not has_packs(stored.world_size):
                raise
            # Each host has hashed what it wrote, and its slots are sound: this host does not see it, or not yet.
            raise RingUnavailable(error.message) from error

    def evict(self, name: str) -> bool:
        """Remove a checkpoint. False: it is pinned by now, and stays."""
        with reporting(RingUnavailable, f"removing {name} from {self.place}"):
            try:
                return ring.evict(self._paths, name)
            except FileNotFoundError:  # put into quarantine by the ranks
                return True

    def keep_record(self) -> bool:
        """Do nothing: the record is in the run directory. False: nothing shows that the disk takes anything."""
        return False

    def give_up(self) -> None:
        self._given_up.set()
        self._others.give_up()

    def close(self) -> None:
        self._others.close()


def _remove(arriving: Path) -> None:
    """Remove a half-written checkpoint. First rename it, so that nobody adds to it: another host may still be copying
    its part for a drainer that died."""
    doomed = arriving.with_name(f".draining-{uuid.uuid4().hex}")
    files.rename(arriving, doomed)
    files.remove_directory(doomed)


def copy_shard(source: Path, target: Path, shard: ShardRecord) -> None:
    """Copy a shard past the page cache into a new file, or to its place in a pack, and sync it.

    Raises RingUnavailable where it cannot be written, and CheckpointDamaged where it is not what its manifest says; the
    file is then useless. CheckpointUnreadable where it cannot be read.
    """
    try:
        with open_regular(source) as file:
            if os.fstat(file.fileno()).st_size != shard.size:
                raise ValueError("it has another size")
            content = mmap.mmap(file.fileno(), shard.size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise not_read(source, error) from error
    # It is closed when nobody holds it any more. By hand it cannot be where the disk refuses: the error's frames do.
    with reporting(RingUnavailable, f"writing {target}"):
        written = write_direct(target, memoryview(content), shard.start)
    if written != shard.written:
        raise CheckpointDamaged(f"the shard {source} is not what its manifest says (hash {written.digest})")
