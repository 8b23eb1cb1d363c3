"""The ring: the bounded sequence of checkpoints in the run directory.

Protocol and invariants are those of docs/format.md. What is on disk is the truth about which checkpoints exist; what
the journal says of them (good, discarded) is `rollback.facts.history`'s.
"""

import contextlib
import os
from pathlib import Path

from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.checkpoints.format.shard import ShardReader
from rollback.checkpoints.pins import is_pinned
from rollback.errors import CheckpointDamaged, CheckpointUnusable, RollbackError
from rollback.rundir.paths import MANIFEST, CheckpointName, RunPaths
from rollback.system import files
from rollback.system.durable import sync_directory, write_file

_IN_QUARANTINE = 16  # checkpoints: more than a ring usually holds


def begin_writing(paths: RunPaths, name: str, attempt: int) -> Path:
    """The directory in which the shards of a new checkpoint are written. Any rank, any order. Raises OSError.

    Each attempt has its own: a rank of an earlier one that was cut off from the disk may still write, and attempts give
    the same names.
    """
    directory = paths.writing(name, attempt)
    with contextlib.suppress(FileExistsError):  # another rank was first
        files.make_new_directory(directory)
    return directory


def commit(paths: RunPaths, manifest: Manifest) -> None:
    """Make a checkpoint exist. Rank 0 only, after every rank has written and synced the shard that the manifest lists.

    Raises OSError, ValueError where a shard is not listed, or CheckpointDamaged where a file is not what the manifest
    says; the checkpoint then does not exist.
    """
    if len(manifest.shards) != manifest.world_size:
        raise ValueError(f"{len(manifest.shards)} of {manifest.world_size} shards are listed")
    complete(paths, manifest, paths.writing(manifest.name, manifest.attempt))


def complete(paths: RunPaths, manifest: Manifest, directory: Path) -> None:
    """Make the checkpoint whose shards are in a directory exist, durable on return.

    Raises as `require_sizes`; it then does not exist.
    """
    require_sizes(manifest, directory)
    write_file(directory / MANIFEST, manifest.to_json())
    sync_directory(directory)
    files.rename(directory, paths.checkpoint(manifest.name))
    sync_directory(paths.ring)
    sync_directory(paths.root)  # the first checkpoint's ring is new itself


def require_sizes(manifest: Manifest, directory: Path) -> None:
    """Raise CheckpointDamaged unless all shards in a directory are as long as the manifest says. Raises OSError.

    Who asks is perhaps not on the host that wrote last to a pack: so each file is opened, since for seconds NFS answers
    a mere `stat` from what this host remembers.
    """
    for file in manifest.files:
        path = directory / file.name
        fd = files.open_file(path, os.O_RDONLY)
        try:
            if (size := os.fstat(fd).st_size) != file.size:
                raise CheckpointDamaged(f"{path} has {size} bytes; {file.size} were written")
            for rank, shard in file.shards.items():
                # A shard that is missing between others leaves zeros, and none begins with them: its header has a size.
                if shard.start is not None and not any(os.pread(fd, 8, shard.start)):
                    raise CheckpointDamaged(f"{path} has nothing where the shard of rank {rank} begins")
        finally:
            os.close(fd)


def is_complete(directory: Path) -> bool:
    """Whether a checkpoint is in a directory, as far as a look without reading its shards can tell."""
    try:
        require_sizes(read_manifest(directory), directory)
    except (RollbackError, OSError):
        return False
    return True


def abandon(paths: RunPaths, name: str, attempt: int) -> None:
    """Remove what was written of a checkpoint that will not be committed. Rank 0 only. Raises OSError."""
    files.remove_directory(paths.writing(name, attempt))


def names(paths: RunPaths) -> list[CheckpointName]:
    """Names of all committed checkpoints, oldest first, whether or not they verify."""
    return CheckpointName.sorted(_directories(paths))


def _directories(paths: RunPaths) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(paths.ring) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def manifests(paths: RunPaths) -> tuple[list[Manifest], dict[str, CheckpointUnusable]]:
    """Manifests of all committed checkpoints, oldest first, and the reason for each one that cannot be believed."""
    sound: list[Manifest] = []
    damaged: dict[str, CheckpointUnusable] = {}
    for name in names(paths):
        try:
            sound.append(read_manifest(paths.checkpoint(name)))
        except CheckpointUnusable as error:
            damaged[name] = error
    return sound, damaged


def open_shards(directory: Path, manifest: Manifest) -> list[ShardReader]:
    """All shards of a checkpoint, verified, in rank order; the caller closes them. Raises CheckpointUnusable."""
    readers: list[ShardReader] = []
    beside: dict[str, ShardReader] = {}
    with contextlib.ExitStack() as opened:
        for shard in manifest.shards:
            path = directory / shard.file
            reader = ShardReader(path, shard.written, start=shard.start, beside=beside.get(shard.file))
            beside[shard.file] = opened.enter_context(reader)
            readers.append(reader)
        opened.pop_all()
    return readers


def evict(paths: RunPaths, name: str) -> bool:
    """Remove a committed checkpoint: gone from sight by one rename, then deleted. Rank 0 only. Raises OSError.

    False: it is pinned and stays.
    """
    if is_pinned(paths, name):
        return False
    doomed = paths.evicting(name)
    files.rename(paths.checkpoint(name), doomed)
    sync_directory(paths.ring)
    if is_pinned(paths, name):  # in between, by somebody who then saw that it was still in the ring
        files.rename(doomed, paths.checkpoint(name))
        sync_directory(paths.ring)
        return False
    files.unlink(doomed / MANIFEST)  # first: while there is a manifest, nothing is deleted
    files.remove_directory(doomed)
    return True


def quarantine(paths: RunPaths, name: str) -> None:
    """Move a damaged checkpoint out of the ring, where it can be looked at. Rank 0 only. Raises OSError.

    A disk that refuses for a while makes sound ones look damaged, all that there are perhaps: so they stay. Without any
    bound quarantine would fill the disk that the ring needs.
    """
    aside = paths.quarantine / name
    files.remove_directory(aside)  # it was fetched once more since
    files.make_directory(paths.quarantine)
    sync_directory(paths.root)  # before anything is moved into it
    files.rename(paths.checkpoint(name), aside)
    sync_directory(paths.quarantine)
    sync_directory(paths.ring)
    others = CheckpointName.sorted(path.name for path in paths.quarantine.iterdir() if path.name != name)
    for oldest in others[: max(0, len(others) + 1 - _IN_QUARANTINE)]:
        with contextlib.suppress(OSError):  # once more the next time
            files.remove_directory(paths.quarantine / oldest)


def leftovers(paths: RunPaths) -> list[str]:
    """Directories of checkpoints in the making or on their way out: of a live run, or of one that crashed."""
    return sorted(name for name in _directories(paths) if name.startswith((".writing-", ".evicting-")))


def sweep(paths: RunPaths) -> list[str]:
    """Remove what a crash left half written or half evicted. Rank 0 only, before any rank writes. Raises OSError.

    A checkpoint that was pinned while it was on its way out, and of which nothing is deleted yet, is put back, unless a
    fetch has brought it again.
    """
    swept = leftovers(paths)
    for leftover in swept:
        directory, name = paths.ring / leftover, leftover.removeprefix(".evicting-")
        there = os.path.lexists(paths.checkpoint(name))
        if name != leftover and not there and is_pinned(paths, name) and (directory / MANIFEST).exists():
            files.rename(directory, paths.checkpoint(name))
            sync_directory(paths.ring)
        else:
            files.remove_directory(directory)
    return swept
