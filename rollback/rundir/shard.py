"""Shards: safetensors files written from memory as it lies, hashed on the way, and read back with suspicion.

We write the format ourselves because the library's writer neither syncs nor hashes, and wants a copy of what it writes.
The format's rules: https://github.com/huggingface/safetensors (README, "Format"). Nothing here knows torch: a tensor is
a name, a dtype code, a shape and its bytes.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from rollback.errors import CheckpointDamaged
from rollback.rundir.durable import write_all

ITEM_SIZE: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
DTYPE_NAME: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16",
    "I32": "int32", "U32": "uint32", "F32": "float32",
    "I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64",
}  # fmt: skip
"""What torch, and run.json with it, calls the type of a code."""
_HEADER_LIMIT = 100 << 20  # the library's own limit
_CHUNK = 4 << 20


@dataclass(frozen=True)
class Piece:
    """One tensor to write: `data` holds `prod(shape)` items of `dtype`, row-major, little endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Written:
    """Size in bytes and xxh3_128 of a file that was written and synced."""

    size: int
    digest: str


def write_shard(path: Path, pieces: Iterable[Piece], metadata: Mapping[str, str]) -> Written:
    """Write a new safetensors file and sync it; `path` must not exist. Raises OSError; a partial file is removed."""
    ordered = sorted(pieces, key=lambda piece: (-ITEM_SIZE[piece.dtype], piece.name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for piece in ordered:
        end = position + piece.data.nbytes
        if piece.data.nbytes != prod(piece.shape) * ITEM_SIZE[piece.dtype]:
            raise ValueError(f"tensor {piece.name}: {piece.data.nbytes} bytes for {piece.dtype}{list(piece.shape)}")
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = xxhash.xxh3_128()
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        for block in (memoryview(struct.pack("<Q", len(text))), memoryview(text), *(p.data for p in ordered)):
            flat = block.cast("B") if block.nbytes else memoryview(b"")
            for start in range(0, len(flat), _CHUNK):
                chunk = flat[start : start + _CHUNK]
                digest.update(chunk)
                write_all(fd, chunk)
            size += len(flat)
        os.fsync(fd)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a shard; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class ShardReader:
    """A verified shard, mapped read-only. Use as a context manager.

    Opening checks, in this order: a regular file and not a link, the expected size, the expected hash, a header whose
    offsets follow from dtypes and shapes and cover the data without gaps or overlaps. Raises CheckpointDamaged.
    """

    def __init__(self, path: Path, expected: Written) -> None:
        self.path = path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointDamaged(f"opening the shard {path}: {error.strerror or error}") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointDamaged(f"the shard {path} is not a regular file")
            if status.st_size != expected.size or expected.size < 8:
                raise CheckpointDamaged(f"the shard {path} has {status.st_size} bytes; {expected.size} were written")
            self._map = mmap.mmap(fd, expected.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        try:
            if (found := _hash(memoryview(self._map))) != expected.digest:
                raise CheckpointDamaged(f"the shard {path} has hash {found}; {expected.digest} was written")
            self.entries, self.metadata = _parse_header(path, self._map)
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, a view into the map: valid until `close`."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.start : entry.start + entry.nbytes]

    def close(self) -> None:
        # A view that somebody still holds keeps the map open; the kernel frees it with the last one.
        try:
            self._map.close()
        except BufferError:
            return

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hash(view: memoryview) -> str:
    digest = xxhash.xxh3_128()
    for start in range(0, len(view), _CHUNK):
        digest.update(view[start : start + _CHUNK])
    return digest.hexdigest()


def _parse_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Entry], dict[str, str]]:
    (length,) = struct.unpack("<Q", data[:8])
    base = 8 + length
    if length > min(len(data) - 8, _HEADER_LIMIT):
        raise CheckpointDamaged(f"the shard {path} states a header of {length} bytes in a file of {len(data)}")
    try:
        header = json.loads(data[8:base])
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
            raise ValueError("metadata that is not text")
        entries: dict[str, Entry] = {}
        position = 0
        for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            start, end = item["data_offsets"]
            shape = tuple(item["shape"])
            if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
                raise ValueError(f"tensor {name!r} has a size that is not a natural number")
            if start != position or end - start != prod(shape) * ITEM_SIZE[item["dtype"]]:
                raise ValueError(f"tensor {name!r} does not lie where its dtype and shape say")
            entries[name] = Entry(item["dtype"], shape, base + start, end - start)
            position = end
        if base + position != len(data):
            raise ValueError(f"{len(data) - base - position} bytes belong to no tensor")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"the header of the shard {path} is invalid: {error}") from error
    return entries, metadata
