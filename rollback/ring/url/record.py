"""The run's record at a URL: new parts are uploaded in pieces, and the whole record is downloaded."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rollback.errors import CheckpointDamaged, RingUnavailable
from rollback.ring.url.index import PIECE, Index, RecordFile, RecordPiece, describe, piece_key, record_paths
from rollback.ring.url.store import Store, require_room
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import end_of_lines, open_regular, sync_directory, write_file

Relation = Literal["same", "ahead", "behind", "diverged"]
"""How a local file compares with the one at the URL: the same, longer with the whole other file as its beginning,
shorter, or diverged."""


def upload(store: Store, paths: RunPaths, before: Index) -> list[RecordFile]:
    """Upload the parts of the record that `before` does not have, and return their entries for the next index.

    Only whole lines are uploaded. A file that cannot be read, or that disappears meanwhile (a pin), stays as in
    `before` or is left out. Raises RingUnavailable.
    """
    known = {kept.path: kept for kept in before.record}
    record = []
    for path in record_paths(paths):
        try:
            pieces = _pieces(paths.root / path, known.get(path))
        except (OSError, ValueError):
            if path in known:
                record.append(known[path])
            continue
        old = known[path].pieces if path in known else ()
        for number, (piece, data) in enumerate(pieces):
            if number >= len(old) or old[number] != piece:
                assert data is not None
                store.put(piece_key(path, number * PIECE, piece), data)
        record.append(RecordFile(path=path, pieces=tuple(piece for piece, _ in pieces)))
    return record


def put_again(store: Store, paths: RunPaths, index: Index) -> int:
    """Upload the pieces that the index names and that are not at the URL any more, and return how many these were.

    `upload` takes for granted what an index names. What does not change may be months older there than the newest
    checkpoint, so a rule of the bucket that removes old objects removes run.json and the beginning of the journals
    first. Raises RingUnavailable, OSError.
    """
    count = 0
    for kept in index.record:
        for number, (key, piece) in enumerate(zip(kept.keys, kept.pieces, strict=True)):
            if store.size(key) == piece.size:
                continue
            try:
                with open_regular(paths.root / kept.path) as file:
                    file.seek(number * PIECE)
                    data = file.read(piece.size)
            except ValueError as error:
                raise RingUnavailable(f"{store.url}/{key} is gone, and cannot be put there again: {error}") from error
            if describe(data) == piece:  # else it has changed, and the next index names other content
                store.put(key, data)
                count += 1
    return count


def _pieces(path: Path, known: RecordFile | None) -> list[tuple[RecordPiece, bytes | None]]:
    """The pieces of a file. The full pieces of a file that only grows come from `known`, without reading their
    content, but the last one: what was not synced may be gone since, and other lines be in its place."""
    grows = path.suffix == ".jsonl"
    full = [piece for piece in known.pieces if piece.size == PIECE][:-1] if known and grows else []
    pieces: list[tuple[RecordPiece, bytes | None]] = [(piece, None) for piece in full]
    with open_regular(path) as file:
        end = end_of_lines(file) if grows else os.fstat(file.fileno()).st_size
        start = PIECE * len(full)
        if end < start:
            raise ValueError(f"{path} has become shorter")
        file.seek(start)
        while data := file.read(min(PIECE, end - file.tell())):
            pieces.append((describe(data), data))
    return pieces


def relate(local: bytes, kept: RecordFile, read: Callable[[str, RecordPiece], bytes]) -> Relation:
    """Compare a local file with the one at the URL; calls `read(key, piece)` for one piece at most."""
    position = 0
    for key, piece in zip(kept.keys, kept.pieces, strict=True):
        own = local[position : position + piece.size]
        if len(own) < piece.size:
            return "behind" if not own or read(key, piece).startswith(own) else "diverged"
        if describe(own) != piece:
            return "diverged"
        position += piece.size
    return "same" if position == len(local) else "ahead"


def read_piece(store: Store, key: str, piece: RecordPiece) -> bytes:
    """Content of a piece, verified. Raises CheckpointDamaged or RingUnavailable."""
    data = store.get(key, piece.size)
    if data is None or describe(data) != piece:
        found = "is missing" if data is None else "is not what its index says"
        raise CheckpointDamaged(f"{store.url}/{key} {found}")
    return data


def read_record_file(store: Store, kept: RecordFile, limit: int) -> bytes:
    """A file of the record, of at most `limit` bytes. Raises as `read_piece`."""
    if kept.size > limit:
        raise CheckpointDamaged(f"{store.url}: {kept.path} has {kept.size} bytes; at most {limit} are believed")
    return b"".join(read_piece(store, key, piece) for key, piece in zip(kept.keys, kept.pieces, strict=True))


def download_beginning_with(store: Store, index: Index, beginnings: tuple[str, ...], root: Path) -> None:
    """The files of the record whose paths begin so. Raises RingUnavailable, OSError."""
    with explained(store.url):
        for kept in index.record:
            if kept.path.startswith(beginnings):
                download(store, kept, root)


def download(store: Store, kept: RecordFile, root: Path) -> None:
    """Write a file of the record to its place below `root`, durable. Raises as `read_piece`, and OSError.

    Its path was checked when the index was read.
    """
    target = root / kept.path
    files.make_directory(target.parent)
    require_room(target.parent, kept.size)
    if len(kept.pieces) <= 1:
        write_file(target, read_record_file(store, kept, PIECE))
        return
    arriving = target.with_name(f".{target.name}.arriving")
    with os.fdopen(files.open_file(arriving, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as sink:
        for key, piece in zip(kept.keys, kept.pieces, strict=True):
            sink.write(read_piece(store, key, piece))
        sink.flush()
        os.fsync(sink.fileno())
    files.rename(arriving, target)
    sync_directory(target.parent)


@contextmanager
def explained(url: str) -> Iterator[None]:
    """A piece that cannot be believed, found within, is told as trouble of the record at the URL."""
    try:
        yield
    except CheckpointDamaged as error:
        raise RingUnavailable(
            f"reading the run's record at {url}: {error.message}",
            hint="restore the object from a copy or an older version of it, or name another URL; nothing was changed",
        ) from error
