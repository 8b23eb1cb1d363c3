"""End marks: what each rank leaves in its host's memory at every step's end, so that its death loses nothing.

    TIER/last/mark-00001      what only rank 1 knew at the ends of its last two steps
    TIER/last/added-00001     what rank 1's GPU has added to them, once it had come there itself
    TIER/last/bell-00001      a pipe: a byte in it asks rank 1 for a last snapshot
    TIER/last/busy            held, shared, by all ranks that have a part in a last snapshot just now
    TIER/last/lock            held by the one that writes it
    TIER/last/hosts.json      how the ranks of several hosts reach each other
    TIER/last/account-00001   what rank 1 made of it, for the supervisor and the next start

A mark has two halves, which are written in turn, and two further parts for *early marks*, also in turn: what the rank
knew of a step's end before it gave its gradients to the sum of that step. A rank may be in the next backward already
when another one asks. Each part has a checksum over all of it, its step's end included. So a rank that is killed while
it writes one half leaves the other, and half a mark is never believed. What stays the same over many steps is in each
part, and is not copied there again.

What a GPU has the host cannot write: it is ahead of it. There the host says in the part how many bytes are added, and
the GPU writes them, and then a stamp of that part, when it comes there. Without it the part is not whole. A part is
begun anew by the host before the GPU is asked for what is added to it.
docs/format.md, "The last snapshot", has the layout. Nothing here knows torch.
"""

import contextlib
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.system import files

MOST = 256 << 10
"""Bytes that a mark may have: copying more would be felt at every step."""
_NUMBERS = struct.Struct("<13Q")  # lengths: of what stays and of the rest; what a GPU adds; a StepEnd; a Hold
_CHECK = struct.Struct("<Q")
_HEAD = _CHECK.size + _NUMBERS.size  # a checksum, and these numbers
_NO_HEAD = bytes(_HEAD)
_PART = (MOST + _HEAD + 4095) // 4096 * 4096
_EARLY = 2  # behind both halves, and two as well
PARTS = 2 * _EARLY
STARTS = [4096 + part * _PART for part in range(PARTS)]
"""Where each part begins in the file: at its checksum, eight bytes that are zero while there is nothing."""
_STATUS = struct.Struct("<8Q")  # checksum, digest, a StepEnd
_LEFT_AT = 2048  # in the first page
_STOPPED_AT, _STOPPED_MOST = 2056, 2000
SIZE = 4096 + PARTS * _PART
"""Bytes of a mark's file."""
SIZE_ADDED = PARTS * _PART
"""Bytes of the file with what is added: for each part a stamp and what is told of."""
RANKS_HANG, GRACE_IS_OVER, ATTEMPT_ENDS, RANK_ENDS, RANK_ENDS_ELSEWHERE = b"h", b"g", b"e", b"!", b"o"
REASONS = {
    RANKS_HANG: "the ranks hang", GRACE_IS_OVER: "the grace is over", ATTEMPT_ENDS: "the attempt is ended",
    RANK_ENDS: "another rank is about to end", RANK_ENDS_ELSEWHERE: "a rank of another host is about to end",
}  # fmt: skip
"""Why a bell is rung."""
STOPPED = b"s"
"""A rank leaves no marks any more: not a reason, but news."""


class StepEnd(NamedTuple):
    """The end of a step. Two that are equal are the same moment of the same training."""

    attempt: int
    returns: int
    """How often this attempt has restored a checkpoint: after a return the same steps come again."""
    step: int
    """Completed updates."""
    batch: int
    epoch: int
    """The epoch that is open: behind an epoch's last step there is a mark before the work between two epochs, and one
    behind it."""
    timeline: int


FOREVER = 1 << 62


class Hold(NamedTuple):
    """For how long an early mark holds: a rank that is not at the step's end by then does what it never did."""

    at: int
    """When it was written: monotonic nanoseconds of its host."""
    patience: int
    """Nanoseconds from then on. `FOREVER`: the rank has said that it will never come to that end, and stops here."""
    computed: int
    """Nanoseconds of the processor's time that the rank's process had used then."""
    effort: int
    """How much more of it a rank may use that lives, but does not go on."""


_NO_HOLD = Hold(0, 0, 0, 0)


class EarlyMark(NamedTuple):
    """What a rank knew of a step's end before it gave its gradients to the sum."""

    end: StepEnd
    body: bytes
    hold: Hold


@dataclass(frozen=True)
class EndMarkPaths:
    """Where the end marks of a run are on one host. Making it touches nothing."""

    root: Path

    def mark(self, rank: int) -> Path:
        return self.root / f"mark-{rank:05d}"

    def added(self, rank: int) -> Path:
        return self.root / f"added-{rank:05d}"

    def bell(self, rank: int) -> Path:
        return self.root / f"bell-{rank:05d}"

    def result(self, rank: int) -> Path:
        return self.root / f"account-{rank:05d}"

    @property
    def hosts(self) -> Path:
        return self.root / "hosts.json"

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
        with new_memory(paths.mark(rank), SIZE) as fd:
            self._map = mmap.mmap(fd, SIZE)
        self._half = self._early = 0
        self._early_end: StepEnd | None = None
        self._stays = [b""] * PARTS  # what each part has of it
        self._digest = b"", xxhash.xxh3_64_intdigest(b"")
        os.mkfifo(paths.bell(rank), 0o600)
        self.bell = os.open(paths.bell(rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def write(self, end: StepEnd, body: bytes, stays: bytes = b"", added: int | None = None) -> int:
        """Leave what this rank knows at the end of a step. The mark before stays. Returns the number of the part.

        stays: behind the body, for whoever reads it. As long as it is the same object, it is not copied again. added:
        the number of bytes at the body's end in whose place a GPU puts others; nobody reads this part before it has.
        None: a GPU puts nothing there.
        """
        self._half ^= 1
        return self._put(self._half, body, stays, end, _NO_HOLD, added)

    def write_early(
        self, end: StepEnd, body: bytes, hold: Hold, stays: bytes = b"", added: int | None = None
    ) -> int:  # fmt: skip
        """Leave what this rank knows of a step's end, if nothing changes it until then. As `write`."""
        self._early ^= end != self._early_end  # a step with two backwards has told of its end before
        self._early_end = end
        return self._put(_EARLY + self._early, body, stays, end, hold, added)

    def withdraw(self) -> None:
        """The newest early mark does not hold: this rank does not come to that step's end as it should."""
        start = STARTS[_EARLY + self._early]
        self._map[start : start + _HEAD] = _NO_HEAD

    def _put(self, part: int, body: bytes, stays: bytes, end: StepEnd, hold: Hold, added: int | None) -> int:
        if self._digest[0] is not stays:
            self._digest = stays, xxhash.xxh3_64_intdigest(stays)
        numbers = _NUMBERS.pack(len(stays), len(body), 0 if added is None else 1 + added, *end, *hold)
        start = STARTS[part]
        content, rest = start + _HEAD, start + _HEAD + len(stays)
        self._map[start:content] = _NO_HEAD  # nothing, until all of it is there
        if self._stays[part] is not stays:
            self._map[content:rest] = stays
            self._stays[part] = stays
        self._map[rest : rest + len(body)] = body
        self._map[start:content] = _CHECK.pack(_check(numbers, self._digest[1], body)) + numbers
        return part

    def tell_digest(self, end: StepEnd, digest: int) -> None:
        """Tell the others the digest of this rank's parameters at that moment."""
        numbers = struct.pack("<7Q", digest, *end)
        self._map[: _STATUS.size] = _CHECK.pack(_seed(numbers)) + numbers

    def tell_stopped(self, why: str) -> None:
        """This rank leaves no marks any more. Ring rank 0's bell behind it: the journal is its."""
        text = why.encode()[: _STOPPED_MOST - 1]
        self._map[_STOPPED_AT : _STOPPED_AT + len(text) + 1] = text + b"\0"

    def leave(self) -> None:
        """This rank ends as it should: nobody has to keep anything because it is gone."""
        self._map[_LEFT_AT] = 1

    def wake(self) -> None:
        """Ring this rank's own bell: its thread sees that all is over."""
        os.write(self.bell, b".")

    def close(self) -> None:
        os.close(self.bell)
        self._map.close()


@contextlib.contextmanager
def new_memory(path: Path, size: int) -> Iterator[int]:
    """A new file of a mark, all of whose memory is there: a map of memory that is not there kills with SIGBUS.

    Gives its descriptor, which is closed behind the block. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        yield fd
    finally:
        os.close(fd)


def place_of_added(part: int) -> tuple[int, int]:
    """Where the stamp of a part begins in the file of what is added, and where what it tells of does."""
    return part * _PART, part * _PART + _CHECK.size


def stamp_of(end: StepEnd, at: int = 0) -> int:
    """What tells that all is added which belongs to a mark of that step's end; of an early one, left at that moment
    (`Hold.at`). Not zero, and it fits into an int64."""
    return _seed(struct.pack("<7Q", *end, at)) >> 1 | 1


def _seed(numbers: bytes) -> int:
    return xxhash.xxh3_64_intdigest(numbers)


def _check(numbers: bytes, digest: int, body: bytes) -> int:
    """The checksum of a part. digest: of what stays."""
    return xxhash.xxh3_64_intdigest(body, xxhash.xxh3_64_intdigest(numbers, digest))


def _read(path: Path, start: int, length: int) -> bytes:
    """Bytes of a file of a mark; none where there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        found = os.pread(fd, length, start)
    finally:
        os.close(fd)
    return found if len(found) == length else b""


def read_ends(paths: EndMarkPaths, rank: int) -> dict[StepEnd, bytes]:
    """The whole halves of a rank's mark: what it left, by the ends of its steps."""
    return {part.end: part.body for half in range(_EARLY) if (part := _read_part(paths, rank, half)) is not None}


def read_early(paths: EndMarkPaths, rank: int) -> dict[StepEnd, EarlyMark]:
    """The whole early marks of a rank, by the ends of their steps."""
    found = (_read_part(paths, rank, part) for part in range(_EARLY, PARTS))
    return {early.end: early for early in found if early is not None}


def _read_part(paths: EndMarkPaths, rank: int, part: int) -> EarlyMark | None:
    """A part of a mark, if it is whole."""
    raw = whole_part(lambda start, length: _read(paths.mark(rank), start, length), part)
    if raw is None:
        return None
    staying, _, adding, *rest = _NUMBERS.unpack_from(raw, _CHECK.size)
    content, count = raw[_HEAD:], len(StepEnd._fields)
    stays, body, end, hold = content[:staying], content[staying:], StepEnd(*rest[:count]), Hold(*rest[count:])
    if adding:
        if (added := _read_added(paths, rank, part, end, hold, adding - 1)) is None:
            return None
        body = body[: len(body) - len(added)] + added
    return EarlyMark(end, body + stays, hold)


def _read_added(paths: EndMarkPaths, rank: int, part: int, end: StepEnd, hold: Hold, length: int) -> bytes | None:
    """What a GPU has added to a part; None: it has not come there, or the part is another's by now."""
    stamp, place = place_of_added(part)
    if _read(paths.added(rank), stamp, _CHECK.size) != _CHECK.pack(stamp_of(end, hold.at)):
        return None
    added = _read(paths.added(rank), place, length)
    head = _read(paths.mark(rank), STARTS[part] + _CHECK.size, _NUMBERS.size)
    still = bool(head) and _NUMBERS.unpack(head)[3:] == (*end, *hold)
    return added if len(added) == length and still else None


def whole_part(read: Callable[[int, int], bytes], part: int) -> bytes | None:
    """The bytes of a part, if it is whole. read: bytes of the mark from a place on, so many or none."""
    start = STARTS[part]
    if not (head := read(start, _HEAD)):
        return None
    numbers = head[_CHECK.size :]
    staying, length, adding, *_ = _NUMBERS.unpack(numbers)
    if not length or staying + length > MOST or adding > 1 + length:
        return None
    content = read(start + _HEAD, staying + length)
    stays, body = content[:staying], content[staying:]
    check = _CHECK.pack(_check(numbers, xxhash.xxh3_64_intdigest(stays), body))
    return head + content if check == head[: _CHECK.size] else None


def read_digest(paths: EndMarkPaths, rank: int, end: StepEnd) -> int | None:
    """The digest of a rank's parameters at that moment, if it has told it."""
    if not (told := _read(paths.mark(rank), 0, _STATUS.size)):
        return None
    check, digest, *numbers = _STATUS.unpack(told)
    return digest if tuple(numbers) == end and _seed(told[8:]) == check else None


def has_left(paths: EndMarkPaths, rank: int) -> bool:
    """Whether a rank has ended as it should."""
    return _read(paths.mark(rank), _LEFT_AT, 1) == b"\1"


def read_stopped(paths: EndMarkPaths, rank: int) -> str | None:
    """Why a rank leaves no marks any more; None: it does."""
    text = _read(paths.mark(rank), _STOPPED_AT, _STOPPED_MOST).partition(b"\0")[0]
    return text.decode(errors="replace") or None


def is_heard(paths: EndMarkPaths, rank: int) -> bool:
    """Whether there is a process that hears a rank's bell."""
    return ring_bell(paths, rank, b"")


def ring_bell(paths: EndMarkPaths, rank: int, why: bytes) -> bool:
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
