"""What two buddies say to each other: the secret, one request, then answers and the bytes of files.

| request | the files go | the answers |
|---|---|---|
| keep | to the buddy, once it has agreed | agreed, or that it has that copy, or why not; then that it is whole |
| give | from the buddy, behind its answer | what follows, or that it has none of the wanted ones |
| marks | to the buddy, once it has agreed: pieces of end marks, as long as both live | agreed, or why not |

A message is its length in four bytes, then JSON. A manifest follows the message with its parcel; the shards follow in
the order that the parcel names, each as long as the manifest says. A piece of a mark is a head of 24 bytes (the
sender's clock, an offset, a rank, a length) and its bytes; one of no bytes says that the sender lives. Nobody who does
not know the secret is answered. Of what comes, all is checked before it counts: the manifest by its check value, each
shard by its hash, so that a slot that was written while it was sent makes no copy; a part of a mark by its checksum.
"""

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, field_validator

from rollback.checkpoints.fast_tier.end_marks import SIZE
from rollback.checkpoints.fast_tier.mark_copies import MarkPiece
from rollback.checkpoints.format.hashing import ShardHash
from rollback.checkpoints.format.manifest import MANIFEST_LIMIT, Manifest, parse_manifest
from rollback.errors import RollbackError, message_of
from rollback.rundir.paths import shard_name
from rollback.system import small_json
from rollback.system.durable import write_all

SECRET = 64
"""Bytes of a secret."""
FAULTS = (OSError, RollbackError, ValueError)
"""What talking to a buddy may raise: none of it may end a supervisor."""
_CONNECT = 5.0
_SILENCE = 30.0
MARKS_EVERY = 0.5
"""Seconds in which who sends marks says at least that it lives."""
MARKS_SILENCE = 3.0
"""Seconds without a word from who sends marks, after which it counts as gone."""
_LOOK = 0.2  # seconds between two looks at whether to give up
_MESSAGE = 1 << 20
_PIECE = 4 << 20
_MARK_HEAD = struct.Struct("<QQII")
_Said = TypeVar("_Said", bound=BaseModel)


class Buddies(BaseModel, frozen=True):
    """How the hosts of an attempt reach each other's buddies. While they gather, only the secret is there."""

    secret: str = Field(min_length=SECRET, max_length=SECRET, pattern=r"^[0-9a-f]*$")
    """Of this attempt: a host that has lost its seat is not answered any more."""
    run: str = ""
    """The run's id; empty: the run begins."""
    wanted: tuple[str, ...] = ()
    """The checkpoints that may be brought back, newest first: those that the leader's record has."""
    addresses: tuple[str, ...] = ()
    """HOST:PORT by seat; empty: that host neither keeps copies nor has them kept."""


class Parcel(BaseModel, frozen=True, extra="forbid"):
    """Whose shards follow, out of which slot, behind so many bytes of the manifest and of the run's run.json."""

    slot: int = Field(ge=0, le=9999)
    ranks: tuple[int, ...] = Field(min_length=1, max_length=4096)
    manifest: int = Field(gt=0, le=MANIFEST_LIMIT)
    identity: int = Field(default=0, ge=0, le=small_json.SIZE)

    @field_validator("ranks")
    @classmethod
    def _each_once(cls, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if min(ranks) < 0 or len({*ranks}) < len(ranks):
            raise ValueError("a rank has one shard")
        return ranks

    def bytes(self, manifest: Manifest) -> int:
        return sum(manifest.shards[rank].size for rank in self.ranks)

    def is_in(self, directory: Path) -> bool:
        """Whether a directory has shards of all these ranks."""
        return all((directory / shard_name(rank)).exists() for rank in self.ranks)


class MarksHere(BaseModel, frozen=True, extra="forbid"):
    """Whose end marks follow, and how the ranks of that host reach those of others: its hosts.json."""

    ranks: tuple[Annotated[int, Field(ge=0, lt=1 << 24)], ...] = Field(min_length=1, max_length=4096)
    hosts: str


class BuddyRequest(BaseModel, frozen=True, extra="forbid"):
    """About a seat of a run. keep, marks: what follows. give: the checkpoints of which one is wanted."""

    run: str
    seat: int = Field(ge=0, lt=1 << 24)
    keep: Parcel | None = None
    marks: MarksHere | None = None
    give: tuple[str, ...] = Field(default=(), max_length=64)


class Answer(BaseModel, frozen=True, extra="forbid"):
    """fault: why not, in words. whole: the copy is there. parcel: what follows."""

    fault: str | None = None
    whole: bool = False
    parcel: Parcel | None = None


class BuddyRefused(OSError):
    """A buddy does not do what it was asked for, or says what is not so."""


class BuddyConnection:
    """A connection to a buddy. It is given up where nothing moves for long, and when `given_up` says so: each wait
    looks a few times a second, so that nobody who must go on waits for a host that is gone.

    silence: seconds in which nothing moves, after which the other side is given up."""

    def __init__(self, made: socket.socket, given_up: Callable[[], bool]) -> None:
        made.setblocking(False)
        self._socket, self.given_up, self.silence = made, given_up, _SILENCE
        self._next_look = 0.0

    def say(self, said: BaseModel) -> None:
        body = said.model_dump_json().encode()
        self.send(len(body).to_bytes(4, "big") + body)

    def hear(self, kind: type[_Said]) -> _Said:
        """What the other side says. Raises OSError, BuddyRefused and ValueError."""
        size = int.from_bytes(self.receive(4), "big")
        if size > _MESSAGE:
            raise BuddyRefused(f"a message of {size} bytes came; at most {_MESSAGE} are read")
        return small_json.parse_model(self.receive(size), kind)

    def answer(self) -> Answer:
        """The buddy's answer. Raises as `hear`, and BuddyRefused with the buddy's reason."""
        heard = self.hear(Answer)
        if heard.fault is not None:
            raise BuddyRefused(heard.fault)
        return heard

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._once(select.POLLOUT, partial(self._socket.send, view)) :]

    def send_file(self, path: Path, size: int, sent: Callable[[int], None]) -> None:
        """sent: called with the number of bytes of each piece behind it; what it raises ends the sending."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            begin = 0
            while begin < size:
                piece = min(_PIECE, size - begin)
                moved = self._once(select.POLLOUT, partial(os.sendfile, self._socket.fileno(), fd, begin, piece))
                if not moved:
                    raise BuddyRefused(f"{path} is shorter than its manifest says")
                begin += moved
                sent(moved)
        finally:
            os.close(fd)

    def receive(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            view = view[self.receive_into(view) :]
        return bytes(data)

    def receive_into(self, view: memoryview) -> int:
        """Some bytes, at most as many as there is room for. Raises BuddyRefused where no more come."""
        count = self._once(select.POLLIN, partial(self._socket.recv_into, view))
        if not count:
            raise BuddyRefused("it broke off")
        return count

    def send_mark(self, piece: MarkPiece) -> None:
        head = _MARK_HEAD.pack(time.monotonic_ns(), piece.offset, piece.rank, len(piece.data))
        self.send(head + piece.data)

    def receive_mark(self) -> tuple[int, MarkPiece]:
        """A piece, and the sender's clock. Raises OSError, BuddyRefused."""
        clock, offset, rank, size = _MARK_HEAD.unpack(self.receive(_MARK_HEAD.size))
        if size > SIZE:
            raise BuddyRefused(f"{size} bytes of a mark came; it has {SIZE}")
        return clock, MarkPiece(rank, offset, self.receive(size))

    def require_wanted(self) -> None:
        """Raise BuddyRefused where it is given up."""
        if self.given_up():
            raise BuddyRefused("it was given up")

    def _once(self, event: int, move: Callable[[], int]) -> int:
        until = time.monotonic() + self.silence
        waiting = select.poll()
        waiting.register(self._socket, event)
        while True:
            if time.monotonic() >= self._next_look:
                self.require_wanted()
                self._next_look = time.monotonic() + _LOOK
            try:
                return move()
            except BlockingIOError:
                if not waiting.poll(_LOOK * 1000) and time.monotonic() > until:
                    raise TimeoutError(f"nothing moved for {self.silence:.0f} s") from None


@contextmanager
def connect(address: str, secret: str, given_up: Callable[[], bool]) -> Iterator[BuddyConnection]:
    """A connection to the buddy at HOST:PORT. Raises OSError, and ValueError for what is no address."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a mark is small, and must not wait for another one
        connection = BuddyConnection(made, given_up)
        connection.send(secret.encode())
        yield connection


def in_words(error: Exception) -> str:
    text = message_of(error)
    return text.splitlines()[0] if text else type(error).__name__


def ranks_in(directory: Path, manifest: Manifest) -> tuple[int, ...]:
    """The ranks whose shards a directory has. Raises OSError."""
    there = {*os.listdir(directory)}
    return tuple(rank for rank, shard in enumerate(manifest.shards) if shard.file in there)


def send_shards(
    connection: BuddyConnection,
    parcel: Parcel,
    manifest: Manifest,
    directory: Path,
    sent: Callable[[int], None] = lambda count: None,
) -> None:
    for rank in parcel.ranks:
        connection.send_file(directory / shard_name(rank), manifest.shards[rank].size, sent)


def receive_manifest(connection: BuddyConnection, parcel: Parcel) -> tuple[Manifest, bytes]:
    """The manifest that a parcel begins with. Raises OSError, BuddyRefused, CheckpointDamaged."""
    body = connection.receive(parcel.manifest)
    manifest = parse_manifest(body, None, "of a buddy")
    if max(parcel.ranks) >= manifest.world_size:
        raise BuddyRefused(
            f"{manifest.name} has {manifest.world_size} ranks, and a shard of rank {max(parcel.ranks)} comes"
        )
    return manifest, body


def receive_shards(connection: BuddyConnection, parcel: Parcel, manifest: Manifest, directory: Path) -> None:
    """Write the shards into a directory that nobody reads yet. Raises OSError (ENOSPC before a shard has come), and
    BuddyRefused where one is not what the manifest says."""
    buffer = memoryview(bytearray(_PIECE))
    for rank in parcel.ranks:
        shard, found = manifest.shards[rank], ShardHash()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(directory / shard.file, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, shard.size)
            left = shard.size
            while left:
                piece = buffer[: connection.receive_into(buffer[:left])]
                write_all(fd, piece)
                found.update(piece)
                left -= len(piece)
        finally:
            os.close(fd)
        if found.hexdigest() != shard.hash:
            raise BuddyRefused(f"{shard.file} is not that of {manifest.name}: its hash is another one")
