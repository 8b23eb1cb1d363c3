"""Shards: safetensors files written from memory as it lies, hashed on the way, and read back with suspicion.

We write the format ourselves because the library's writer neither syncs nor hashes, and wants a copy of what it writes.
Nothing here knows torch: a tensor is a name, a dtype code, a shape and its bytes.

Files are read by `pread`, never mapped: a disk that fails under a map kills the process (SIGBUS), under a read it is
an error like any other.
"""

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rollback.checkpoints.format.hashing import ShardHash, hash_of, hash_pieces
from rollback.checkpoints.format.layout import HEADER_LIMIT, TensorEntry, header_space_for, lay_out, parse_header
from rollback.errors import CheckpointDamaged, CheckpointUnusable, reading_checkpoint, unreadable
from rollback.system import files
from rollback.system.durable import open_regular, write_all
from rollback.system.region import address_of, copy

_CHUNK = 1 << 20  # read ahead of the hash into the processor's cache
_PART = 8 << 20


@dataclass(frozen=True)
class ShardPiece:
    """One tensor to write: `data` holds `prod(shape)` items of `dtype`, row-major, little endian.

    A function is called when the tensor is written, and gives these bytes in parts, so that they need not be in memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview | Callable[[], Iterable[memoryview]]


@dataclass(frozen=True)
class Written:
    """Size in bytes and hash (`hashing`) of a file that was written."""

    size: int
    digest: str


def write_shard(path: Path, pieces: Iterable[ShardPiece], metadata: Mapping[str, str]) -> Written:
    """Write a new safetensors file and sync it; `path` must not exist. Raises OSError; a partial file is removed."""
    fd = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    return write_hashed(path, fd, _blocks(pieces, metadata), write_all, 4 * _CHUNK)


def hash_shard(pieces: Iterable[ShardPiece]) -> Written:
    """What `write_shard` would return without metadata, and without a file."""
    digest, size = ShardHash(), 0
    for block in _blocks(pieces, {}):
        size += block.nbytes
        for chunk in _chunks(block, 4 * _CHUNK):
            digest.update(chunk)
    return Written(size, digest.hexdigest())


def write_hashed(
    path: Path,
    fd: int,
    blocks: Iterable[memoryview],
    write: Callable[[int, memoryview], None],
    chunk_size: int,
    *,
    start: int | None = None,
) -> Written:
    """Write to a file, hashing on the way, sync it and close it. Where that fails, it is removed.

    start: where in a pack, to which others write as well, so that it is not removed; None: the file was just made for
    these bytes. write: writes all of a chunk, of at most `chunk_size` bytes. Raises what that does, and OSError.
    """
    digest, size = ShardHash(), 0
    try:
        os.lseek(fd, start or 0, os.SEEK_SET)
        for block in blocks:
            size += block.nbytes
            for chunk in _chunks(block, chunk_size):
                digest.update(chunk)
                write(fd, chunk)
        os.fsync(fd)
    except BaseException:
        if start is None:
            files.unlink(path)
        raise
    finally:
        os.close(fd)
    return Written(size, digest.hexdigest())


def _blocks(pieces: Iterable[ShardPiece], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    named = {piece.name: piece for piece in pieces}
    kinds = {name: (piece.dtype, piece.shape) for name, piece in named.items()}
    layout = lay_out(kinds, header_space_for(kinds, metadata))
    yield memoryview(layout.head(metadata))
    for name, entry in layout.entries.items():
        data = named[name].data
        count = 0
        for block in data() if callable(data) else (data,):
            count += block.nbytes
            yield block
        if count != entry.nbytes:
            raise ValueError(f"tensor {name}: {count} bytes for {entry.dtype}{list(entry.shape)}")


def _chunks(block: memoryview, size: int) -> Iterator[memoryview]:
    """A block's bytes, at most `size` at a time."""
    flat = block.cast("B") if block.nbytes else memoryview(b"")
    for start in range(0, len(flat), size):
        yield flat[start : start + size]


def read_verified(path: Path, expected: Written, start: int | None = None) -> Iterator[bytes]:
    """Read a file in parts, hashed on the way. Raises CheckpointDamaged, at the latest after the last part;
    CheckpointUnreadable where the disk fails.

    start: where the shard begins in a pack; None: it has the file to itself.
    """
    digest = ShardHash()
    left = expected.size
    try:
        with open_regular(path) as source:
            source.seek(start or 0)
            while part := source.read(_PART if start is None else min(_PART, left)):
                digest.update(part)
                left -= len(part)
                if left < 0:
                    break
                yield part
    except (OSError, ValueError) as error:
        raise not_read(path, error) from error
    if left or digest.hexdigest() != expected.digest:
        raise CheckpointDamaged(f"the shard {path} is not what its manifest says (hash {digest.hexdigest()})")


def not_read(path: Path, error: OSError | ValueError) -> CheckpointUnusable:
    """Why a shard could not be read: it is not there or not to be believed, or else the disk fails, or the limits of
    this process do, and another try makes sense."""
    doing = f"reading the shard {path}"
    return unreadable(doing, error) if isinstance(error, OSError) else CheckpointDamaged(f"{doing}: {error}")


class _OpenFile:
    """A file that is open for the readers of all shards in it; the last one that closes it does. Raises as they do."""

    def __init__(self, path: Path) -> None:
        try:
            self.fd = files.open_file(path, os.O_RDONLY)
            files.leave_room_for_others(self.fd)  # a checkpoint is read with all its files open
        except files.NotAFileOfOurs as error:
            raise CheckpointDamaged(f"the shard {path} is not to be believed: {error.strerror}") from error
        except OSError as error:
            raise unreadable(f"opening the shard {path}", error) from error
        self._readers = 1

    def shared(self) -> "_OpenFile":
        self._readers += 1
        return self

    def close(self) -> None:
        self._readers -= 1
        if not self._readers:
            os.close(self.fd)


class ShardReader:
    """A shard that is open for reading. Use as a context manager.

    Opening checks, in this order: a regular file and not a link, the expected size, the expected hash (unless `hashed`
    says that somebody else has looked), a header whose offsets follow from dtypes and shapes and cover the data without
    gaps or overlaps. Raises CheckpointDamaged; CheckpointUnreadable where the disk fails.

    start: where it begins in a pack; None: it has the file to itself. beside: an open reader of another shard in the
    pack, whose descriptor it uses too. memory: the same file in memory (the fast tier's), where the caller has it
    mapped anyway. threads: that hash.
    """

    def __init__(
        self,
        path: Path,
        expected: Written,
        *,
        start: int | None = None,
        beside: "ShardReader | None" = None,
        hashed: bool = False,
        memory: memoryview | None = None,
        threads: int = 1,
    ) -> None:
        self.path = path
        self._start = start or 0
        self._memory = memory if memory is not None and len(memory) == expected.size else None
        self._file: _OpenFile = _OpenFile(path) if beside is None else beside._file.shared()
        self._open = True
        try:
            with reading_checkpoint(f"looking at the shard {path}"):
                status = os.fstat(self._file.fd)
            size = status.st_size if start is None else min(expected.size, max(0, status.st_size - start))
            if size != expected.size or expected.size < 8:
                raise CheckpointDamaged(f"the shard {path} has {size} bytes; {expected.size} were written")
            self._size = expected.size
            if not hashed and (found := self._hash(threads)) != expected.digest:
                raise CheckpointDamaged(f"the shard {path} has hash {found}; {expected.digest} was written")
            self.entries, self.metadata = self._parse_header()
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, in memory of their own. Raises CheckpointUnreadable where the disk fails."""
        memory = memoryview(bytearray(self.entries[name].nbytes))
        self.read_into(name, memory)
        return memory

    def mapped(self, name: str) -> memoryview | None:
        """The bytes of a tensor where they lie in memory; None: they are in the file alone. While it is open."""
        if self._memory is None:
            return None
        entry = self.entries[name]
        return self._memory[entry.start : entry.end]

    def read_into(self, name: str, memory: memoryview, start: int | None = None) -> None:
        """Read a tensor into memory of exactly its size; with `start`, only as much of it as the memory has room for,
        from that byte on. Raises CheckpointUnreadable where the disk fails."""
        entry = self.entries[name]
        if memory.nbytes != entry.nbytes and (start is None or start + memory.nbytes > entry.nbytes):
            raise ValueError(f"{entry.nbytes} bytes into {memory.nbytes}")
        if memory.nbytes:
            self._fill(memory.cast("B"), entry.start + (start or 0))

    def close(self) -> None:
        if self._open:
            self._open = False
            self._file.close()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self, memory: memoryview, start: int) -> None:
        if self._memory is not None:
            copy(address_of(memory), address_of(self._memory[start : start + len(memory)]), len(memory))
            return
        done = 0
        while done < len(memory):
            with reading_checkpoint(f"reading the shard {self.path}"):
                got = os.preadv(self._file.fd, [memory[done:]], self._start + start + done)
            if not got:
                raise CheckpointDamaged(f"reading the shard {self.path}: it ends after {start + done} bytes")
            done += got

    def _hash(self, threads: int) -> str:
        if self._memory is not None:
            return hash_of(self._memory, threads)
        return hash_pieces(self._size, self._hash_piece, threads)

    def _hash_piece(self, start: int, end: int) -> bytes:
        digest, memory = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK, end - start)))
        for begin in range(start, end, _CHUNK):
            part = memory[: min(_CHUNK, end - begin)]
            self._fill(part, begin)
            digest.update(part)
        return digest.digest()

    def _parse_header(self) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        length = memoryview(bytearray(8))
        self._fill(length, 0)
        (stated,) = struct.unpack("<Q", length)
        if stated > min(self._size - 8, HEADER_LIMIT):
            raise CheckpointDamaged(
                f"the shard {self.path} states a header of {stated} bytes in a file of {self._size}"
            )
        text = bytearray(stated)
        self._fill(memoryview(text), 8)
        try:
            return parse_header(bytes(text), self._size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointDamaged(f"the header of the shard {self.path} is invalid: {error}") from error
