"""All judged steps of a run as columns: ten million lines are read in seconds and take 42 bytes each."""

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rollback.rundir.metrics.column_file import LINES, read_blocks
from rollback.rundir.metrics.metric_rows import COLUMNS, Column, as_columns, columns_of, row_of
from rollback.rundir.records import Metric
from rollback.system.durable import open_regular

_LINES_AT_ONCE = 1 << 13
_LINE_LIMIT = 1 << 12
_DAMAGED_LIMIT = 1000
_SHORTEST = 80  # bytes: the names of its fields alone take 75

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
SmallIntegers = npt.NDArray[np.int32]


@dataclass(frozen=True)
class MetricColumns:
    """One row for each line of metrics/train.jsonl, in the order of writing."""

    step: Integers
    batch: Integers
    attempt: SmallIntegers
    timeline: SmallIntegers
    loss: Floats
    """NaN also where the line has null."""
    grad_norm: Floats
    """NaN also where the line has null."""
    no_loss: npt.NDArray[np.bool_]
    """Where the line has null for the loss."""
    no_grad_norm: npt.NDArray[np.bool_]
    """Where the line has null for the gradient norm."""

    def __len__(self) -> int:
        return len(self.step)


def read_metric_columns(path: Path, damaged: list[str]) -> MetricColumns:
    """The sound lines. Damaged lines are described in `damaged` and left out; a torn tail is dropped; an absent file is
    empty. Lines of which there are columns on disk are compared with what these were made of, and not parsed.

    Raises OSError, or ValueError where `path` is not a regular file.
    """
    gathered = _Gathered()
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        gathered.expect(os.fstat(file.fileno()).st_size)
        for block in read_blocks(path):
            if not gathered.parse(file, path, damaged, block.start):
                break
            file.seek(block.start)
            if block.is_of(file.read(block.length)):
                gathered.add(block.columns, LINES)
            else:
                file.seek(block.start)
        gathered.parse(file, path, damaged)
    return MetricColumns(**gathered.columns())


class _Gathered:
    """The columns as they grow. Memory for them is taken as it is filled."""

    def __init__(self) -> None:
        self._room = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}
        self._rows = 0
        self._lines = 0

    def expect(self, size: int) -> None:
        """size: of all lines, in bytes."""
        self._room = {name: np.empty(size // _SHORTEST + 1, kind) for name, kind in COLUMNS.items()}

    def add(self, columns: dict[str, Column], lines: int) -> None:
        rows = len(columns["step"])
        for name, column in columns.items():
            self._room[name][self._rows : self._rows + rows] = column
        self._rows += rows
        self._lines += lines

    def parse(self, file: BinaryIO, path: Path, damaged: list[str], end: int | None = None) -> bool:
        """Add the lines from where the file stands up to byte `end`. False: nothing behind them is read."""
        lines = _whole_lines(file, path, damaged, end)
        while block := list(itertools.islice(lines, _LINES_AT_ONCE)):
            columns = columns_of(block)
            if columns is None:
                columns = as_columns(list(_one_by_one(block, path, self._lines, damaged)))
            self.add(columns, len(block))
            if len(damaged) > _DAMAGED_LIMIT:
                return False
        return end is None or file.tell() == end

    def columns(self) -> dict[str, Any]:
        return {name: column[: self._rows] for name, column in self._room.items()}


def _whole_lines(file: BinaryIO, path: Path, damaged: list[str], end: int | None) -> Iterator[bytes]:
    while (end is None or file.tell() < end) and (line := file.readline(_LINE_LIMIT)).endswith(b"\n"):
        yield line[:-1]
    if (end is None or file.tell() < end) and len(line) == _LINE_LIMIT:  # a shorter one is torn
        damaged.append(f"{path}: a line has more than {_LINE_LIMIT} bytes; nothing behind it is read")


def _one_by_one(block: list[bytes], path: Path, before: int, damaged: list[str]) -> Iterator[tuple[Any, ...]]:
    for place, line in enumerate(block, start=before + 1):
        try:
            yield row_of(Metric.model_validate_json(line).model_dump())
        except ValueError as error:
            damaged.append(f"{path}: line {place} is damaged: {str(error).splitlines()[0]}")
            if len(damaged) > _DAMAGED_LIMIT:
                return


def last_steps(columns: MetricColumns) -> dict[int, tuple[int, int]]:
    """For each attempt, the timeline and step of its last judged step."""
    found: dict[int, tuple[int, int]] = {}
    bounds = [0, *(np.flatnonzero(np.diff(columns.attempt)) + 1).tolist(), len(columns)]
    for first, last in itertools.pairwise(bounds) if len(columns) else ():
        timelines, attempt = columns.timeline[first:last], int(columns.attempt[first])
        timeline = int(timelines.max())
        step = int(columns.step[first:last][timelines == timeline].max())
        found[attempt] = max(found.get(attempt, (timeline, step)), (timeline, step))
    return found
