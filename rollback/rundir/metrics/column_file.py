"""metrics/train.columns: the lines of metrics/train.jsonl in columns, block by block, so that nobody parses them again.

docs/format.md has the layout, and says when a block is believed.
"""

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from rollback.rundir.metrics.metric_rows import COLUMNS, IDENTITY, LINE_LIMIT, MetricColumn, columns_of, row_of
from rollback.system import files
from rollback.system.durable import open_regular, write_all

LINES = 1024
"""In a block."""
_HEAD = struct.Struct("<QQQ16sQ8xQ")  # start, length, rows, text, content, check
_CHECKED = _HEAD.size - 8
_SIZE = _HEAD.size + LINES * sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
_PIECE, _LARGEST_PIECE = 1 << 18, LINES << 12  # bytes of text that are read for a block


def column_path(metrics: Path) -> Path:
    return metrics.with_suffix(".columns")


@dataclass(frozen=True)
class ColumnBlock:
    """Some lines of the metrics. start, length: where they stand in bytes."""

    start: int
    length: int
    columns: dict[str, MetricColumn]
    _text: bytes

    def stands_in(self, metrics: int) -> bool:
        """Whether the last of its lines is where it was, in the metrics open there. If anything before it had been put
        in, taken out or exchanged for another run's, it would not be. Raises OSError."""
        size = min(self.length, LINE_LIMIT)
        text = os.pread(metrics, size, self.start + self.length - size)
        line, end = text[:-1].rpartition(b"\n")[2], text[-1:]
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
            stated = row_of(json.loads(line))
            return end == b"\n" and all(self.columns[name][-1] == stated[place] for place, name in enumerate(IDENTITY))
        return False

    def is_of(self, text: bytes) -> bool:
        """Whether these are, byte for byte, the lines that the block was made of."""
        return xxhash.xxh3_128_digest(text) == self._text


def read_blocks(metrics: Path) -> Iterator[ColumnBlock]:
    """The sound blocks, in the order of their lines; none where there is no file. Reads no metrics."""
    try:
        file = open_regular(column_path(metrics))
    except (OSError, ValueError):
        return
    end = 0
    with file:
        while len(raw := file.read(_SIZE)) == _SIZE:
            found = _head(raw, end)
            if found is None:
                continue
            start, length, text, content = found
            if xxhash.xxh3_64_intdigest(raw[_HEAD.size :]) == content:
                yield ColumnBlock(start, length, _unpacked(raw), text)
                end = start + length


class ColumnWriter:
    """Appends blocks of what has been written to the metrics. The run does not depend on it: a disk that refuses costs
    readers time. Only the writer of the metrics may make one."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._covered = 0
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = files.open_file(column_path(metrics), os.O_RDWR | os.O_CREAT)
            self._cut(files.size_of(metrics))

    def _cut(self, size: int) -> None:
        """Find the last block that may stand; what follows goes. size: of the metrics."""
        assert self._fd is not None
        place = 0
        while head := _head(os.pread(self._fd, _HEAD.size, place), self._covered):
            if head[0] + head[1] > size or os.fstat(self._fd).st_size < place + _SIZE:
                break
            self._covered, place = head[0] + head[1], place + _SIZE
        os.ftruncate(self._fd, place)
        os.lseek(self._fd, place, os.SEEK_SET)

    def catch_up(self, most: int) -> None:
        """Append up to `most` blocks of lines that are on disk by now."""
        if self._fd is None:
            return
        try:
            with open_regular(self._metrics) as file:
                for _ in range(most):
                    if not self._append(file):
                        return
        except (OSError, ValueError):
            os.close(self._fd)
            self._fd = None  # a torn block is cut off at the next start

    def _append(self, file: BinaryIO) -> bool:
        assert self._fd is not None
        text = _lines(file, self._covered)
        if text is None:
            return False
        start, self._covered = self._covered, self._covered + len(text)
        columns = columns_of(text.split(b"\n")[:-1])
        if columns is not None:  # else a line is damaged, and readers shall say so
            content = b"".join(columns[name].tobytes() for name in COLUMNS)
            text_hash, content_hash = xxhash.xxh3_128_digest(text), xxhash.xxh3_64_intdigest(content)
            head = _HEAD.pack(start, len(text), LINES, text_hash, content_hash, 0)[:_CHECKED]
            write_all(self._fd, head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + content)
        return True

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _lines(file: BinaryIO, start: int) -> bytes | None:
    """The next lines for a block; None: there are not enough, or they are too long for ours."""
    for size in (_PIECE, _LARGEST_PIECE):
        file.seek(start)
        text = file.read(size)
        end = -1
        if text.count(b"\n") >= LINES:
            for _ in range(LINES):
                end = text.index(b"\n", end + 1)
            return text[: end + 1]
        if len(text) < size:
            return None
    return None


def _head(raw: bytes, after: int) -> tuple[int, int, bytes, int] | None:
    """Start, length, hash of text and of content; None: it is no head of a block behind `after`."""
    if len(raw) < _HEAD.size:
        return None
    start, length, rows, text, content, check = _HEAD.unpack_from(raw)
    sound = check == xxhash.xxh3_64_intdigest(raw[:_CHECKED]) and start >= after and rows == LINES and length > 0
    return (start, length, text, content) if sound else None


def _unpacked(raw: bytes) -> dict[str, MetricColumn]:
    columns, place = {}, _HEAD.size
    for name, kind in COLUMNS.items():
        columns[name] = np.frombuffer(raw, kind, LINES, place)
        place += columns[name].nbytes
    return columns
