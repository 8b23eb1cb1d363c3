"""All judged steps of a run as columns: a million lines are read in seconds and take 40 bytes each."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rollback.rundir.records import Metric
from rollback.system.durable import open_regular

_LINES_AT_ONCE = 1 << 13
_LINE_LIMIT = 1 << 12
_DAMAGED_LIMIT = 1000

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MetricColumns:
    """One row for each line of metrics/train.jsonl, in the order of writing."""

    step: Integers
    batch: Integers
    attempt: Integers
    timeline: Integers
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
    empty.

    Raises OSError, or ValueError where `path` is not a regular file.
    """
    parts: list[tuple[Any, ...]] = []
    number = 0
    try:
        with open_regular(path) as file:
            lines = _whole_lines(file, path, damaged)
            while block := list(itertools.islice(lines, _LINES_AT_ONCE)):
                rows = [row for row in _rows(block, path, number, damaged) if row is not None]
                number += len(block)
                parts.append(_columns(rows))
                if len(damaged) > _DAMAGED_LIMIT:
                    break
    except FileNotFoundError:
        pass
    parts = parts or [_columns([])]
    return MetricColumns(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _whole_lines(file: BinaryIO, path: Path, damaged: list[str]) -> Iterator[bytes]:
    while (line := file.readline(_LINE_LIMIT)).endswith(b"\n"):
        yield line
    if len(line) == _LINE_LIMIT:  # a shorter one is torn
        damaged.append(f"{path}: a line has more than {_LINE_LIMIT} bytes; nothing behind it is read")


def _rows(block: list[bytes], path: Path, before: int, damaged: list[str]) -> Iterable[tuple[Any, ...] | None]:
    try:
        # One call for thousands of lines is several times as fast as a call for each.
        return [_row(body) for body in json.loads(b"[" + b",".join(block) + b"]")]
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return list(_one_by_one(block, path, before, damaged))


def _row(body: dict[str, Any]) -> tuple[Any, ...]:
    """The values of a line. Raises TypeError, KeyError, ValueError or OverflowError where it is not one of ours."""
    whole = tuple(body[name] for name in ("step", "batch", "attempt", "timeline"))
    if any(type(value) is not int or not 0 <= value < 1 << 62 for value in whole):
        raise ValueError("not a number of a step")
    loss, grad_norm = body["loss"], body["grad_norm"]
    return (
        *whole,
        float("nan") if loss is None else float(loss),
        float("nan") if grad_norm is None else float(grad_norm),
        loss is None,
        grad_norm is None,
    )


def _one_by_one(block: list[bytes], path: Path, before: int, damaged: list[str]) -> Iterator[tuple[Any, ...] | None]:
    for place, line in enumerate(block, start=before + 1):
        try:
            yield _row(Metric.model_validate_json(line).model_dump())
        except ValueError as error:
            damaged.append(f"{path}: line {place} is damaged: {str(error).splitlines()[0]}")
            if len(damaged) > _DAMAGED_LIMIT:
                return
            yield None


def _columns(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 8
    kinds = [np.int64] * 4 + [np.float64] * 2 + [np.bool_] * 2
    return tuple(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True))


def last_steps(columns: MetricColumns) -> dict[int, tuple[int, int]]:
    """For each attempt, the timeline and step of its last judged step."""
    found: dict[int, tuple[int, int]] = {}
    for attempt in np.unique(columns.attempt):
        rows = columns.attempt == attempt
        timeline = int(columns.timeline[rows].max())
        found[int(attempt)] = (timeline, int(columns.step[rows & (columns.timeline == timeline)].max()))
    return found
