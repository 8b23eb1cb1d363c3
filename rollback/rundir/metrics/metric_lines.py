"""metrics/train.jsonl: a line for each judged step. The run does not depend on them."""

import contextlib
import json
import math
import os
from pathlib import Path

from pydantic import BaseModel

from rollback.system.durable import open_regular, read_tail
from rollback.system.lines import json_number

_quoted = json.encoder.encode_basestring_ascii
_PIECE = 8 << 20  # bytes read at a time
_TAIL = 1 << 16  # bytes


class Metric(BaseModel, frozen=True, ser_json_inf_nan="strings"):
    """A line of metrics/train.jsonl."""

    step: int
    batch: int
    loss: float | None
    grad_norm: float | None
    verdict: str
    attempt: int
    timeline: int


def metric_line(
    *, step: int, batch: int, loss: float | None, grad_norm: float | None, verdict: str, attempt: int, timeline: int
) -> str:
    """The line of a `Metric`. One is written at every step, so no object is made for it."""
    return (
        f'{{"step": {step}, "batch": {batch}, "loss": {_number(loss)}, "grad_norm": {_number(grad_norm)}, '
        f'"verdict": {_quoted(verdict)}, "attempt": {attempt}, "timeline": {timeline}}}'
    )


def _number(value: float | None) -> str:
    return repr(value) if type(value) is float and math.isfinite(value) else json.dumps(json_number(value))


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
                    self._position += len(file.readline(_PIECE)) if self._position else 0
                file.seek(self._position)
                whole = file.read(_PIECE).rpartition(b"\n")[0]
        except (OSError, ValueError):
            return []
        self._position += len(whole) + 1 if whole else 0
        metrics = []
        for line in whole.split(b"\n") if whole else ():
            with contextlib.suppress(ValueError):
                metrics.append(Metric.model_validate_json(line))
        return metrics
