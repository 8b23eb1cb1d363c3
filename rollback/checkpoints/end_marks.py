"""End marks: what each rank leaves in its host's memory at every step's end, so that its death loses nothing.

    TIER/last/mark-00001      what only rank 1 knew at the ends of its last two steps
    TIER/last/bell-00001      a pipe: a byte in it asks rank 1 for a last snapshot
    TIER/last/busy            held, shared, by all ranks that have a part in a last snapshot just now
    TIER/last/lock            held by the one that writes it
    TIER/last/account-00001   what rank 1 made of it, for the supervisor and the next start

A mark has two halves, which are written in turn. Each half has a checksum over all of it, its step's end included. So a
rank that is killed while it writes one half leaves the other, and half a mark is never believed. docs/format.md, "The
last snapshot", has the layout. Nothing here knows torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash
from pydantic import BaseModel

from rollback.checkpoints import slots
from rollback.checkpoints.slots import SlotPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import sound_model

MOST = 256 << 10
"""Bytes that a mark may have: copying more would be felt at every step."""
_HEAD = struct.Struct("<7Q")  # checksum, length, the five numbers of a StepEnd
_HALF = (MOST + _HEAD.size + 4095) // 4096 * 4096
_STATUS = struct.Struct("<7Q")  # checksum, digest, the five numbers
_LEFT_AT = 2048  # in the first page
_SIZE = 4096 + 2 * _HALF
_ACCOUNT_LIMIT = 4 << 20
REASONS = {
    b"h": "the ranks hang", b"g": "the grace is over", b"e": "the attempt is ended",
    b"!": "another rank is about to end",
}  # fmt: skip
"""Why a bell is rung."""


class StepEnd(NamedTuple):
    """The end of a step. Two that are equal are the same moment of the same training."""

    attempt: int
    returns: int
    """How often this attempt has restored a checkpoint: after a return the same steps come again."""
    step: int
    """Completed updates."""
    batch: int
    timeline: int


class LastAccount(BaseModel, frozen=True):
    """What a rank made of the last snapshot."""

    attempt: int
    rank: int
    reason: str
    """Why there was one to make."""
    checkpoint: str | None = None
    """The checkpoint; None: this rank made none."""
    step: int | None = None
    tier: str = "fast"
    seconds: float = 0.0
    why_not: str | None = None
    metrics: tuple[str, ...] = ()
    """The newest lines of the metrics, which rank 0 may not have written any more."""


@dataclass(frozen=True)
class EndMarkPaths:
    """Where the end marks of a run are on one host. Making it touches nothing."""

    root: Path

    def mark(self, rank: int) -> Path:
        return self.root / f"mark-{rank:05d}"

    def bell(self, rank: int) -> Path:
        return self.root / f"bell-{rank:05d}"

    def account(self, rank: int) -> Path:
        return self.root / f"account-{rank:05d}"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def busy(self) -> Path:
        return self.root / "busy"


def marks_of(tier: SlotPaths) -> EndMarkPaths:
    return EndMarkPaths(tier.root / "last")


def prepare(paths: EndMarkPaths) -> None:
    """Begin an attempt: make the directory, without what an earlier attempt left. One rank of each host. Raises
    OSError, and RunDirectoryError for a directory that is not ours alone."""
    files.remove_directory(paths.root, slots.OF_MARKS)
    paths.root.mkdir(0o700, exist_ok=True)
    slots.require_own(paths.root)
    for path in (paths.lock, paths.busy):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def ranks_of(paths: EndMarkPaths) -> list[int]:
    """The ranks that have marks here."""
    return sorted(int(path.name[-5:]) for path in paths.root.glob("mark-?????"))


class EndMark:
    """The mark of one rank, which writes it. Call `close` at the end. Raises OSError where it cannot be made."""

    def __init__(self, paths: EndMarkPaths, rank: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(paths.mark(rank), flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, _SIZE)  # a map of memory that is not there kills with SIGBUS
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        self._half = 0
        os.mkfifo(paths.bell(rank), 0o600)
        self.bell = os.open(paths.bell(rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def write(self, end: StepEnd, body: bytes) -> None:
        """Leave what this rank knows at the end of a step. The mark before stays."""
        self._half ^= 1
        start = 4096 + self._half * _HALF
        numbers = struct.pack("<6Q", len(body), *end)
        check = xxhash.xxh3_64_intdigest(body, _seed(numbers))
        self._map[start : start + _HEAD.size] = bytes(_HEAD.size)  # nothing, until all of it is there
        self._map[start + _HEAD.size : start + _HEAD.size + len(body)] = body
        self._map[start : start + _HEAD.size] = struct.pack("<Q", check) + numbers

    def tell_digest(self, end: StepEnd, digest: int) -> None:
        """Tell the others the digest of this rank's parameters at that moment."""
        numbers = struct.pack("<6Q", digest, *end)
        self._map[: _STATUS.size] = struct.pack("<Q", _seed(numbers)) + numbers

    def leave(self) -> None:
        """This rank ends as it should: nobody has to keep anything because it is gone."""
        self._map[_LEFT_AT] = 1

    def wake(self) -> None:
        """Ring this rank's own bell: its thread sees that all is over."""
        os.write(self.bell, b".")

    def close(self) -> None:
        os.close(self.bell)
        self._map.close()


def _seed(numbers: bytes) -> int:
    return xxhash.xxh3_64_intdigest(numbers)


def _read(paths: EndMarkPaths, rank: int) -> bytes:
    """A mark's bytes; none where there is no mark."""
    try:
        fd = os.open(paths.mark(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    with os.fdopen(fd, "rb") as file:
        found = file.read(_SIZE)
    return found if len(found) == _SIZE else b""


def read_ends(paths: EndMarkPaths, rank: int) -> dict[StepEnd, bytes]:
    """The whole halves of a rank's mark: what it left, by the ends of its steps."""
    found: dict[StepEnd, bytes] = {}
    if not (mark := _read(paths, rank)):
        return found
    for start in (4096, 4096 + _HALF):
        check, length, *end = _HEAD.unpack_from(mark, start)
        if not length or length > MOST:
            continue
        body = mark[start + _HEAD.size : start + _HEAD.size + length]
        if xxhash.xxh3_64_intdigest(body, _seed(mark[start + 8 : start + _HEAD.size])) == check:
            found[StepEnd(*end)] = body
    return found


def read_digest(paths: EndMarkPaths, rank: int, end: StepEnd) -> int | None:
    """The digest of a rank's parameters at that moment, if it has told it."""
    if not (mark := _read(paths, rank)):
        return None
    check, digest, *told = _STATUS.unpack_from(mark)
    return digest if tuple(told) == end and _seed(mark[8 : _STATUS.size]) == check else None


def has_left(paths: EndMarkPaths, rank: int) -> bool:
    """Whether a rank has ended as it should."""
    mark = _read(paths, rank)
    return bool(mark) and mark[_LEFT_AT] == 1


def ring_bell(paths: EndMarkPaths, rank: int, why: bytes = b"!") -> bool:
    """Ask a rank for a last snapshot. why: of `REASONS`. False: there is nobody to be asked."""
    try:
        fd = os.open(paths.bell(rank), os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # ENXIO: nobody reads it any more
        return False
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        os.write(fd, why)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def alone(paths: EndMarkPaths, deadline: float) -> Iterator[None]:
    """Be the only process of the host that makes the last snapshot. The kernel lets go of it when the process dies.

    deadline: monotonic seconds. Raises TimeoutError, OSError.
    """
    fd = os.open(paths.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another rank was at it for too long") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def busy(paths: EndMarkPaths) -> Iterator[None]:
    """Let `is_busy` say so in the block. Raises OSError."""
    fd = os.open(paths.busy, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def is_busy(paths: EndMarkPaths) -> bool:
    """Whether any rank has a part in a last snapshot just now."""
    try:
        fd = os.open(paths.busy, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def write_account(paths: EndMarkPaths, account: LastAccount) -> None:
    """Raises OSError."""
    write_file(paths.account(account.rank), account.model_dump_json().encode(), durable=False)


def read_accounts(paths: EndMarkPaths, attempt: int | None = None) -> list[LastAccount]:
    """What the ranks made of the last snapshot of an attempt (default: of the newest), by rank."""
    found = [sound_model(path, LastAccount, _ACCOUNT_LIMIT) for path in sorted(paths.root.glob("account-*"))]
    return [account for account in found if account is not None and attempt in (None, account.attempt)]
