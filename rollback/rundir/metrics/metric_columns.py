"""All judged steps of a run as columns: ten million lines are read in a second and take 34 bytes each."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rollback.rundir.metrics.column_file import LINES, read_blocks
from rollback.rundir.metrics.metric_lines import Metric
from rollback.rundir.metrics.metric_rows import COLUMNS, LINE_LIMIT, as_columns, columns_of, row_of
from rollback.system.durable import open_regular
from rollback.system.small_json import fault_of

_LINES_AT_ONCE = 1 << 13
_DAMAGED_LIMIT = 1000

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
SmallIntegers = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MetricColumns:
    """One row for each line of metrics/train.jsonl, in the order of writing."""

    step: Integers
    attempt: SmallIntegers
    timeline: SmallIntegers
    loss: Floats
    """NaN also where the line has null."""
    grad_norm: Floats
    """NaN also where the line has null."""
    no_loss: Flags
    """Where the line has null for the loss."""
    no_grad_norm: Flags
    """Where the line has null for the gradient norm."""

    def __len__(self) -> int:
        return len(self.step)


def joined(pieces: Iterable[MetricColumns]) -> MetricColumns:
    """All pieces as one, in memory of its own."""
    room = {name: bytearray() for name in _KEPT}
    for piece in pieces:
        for name in _KEPT:
            room[name] += getattr(piece, name).data
    columns: dict[str, Any] = {name: np.frombuffer(room[name], COLUMNS[name]) for name in _KEPT}
    return MetricColumns(**columns)


def metric_pieces(path: Path, damaged: list[str]) -> Iterator[MetricColumns]:
    """The columns of the sound lines, some thousand lines at a time. Damaged lines are described in `damaged` and left
    out; a torn tail is dropped; an absent file is empty. Of lines that have columns on disk, only the last of each
    thousand is read: docs/format.md says when a block of these is believed.

    Raises OSError, or ValueError where `path` is not a regular file.
    """
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        lines = _Lines(file, path, damaged)
        for block in read_blocks(path):
            yield from lines.up_to(block.start)
            if lines.over or file.tell() != block.start:
                break
            if block.stands_in(file.fileno()):
                yield _kept(block.columns)
                lines.pass_over(block.length)
        yield from lines.up_to(None)


_KEPT = [each.name for each in fields(MetricColumns)]


def _kept(columns: dict[str, Any]) -> MetricColumns:
    return MetricColumns(**{name: columns[name] for name in _KEPT})


class _Lines:
    """The lines of a file that are parsed, from the first to the last."""

    def __init__(self, file: BinaryIO, path: Path, damaged: list[str]) -> None:
        self._file, self._path, self._damaged = file, path, damaged
        self._number = 0
        self.over = False

    def pass_over(self, length: int) -> None:
        """The lines of a block, of this length in bytes."""
        self._file.seek(length, os.SEEK_CUR)
        self._number += LINES

    def up_to(self, end: int | None) -> Iterator[MetricColumns]:
        """Those before byte `end` of the file. The file stands there then, unless nothing behind them can be read."""
        lines = self._whole(end)
        while block := list(itertools.islice(lines, _LINES_AT_ONCE)):
            columns = columns_of(block)
            if columns is None:
                columns = as_columns(list(_one_by_one(block, self._path, self._number, self._damaged)))
            self._number += len(block)
            yield _kept(columns)
            self.over |= len(self._damaged) > _DAMAGED_LIMIT

    def _whole(self, end: int | None) -> Iterator[bytes]:
        file = self._file
        while not self.over and (end is None or file.tell() < end):
            line = file.readline(LINE_LIMIT)
            self.over = not line.endswith(b"\n")
            if not self.over:
                yield line[:-1]
            elif len(line) == LINE_LIMIT:  # a shorter one is torn
                told = f"{self._path}: a line has more than {LINE_LIMIT} bytes; nothing behind it is read"
                self._damaged.append(told)


def _one_by_one(block: list[bytes], path: Path, before: int, damaged: list[str]) -> Iterator[tuple[Any, ...]]:
    for place, line in enumerate(block, start=before + 1):
        try:
            yield row_of(Metric.model_validate_json(line).model_dump())
        except ValueError as error:
            damaged.append(f"{path}: line {place} is damaged: {fault_of(error)}")
            if len(damaged) > _DAMAGED_LIMIT:
                return


def last_steps(pieces: Iterable[MetricColumns]) -> dict[int, tuple[int, int]]:
    """For each attempt, the timeline and step of its last judged step."""
    found: dict[int, tuple[int, int]] = {}
    for piece in pieces:
        attempts = piece.attempt
        bounds = [0, *(np.flatnonzero(attempts[1:] != attempts[:-1]) + 1).tolist(), len(attempts)]
        for first, last in itertools.pairwise(bounds) if len(attempts) else ():
            timelines, attempt = piece.timeline[first:last], int(attempts[first])
            timeline = int(timelines.max())
            step = int(piece.step[first:last][timelines == timeline].max())
            found[attempt] = max(found.get(attempt, (timeline, step)), (timeline, step))
    return found
