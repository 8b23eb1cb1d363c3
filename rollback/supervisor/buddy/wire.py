"""What two buddies say to each other: one request on a connection, then answers and the bytes of files.

| wants | the files go | the answers |
|---|---|---|
| look | nowhere | what is kept of that seat |
| keep | to the buddy, once it has agreed | agreed, or why not; then that all is kept |
| give | from the buddy, behind its answer | what follows, or why nothing |

Nobody who does not know the secret of the launch is answered. Of what comes, names, sizes and the manifest are checked
before it counts; the shards' hashes are, when ranks restore them.
"""

import os
import re
import socket
from collections.abc import Callable, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, field_validator

from rollback.checkpoints.format.manifest import MANIFEST_LIMIT, Manifest, parse_manifest

TIMEOUT = 30.0
"""Seconds of silence after which a buddy is given up."""
_LINE = 1 << 20
_PIECE = 4 << 20
_SHARD = re.compile(r"rank-\d{5,9}\.safetensors")


class Buddies(BaseModel, frozen=True):
    """How the hosts of an attempt reach each other's buddies."""

    secret: str
    run: str
    """The run's id; empty: the run begins, so nobody keeps anything of it."""
    addresses: tuple[str, ...]
    """HOST:PORT by seat; empty: that host has none."""


class Parcel(BaseModel, frozen=True, extra="forbid"):
    """Files that follow, one behind the other, and the manifest behind them."""

    slot: int = Field(ge=0, le=9999)
    names: tuple[str, ...] = Field(max_length=4096)
    sizes: tuple[int, ...]
    manifest: int = Field(gt=0, le=MANIFEST_LIMIT)

    @field_validator("names")
    @classmethod
    def _shards_only(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names or len({*names}) < len(names) or not all(map(_SHARD.fullmatch, names)):
            raise ValueError("they are not shards")
        return names

    @property
    def bytes(self) -> int:
        return sum(self.sizes) + self.manifest


class BuddyRequest(BaseModel, frozen=True, extra="forbid"):
    secret: str
    run: str
    seat: int = Field(ge=0, lt=1 << 24)
    wants: Literal["look", "keep", "give"]
    parcel: Parcel | None = None


class Answer(BaseModel, frozen=True, extra="forbid"):
    """fault: why not, in words. seq, step: of the newest copy; -1: there is none. identity: the run's run.json."""

    fault: str | None = None
    seq: int = -1
    step: int = -1
    parcel: Parcel | None = None
    identity: dict[str, Any] | None = None


class Refused(OSError):
    """A buddy does not do what it was asked for."""


_Said = TypeVar("_Said", bound=BaseModel)


def say(connection: socket.socket, said: BaseModel) -> None:
    connection.sendall(said.model_dump_json().encode() + b"\n")


def hear(stream: BufferedIOBase, kind: type[_Said]) -> _Said:
    """What the other side says. Raises Refused for anything that is not that, and OSError."""
    line = stream.readline(_LINE)
    try:
        if not line.endswith(b"\n"):
            raise ValueError("it broke off")
        return kind.model_validate_json(line)
    except ValueError as error:
        raise Refused(f"what a buddy says cannot be understood: {str(error).splitlines()[0]}") from error


def answer(stream: BufferedIOBase) -> Answer:
    """The buddy's answer. Raises Refused with the buddy's reason, and OSError."""
    heard = hear(stream, Answer)
    if heard.fault is not None:
        raise Refused(heard.fault)
    return heard


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT)


def parcel_of(slot: int, shards: Sequence[Path], manifest: bytes) -> Parcel:
    names, sizes = tuple(path.name for path in shards), tuple(path.stat().st_size for path in shards)
    return Parcel(slot=slot, names=names, sizes=sizes, manifest=len(manifest))


def send_files(
    connection: socket.socket,
    parcel: Parcel,
    shards: Sequence[Path],
    manifest: bytes,
    sent: Callable[[int], None] = lambda count: None,
) -> None:
    """sent: called with the number of bytes of each piece behind it; what it raises ends the sending."""
    for path, size in zip(shards, parcel.sizes, strict=True):
        with path.open("rb") as file:
            for start in range(0, size, _PIECE):
                count = connection.sendfile(file, start, min(_PIECE, size - start))
                sent(count)
    connection.sendall(manifest)


def receive_files(stream: BufferedIOBase, parcel: Parcel, directory: Path) -> tuple[Manifest, bytes]:
    """Write the shards, whose directory nobody reads yet, and return the manifest that belongs to them.

    Raises OSError (ENOSPC before anything has come), Refused where they are not what the manifest says.
    """
    for name, size in zip(parcel.names, parcel.sizes, strict=True):
        fd = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:
            os.posix_fallocate(fd, 0, size)
            left = size
            while left:
                piece = stream.read(min(_PIECE, left))
                if not piece:
                    raise Refused(f"{name} broke off {left} bytes before its end")
                file.write(piece)
                left -= len(piece)
    body = stream.read(parcel.manifest)
    manifest = parse_manifest(body, None, "of a buddy")
    sizes = {shard.file: shard.size for shard in manifest.shards}
    if any(sizes.get(name) != size for name, size in zip(parcel.names, parcel.sizes, strict=True)):
        raise Refused(f"the files are not those of {manifest.name}")
    return manifest, body
