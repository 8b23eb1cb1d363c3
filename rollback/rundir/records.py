"""The small files that ranks keep beside the journal: metrics, skip records, heartbeats; and all heartbeats of a run,
also as other hosts tell them. The run does not depend on them."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from rollback.facts.fact import Count
from rollback.rundir.beacon import read_in_place
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import end_of_lines, open_regular, read_tail, write_file
from rollback.system.small_json import parse_model, sound_models

_LINE_LIMIT = 8 << 20  # a skipped batch of a million samples on one rank; a hostile line is not read into memory
_TAIL = 1 << 16  # bytes
_DAMAGED_LIMIT = 1000  # lines: more than that is no record with some damage


LEAVING = "leaving"
"""`Heartbeat.doing` of a rank whose guard is closed and whose interpreter ends."""

UNRECORDED = 200
"""Characters of `Heartbeat.unrecorded` at most."""


class Metric(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """A line of metrics/train.jsonl."""

    step: int
    batch: int
    loss: float | None
    grad_norm: float | None
    verdict: str
    attempt: int
    timeline: int


class SkippedBatch(BaseModel, frozen=True):
    """A line of skips/rank-NNNNN.jsonl."""

    batch: Count
    epoch: int
    offset: int
    indices: list[int] | None
    timeline: int


class Heartbeat(BaseModel, frozen=True):
    """ranks/rank-NNNNN.json. Times are by the host's monotonic clock.

    A rank that waits in a collective looks and does not move. A rank that is stopped, or whose interpreter lock is
    held, does neither.
    """

    pid: int
    host: str
    attempt: int = Field(ge=0, lt=1 << 53)
    step: int = Field(ge=0, lt=1 << 53)
    batch: int = Field(ge=0, lt=1 << 53)
    doing: str
    monotonic: FiniteFloat
    """When the rank's Python last moved."""
    start: str = ""
    """When the process began, as from `rollback.system.processes.start_of`; empty where unknown."""
    looked: FiniteFloat = 0.0
    """When the rank last looked."""
    collectives: int | None = None
    """Number of collectives that its default process group has begun."""
    unrecorded: str = Field("", max_length=UNRECORDED)
    """Rank 0: training is complete, and why the journal has not taken that. Empty otherwise."""


_LINE = 1 << 12  # bytes that a line has at most, amply


class LineWriter:
    """Appends JSON lines; buffered, so that a line a step costs microseconds. Opening truncates a torn tail.

    The constructor, `write` and `flush` raise OSError.
    """

    def __init__(self, path: Path) -> None:
        files.make_directory(path.parent)
        self.last = _cut_torn_tail(path)
        """The last line that was there; empty: none."""
        descriptor = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file: TextIOWrapper = os.fdopen(descriptor, "a", encoding="utf-8", buffering=1 << 16)

    def write(self, line: str) -> None:
        self._file.write(line + "\n")

    def flush(self, *, durable: bool = False) -> None:
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_torn_tail(path: Path) -> str:
    """Returns the last line that is whole."""
    if not path.exists():
        return ""
    with os.fdopen(files.open_file(path, os.O_RDWR), "rb+") as file:
        end = end_of_lines(file)
        file.truncate(end)
        file.seek(max(0, end - _LINE))
        return file.read().rstrip(b"\n").rpartition(b"\n")[2].decode("utf-8", "replace")


def metric_line(
    *, step: int, batch: int, loss: float | None, grad_norm: float | None, verdict: str, attempt: int, timeline: int
) -> str:
    """The line of a `Metric`. One is written at every step, so no object is made for it."""
    return (
        f'{{"step": {step}, "batch": {batch}, "loss": {_number(loss)}, "grad_norm": {_number(grad_norm)}, '
        f'"verdict": {json.dumps(verdict)}, "attempt": {attempt}, "timeline": {timeline}}}'
    )


def _number(value: float | None) -> str:
    return repr(value) if type(value) is float and math.isfinite(value) else json.dumps(json_number(value))


def json_number(value: float | None) -> float | str | None:
    """JSON has no number for what is not finite: a text stands for it."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _lines(path: Path, model: type[BaseModel], damaged: list[str] | None) -> Iterator[Any]:
    """Sound lines of a file, in order; a last line without its end is a torn tail and dropped.

    Damaged lines are described in `damaged` and left out; where `damaged` is None they raise.
    """
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        number = 0
        while (line := file.readline(_LINE_LIMIT)).endswith(b"\n"):
            number += 1
            try:
                yield parse_model(line, model)
            except ValueError as error:
                if damaged is None:
                    raise
                damaged.append(f"{path}: line {number} is damaged: {first_fault(error)}")
                if len(damaged) > _DAMAGED_LIMIT:
                    raise ValueError(f"{path}: more than {_DAMAGED_LIMIT} lines are damaged") from None
        if len(line) == _LINE_LIMIT:
            raise ValueError(f"{path}: line {number + 1} has more than {_LINE_LIMIT} bytes")


def first_fault(error: ValueError) -> str:
    """The first fault of a line, in words."""
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)


def read_metrics(path: Path, damaged: list[str] | None = None) -> Iterator[Metric]:
    """Judged steps in the order of writing; an absent file has none.

    Raises OSError, or ValueError where `path` is not a regular file. A damaged line raises ValueError too, unless
    `damaged` is a list: then the line is described there and left out.
    """
    yield from _lines(path, Metric, damaged)


def read_last_metrics(path: Path, count: int | None = None) -> list[Metric]:
    """The last `count` sound lines of the metrics, oldest first; fewer where the last 64 KiB, with some hundred, have
    fewer. Empty where they cannot be read."""
    try:
        lines = read_tail(path, _TAIL).split(b"\n")[:-1]
    except (OSError, ValueError):
        return []
    found: list[Metric] = []
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found.append(Metric.model_validate_json(line))
        if len(found) == count:
            break
    return found[::-1]


class MetricTail:
    """Judged steps, read piece by piece while they are written. Of the existing lines, only the last `memory` bytes."""

    def __init__(self, path: Path, memory: int) -> None:
        self._path = path
        self._memory = memory
        self._position: int | None = None

    def new(self) -> list[Metric]:
        """Sound lines after those of the last call; none where the file cannot be read at present."""
        try:
            with open_regular(self._path) as file:
                size = os.fstat(file.fileno()).st_size
                if self._position is None or size < self._position:  # the first time, or another file
                    self._position = max(0, size - self._memory)
                    file.seek(self._position)
                    self._position += len(file.readline(_LINE_LIMIT)) if self._position else 0
                file.seek(self._position)
                whole = file.read(_LINE_LIMIT).rpartition(b"\n")[0]
        except (OSError, ValueError):
            return []
        self._position += len(whole) + 1 if whole else 0
        metrics = []
        for line in whole.split(b"\n") if whole else ():
            with contextlib.suppress(ValueError):
                metrics.append(Metric.model_validate_json(line))
        return metrics


def read_skipped(path: Path, damaged: list[str] | None = None) -> Iterator[SkippedBatch]:
    """Batches that a rank skipped. Absent files, damage and errors as in `read_metrics`."""
    yield from _lines(path, SkippedBatch, damaged)


def write_heartbeat(path: Path, heartbeat: Heartbeat) -> None:
    """Replace a rank's heartbeat. Not synced: it matters only while the processes live. Raises OSError.

    Where their directory was removed it comes back, since without one `rollback status` sees no rank. The run directory
    does not: it may have been moved.
    """
    content = heartbeat.model_dump_json().encode()
    try:
        write_file(path, content, durable=False)
    except FileNotFoundError:
        if not path.parent.parent.is_dir():
            raise
        files.make_directory(path.parent)
        write_file(path, content, durable=False)


def read_heartbeats(directory: Path) -> dict[int, Heartbeat]:
    """The readable heartbeats by rank, without those that are absent, damaged or just being replaced."""
    found = sound_models(directory, "rank-*.json", Heartbeat, 1 << 16)
    numbers = {name: name.removeprefix("rank-").removesuffix(".json") for name in found}
    return {int(number): found[name] for name, number in numbers.items() if number.isdecimal()}


class HostBeats(BaseModel, frozen=True):
    """What a supervisor's report (nodes/node-NAME.json) says of the ranks on its host."""

    beats: dict[int, Heartbeat] = {}


def read_all_heartbeats(paths: RunPaths) -> dict[int, Heartbeat]:
    """The heartbeats of this host's ranks and, while a job on many hosts runs, of the others, as their supervisors
    report. The newest of each rank: what a host said last that was lost lies beside what is said in its place."""
    told: list[dict[int, Heartbeat]] = []
    for path in sorted(paths.nodes.glob("node-*.json")) if paths.nodes.is_dir() else []:
        with contextlib.suppress(OSError, ValueError):
            told.append(parse_model(read_in_place(path), HostBeats).beats)
    found: dict[int, Heartbeat] = {}
    for beats in (*told, read_heartbeats(paths.ranks)):
        for rank, beat in beats.items():
            if rank not in found or (beat.attempt, beat.looked) >= (found[rank].attempt, found[rank].looked):
                found[rank] = beat
    return found
