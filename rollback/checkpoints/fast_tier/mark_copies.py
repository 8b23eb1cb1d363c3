"""Copies of another host's end marks, kept in this host's memory (`--replicas 2`), so that its loss loses no step.

    BASE/rollback-UID/RUN_ID/marks-00001/last/     what the host in seat 1 has in its own TIER/last: marks, hosts.json
    BASE/rollback-UID/RUN_ID/marks-00001/last/fed  locked as long as this host hears from that one; its clock then
    BASE/rollback-UID/RUN_ID/marks-00001/slot-90/  that host's part of a last snapshot, made of these marks

The supervisors carry the marks. They have the layout that they have on their own host, with a checksum in each part. So
whoever speaks for a host without a rank (`host_proxy`) speaks for a lost one by its copies. Nothing here knows torch.
"""

import fcntl
import mmap
import os
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rollback.checkpoints.fast_tier import end_marks, last_locks, slots
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.checkpoints.fast_tier.slots import COPIED_MARKS, SlotPaths
from rollback.system import files
from rollback.system.durable import write_file

_STATUS_AT, _STATUS = 2048, 2048  # in the first page: whether the rank has left, or stopped to leave marks
_NOTHING = bytes(_STATUS)
_CHECK, _NO_CHECK = 8, bytes(8)
_WORD = struct.Struct("<3Q")  # see `LiveMarkCopies.hear`; the last number: when this host heard no more, or 0
_NEVER = 1 << 62
_NAME = re.compile(r"marks-(\d{5,9})")
_KEPT = re.compile(r"lock|busy|fed")


class MarkPiece(NamedTuple):
    """Bytes of a rank's mark, and where in its file they are."""

    rank: int
    offset: int
    data: bytes


class NewsOfMarks:
    """What is new in the marks of some ranks of this host since the last look. Call `close` at the end.

    Raises OSError or ValueError where a rank has no mark.
    """

    def __init__(self, paths: EndMarkPaths, ranks: Sequence[int]) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._seen: dict[tuple[int, int], bytes] = {}
        try:
            for rank in ranks:
                fd = os.open(paths.mark(rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    self._maps[rank] = mmap.mmap(fd, end_marks.SIZE, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)
        except (OSError, ValueError):  # ValueError: it is shorter
            self.close()
            raise

    def close(self) -> None:
        for mark in self._maps.values():
            mark.close()

    def new(self) -> list[MarkPiece]:
        """A part that is being written comes next time."""
        found = []
        for rank, mark in self._maps.items():
            status = mark[_STATUS_AT : _STATUS_AT + _STATUS]
            if status != self._seen.get((rank, _STATUS_AT), _NOTHING):
                self._seen[rank, _STATUS_AT] = status
                found.append(MarkPiece(rank, _STATUS_AT, status))
            for part, start in enumerate(end_marks.STARTS):
                seen = self._seen.get((rank, start), _NO_CHECK)
                if (check := mark[start : start + _CHECK]) == seen:
                    continue
                if check == _NO_CHECK:  # withdrawn, or being written: what was there holds no more
                    self._seen[rank, start] = check
                    found.append(MarkPiece(rank, start, check))
                    continue
                data = end_marks.whole_part(lambda at, size, mark=mark: mark[at : at + size], part)  # type: ignore[misc]
                if data is not None:
                    self._seen[rank, start] = data[:_CHECK]
                    found.append(MarkPiece(rank, start, data))
        return found


class CopiedMarks:
    """The copies of one seat's marks. Making it touches nothing.

    slots: where its ranks' part of a last snapshot goes.
    """

    def __init__(self, tier: SlotPaths, seat: int) -> None:
        self.slots = SlotPaths(tier.root / f"marks-{seat:05d}")
        self.marks = end_marks.marks_of(self.slots)
        self._fed = self.marks.root / "fed"

    def is_live(self) -> bool:
        """Whether this host still hears from that one. Raises OSError."""
        return files.is_locked(self._fed, fcntl.LOCK_SH)

    def last_alive(self) -> int:
        """That host's clock, in nanoseconds, when this host heard no more of it: it may have lived that long. Raises
        OSError."""
        clock, arrived, ended = _WORD.unpack(self._fed.read_bytes()[: _WORD.size].ljust(_WORD.size, b"\xff"))
        return int(clock + (ended or time.monotonic_ns()) - arrived)


class LiveMarkCopies:
    """Copies of one seat's marks that are being written. One thread of this host's supervisor; `close` it.

    ranks: that host's. hosts: its hosts.json. What was there of another attempt is removed first. Raises OSError, also
    where another thread writes them, or somebody speaks for that host by them just now.
    """

    def __init__(self, tier: SlotPaths, seat: int, ranks: Sequence[int], hosts: bytes) -> None:
        copied = CopiedMarks(tier, seat)
        paths = copied.marks
        for directory in (copied.slots.root, paths.root):
            directory.mkdir(0o700, exist_ok=True)
            slots.require_own(directory)
        self._files: dict[int, int] = {}
        self._word = _NEVER, 0
        self._fed = _made(copied.marks.root / "fed")
        try:
            fcntl.flock(self._fed, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in (paths.lock, paths.busy):
                os.close(_made(path))
            with last_locks.alone(paths, time.monotonic()):
                if not _are_of(paths, ranks, hosts):
                    for name in os.listdir(paths.root):
                        if not _KEPT.fullmatch(name):
                            files.unlink(paths.root / name)
                for rank in ranks:
                    self._files[rank] = fd = _made(paths.mark(rank))
                    os.posix_fallocate(fd, 0, end_marks.SIZE)
                self.hear(_NEVER)
                write_file(paths.hosts, hosts, durable=False)
            _give_up_others(tier, copied.slots.root)
        except BaseException:
            self._close()
            raise

    def close(self) -> None:
        """From now on that host counts as silent."""
        os.pwrite(self._fed, _WORD.pack(*self._word, time.monotonic_ns()), 0)
        self._close()

    def _close(self) -> None:
        for fd in (self._fed, *self._files.values()):
            os.close(fd)

    def hear(self, clock: int) -> None:
        """That host lives. clock: its own, in monotonic nanoseconds."""
        self._word = clock, time.monotonic_ns()
        os.pwrite(self._fed, _WORD.pack(*self._word, 0), 0)

    def put(self, piece: MarkPiece) -> None:
        """Raises ValueError for what is no part of a mark, OSError."""
        if piece.rank not in self._files or piece.offset + len(piece.data) > end_marks.SIZE:
            raise ValueError(f"{len(piece.data)} bytes at {piece.offset} are no part of a mark of rank {piece.rank}")
        os.pwrite(self._files[piece.rank], piece.data, piece.offset)


def _are_of(paths: EndMarkPaths, ranks: Sequence[int], hosts: bytes) -> bool:
    """Whether the marks are of these ranks in this attempt: their connection was made anew."""
    return paths.hosts.exists() and paths.hosts.read_bytes() == hosts and all(paths.mark(r).exists() for r in ranks)


def all_copied(tier: SlotPaths) -> list[CopiedMarks]:
    """Of all seats of which this host has copies."""
    names = (_NAME.fullmatch(path.name) for path in tier.root.glob(COPIED_MARKS))
    return [CopiedMarks(tier, int(match[1])) for match in names if match]


def _give_up_others(tier: SlotPaths, stays: Path) -> None:
    """Give the memory of other seats' marks back: a host keeps those of one. Raises OSError."""
    for copied in all_copied(tier):
        if copied.slots.root != stays:
            slots.remove_marks(copied.slots)


def _made(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
