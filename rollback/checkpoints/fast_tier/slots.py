"""Slots: directories of the fast tier that are written again and again, each holding one checkpoint or none.

    BASE/rollback-UID/RUN_ID/tier.json          whose it is: the run directory
    BASE/rollback-UID/RUN_ID/slot-00/           a file for each rank here, and manifest.json while it is committed
    BASE/rollback-UID/RUN_ID/slot-00/record.json    how far the journal was then: see `record_marks`

What is readable is never written: a slot without its manifest means nothing to a reader, and the manifest is removed,
under an exclusive lock that readers hold up by a shared one, before any rank writes into the slot. docs/format.md,
"Slots", has the protocol. Files live in memory (tmpfs), so nothing here is synced: a machine that goes down takes the
tier with it.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints.fast_tier.record_marks import write_mark
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.errors import RunDirectoryError, reading_checkpoint
from rollback.rundir.paths import FORMAT, FORMATS, MANIFEST, Below, NamedBelow, RunPaths, shard_name
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.region import Region
from rollback.system.small_json import read_json

DEFAULT_BASE = Path("/dev/shm")
_SLOT_NAME = re.compile(r"slot-(\d{2,4})")
_RUN_ID = re.compile(r"[0-9A-Za-z-]{8,64}")
_OWNER_LIMIT = 1 << 16
_READING, _LOOK_EVERY = 5.0, 0.05  # seconds
OF_MARKS = re.compile(r"(mark|added|bell|account)-\d{5}|lock|busy|fed|hosts\.json|\.(account-\d{5}|hosts\.json)\.tmp")
"""What is in the directory of the end marks (`end_marks`), or of copies of them."""
BUDDY_COPIES, ARRIVING = "buddy-*", "arriving-*"
"""The directories of copies of another host's slots, and of what arrives (`buddy_copies`)."""
COPIED_MARKS = "marks-*"
"""The directories of copies of another host's end marks (`mark_copies`)."""
_OF_A_TIER = re.compile(r"tier\.json|\.tier\.json\.tmp")


@dataclass(frozen=True)
class SlotPaths:
    """Paths of one run's fast tier on one host. Making it touches nothing."""

    root: Path
    owner = Below("tier.json")
    slot = NamedBelow("slot-{:02d}")

    def numbers(self) -> list[int]:
        """Slots that there are. Raises OSError."""
        found = [entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)]
        return sorted(int(match[1]) for name in found if (match := _SLOT_NAME.fullmatch(name)))


def tier_of(base: Path, run_id: str) -> SlotPaths:
    """Where a run's slots are. Raises RunDirectoryError for a run id that is no name."""
    if not _RUN_ID.fullmatch(run_id):
        raise RunDirectoryError(f"run.json has the run id {run_id!r}, which cannot be a directory's name")
    return SlotPaths(Path(os.path.realpath(base)) / f"rollback-{os.geteuid()}" / run_id)


def claim(slots: SlotPaths, run: Path) -> None:
    """Make the tier's directories, or find them, and write down whose they are. One rank of each host.

    Raises OSError, and RunDirectoryError where somebody else could read or change what is in them, or where they belong
    to another run directory (a copy of this one, say).
    """
    for directory in (slots.root.parent, slots.root):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(0o700)
        require_own(directory)
    owner = owner_of(slots)
    if not may_be_of(owner, run):
        raise RunDirectoryError(
            f"the fast tier {slots.root} belongs to the run directory {owner}", hint="two run directories have one id"
        )
    if owner != run.resolve():
        write_file(slots.owner, json.dumps({"format": FORMAT, "run": str(run.resolve())}).encode(), durable=False)


def require_own(directory: Path) -> None:
    """Raise RunDirectoryError unless it is a directory, no link, ours, and closed to others. Raises OSError."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        fault = "is not a directory"
    elif status.st_uid != os.geteuid():
        fault = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        fault = f"is open to others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise RunDirectoryError(f"the fast tier's directory {directory} {fault}", hint="remove it, or --fast-tier DIR")


def owner_of(slots: SlotPaths) -> Path | None:
    """The run directory whose tier it is; None where that is not written down, or not to be believed."""
    try:
        body = read_json(slots.owner, _OWNER_LIMIT)
        return Path(body["run"]) if body["format"] in FORMATS else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def may_be_of(owner: Path | None, run: Path) -> bool:
    """Whether a tier with the run's id is this run directory's: it says so, or says nothing, or that one has moved.

    It is the run that moves. A job that still ran has made folders for its logs anew where the run was, or there is a
    link to where it is now.
    """
    if owner is None or not RunPaths(owner).identity.exists():
        return True
    return os.path.realpath(owner) == os.path.realpath(run)


def map_shard(slots: SlotPaths, number: int, rank: int, size: int) -> Region:
    """A rank's file in a slot that is not committed, made to have `size` bytes, mapped, its pages there.

    Raises OSError (ENOSPC where the memory is not there), RunDirectoryError where it is no file of ours.
    """
    directory = slots.slot(number)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    require_own(directory)
    path = directory / shard_name(rank)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise RunDirectoryError(f"{path} in the fast tier is not a file of its own", hint=f"remove {slots.root}")
        if is_committed(slots, number):
            raise RuntimeError(f"{path} is part of a committed checkpoint")
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)  # a map of memory that is not there kills with SIGBUS
        region = Region(size, fd)
    finally:
        os.close(fd)
    region.populate()
    return region


def require_file(slots: SlotPaths, number: int, rank: int, region: Region) -> None:
    """Raise OSError unless a rank's shard in a slot is still the file that is mapped: where it has been removed, what
    is written to the map is nowhere."""
    path = slots.slot(number) / shard_name(rank)
    status = os.lstat(path)
    if (status.st_dev, status.st_ino, status.st_size) != (*(region.file or ()), region.size):
        raise OSError(errno.ESTALE, "another file has taken its place, or its size was changed", str(path))


def require_committed(slots: SlotPaths, number: int, ranks: Collection[int]) -> None:
    """Raise OSError unless a slot is committed and has the shards of these ranks. Their content is not looked at."""
    for name in (MANIFEST, *map(shard_name, ranks)):
        os.lstat(slots.slot(number) / name)


def is_committed(slots: SlotPaths, number: int) -> bool:
    return os.path.lexists(slots.slot(number) / MANIFEST)


def remove_strangers(slots: SlotPaths, number: int, ranks: Collection[int]) -> None:
    """Remove the shards of all but these ranks, which were on this host once, from a slot that is not committed.

    One rank of each host. Raises OSError.
    """
    own = {shard_name(rank) for rank in ranks}
    for path in slots.slot(number).glob("rank-*"):
        if path.name not in own:
            path.unlink(missing_ok=True)


def commit(slots: SlotPaths, number: int, manifest: Manifest, here: Collection[int] = ()) -> None:
    """Make a slot readable: its shards are whole. One rank of each host, after all have written. here: its ranks.

    Where rank 0 is, beside its journal, the slot gets a mark of how far that is. Raises OSError where that cannot be
    done, or where it is not seen to be there afterwards.
    """
    run = owner_of(slots) if 0 in here else None
    write_mark(slots.slot(number), manifest.name, RunPaths(run).train_journal if run is not None else None)
    write_file(slots.slot(number) / MANIFEST, manifest.to_json(), durable=False)
    require_committed(slots, number, here)


def commit_of(slots: SlotPaths, number: int) -> tuple[int, int] | None:
    """What tells a slot's manifest from every other that was or will be there, without reading it; None: there is none.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(slots.slot(number) / MANIFEST)
        return status.st_ino, status.st_mtime_ns
    return None


def uncommit(slots: SlotPaths, number: int) -> bool:
    """Make a slot mean nothing, so that it can be written. One rank of each host. Raises OSError.

    False: somebody is reading it; try again later.
    """
    directory = slots.slot(number)
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        (directory / MANIFEST).unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def forget(slots: SlotPaths, number: int) -> None:
    """As `uncommit`, after waiting for who reads it. Raises OSError, also where that takes longer than some seconds."""
    until = time.monotonic() + _READING
    while not uncommit(slots, number):
        if time.monotonic() > until:
            raise OSError(errno.EBUSY, "somebody is reading it", str(slots.slot(number)))
        time.sleep(_LOOK_EVERY)


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[tuple[Manifest, Callable[[], None]]]:
    """Hold a slot's checkpoint, so that it is not written while it is read. Any process.

    Gives its manifest, and what lets it go before, which any thread may call: from then on whoever reads on finds other
    bytes than the manifest tells of. Raises CheckpointUnusable where there is none (any more).
    """
    with reading_checkpoint(f"opening the slot {directory}"):
        held = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)]

    def let_go() -> None:
        with contextlib.suppress(IndexError):  # another one was first
            os.close(held.pop())

    try:
        fcntl.flock(held[0], fcntl.LOCK_SH)
        yield read_manifest(directory, in_slot=True), let_go
    finally:
        let_go()


def discard(slots: SlotPaths, number: int) -> None:
    """Give a slot's memory back, after `uncommit`. One rank of each host. Raises OSError."""
    files.remove_directory(slots.slot(number))


def give_back(directory: Path) -> bool:
    """Give the memory of a slot back, or of a copy of one. Raises OSError. False: it holds something that stays."""
    files.unlink(directory / MANIFEST)  # first: what has one is whole
    return files.remove_directory(directory)


def remove_marks(slots: SlotPaths) -> None:
    """Give the memory of end marks back, and of all slots beside them. Raises OSError."""
    for number in slots.numbers():
        give_back(slots.slot(number))
    files.remove_directory(slots.root / "last", OF_MARKS)
    files.remove_directory(slots.root)


def remove_copies(slots: SlotPaths) -> None:
    """Give the memory of copies of another host's slots and end marks back, and of what was arriving.

    Raises OSError.
    """
    for copied in slots.root.glob(COPIED_MARKS):
        remove_marks(SlotPaths(copied))
    for directory in (*slots.root.glob(BUDDY_COPIES), *slots.root.glob(ARRIVING)):
        give_back(directory)


def remove(slots: SlotPaths) -> None:
    """Give the tier's memory back. When no rank uses it any more and nothing in it is needed. Raises OSError.

    Raises RunDirectoryError for a directory that says of no run directory that it is its tier.
    """
    with contextlib.suppress(FileNotFoundError):
        require_own(slots.root)
        if owner_of(slots) is None:
            raise RunDirectoryError(f"{slots.root} has no tier.json of ours: it is left alone")
        stay = [number for number in slots.numbers() if not give_back(slots.slot(number))]
        remove_copies(slots)
        files.remove_directory(slots.root / "last", OF_MARKS)
        if not stay:
            files.remove_directory(slots.root, _OF_A_TIER)
    with contextlib.suppress(OSError):  # others of this user's runs are in it
        slots.root.parent.rmdir()
