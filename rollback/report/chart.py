"""What the page's script draws: curves, incidents, skips, checkpoints and attempts, by step. Pure."""

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollback.facts.ring import Drained
from rollback.facts.training import Incident, JournalEntry, PassedOver
from rollback.inspect.audit.report import AuditReport
from rollback.report.series import Series, SeriesRow, Stretch, near, series, stretches, table
from rollback.rundir.journal.journal import of_kind
from rollback.rundir.metrics.metric_columns import Integers, MetricColumns
from rollback.terminal.quantities import number

_ROWS = 60  # of the curve in numbers
_NONFINITE_ROWS = 200
_FARTHEST = float(np.finfo(np.float32).max)  # values are drawn as float32; a loss of 1e308 is finite, and stays so


@dataclass(frozen=True)
class DrawnCurves:
    """What the page shows of the metrics. They themselves are no longer needed."""

    series: dict[str, Series]
    rows: list[list[SeriesRow]]
    """The curves in numbers, in the same order."""
    attempts: list[list[int]]
    """Attempt, first and last step of each unbroken run of steps, one for each restore and restart."""
    first: int
    last: int


def curves_of(columns: MetricColumns, incidents: Iterable[Incident]) -> DrawnCurves | None:
    """None where no step has been judged. incidents: around which no value is left out."""
    if not len(columns):
        return None
    parts = stretches(columns)
    keep = near(columns.step, parts, ((fact.onset_step, fact.detection_step) for fact in incidents))
    own = {
        "Loss": (columns.loss, columns.no_loss),
        "Gradient norm": (columns.grad_norm, columns.no_grad_norm),
    }
    known = {name: each for name, each in own.items() if not each[1].all()}
    return DrawnCurves(
        series={name: series(columns, *each, parts, keep) for name, each in known.items()},
        rows=[table(columns, *each, parts, _ROWS) for each in known.values()],
        attempts=_attempts(columns, parts),
        first=int(columns.step.min()),
        last=int(columns.step.max()),
    )


def chart(
    audit: AuditReport, records: Sequence[JournalEntry], curves: DrawnCurves
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script draws, and what stands around it in the page."""
    fates: dict[str, list[int]] = defaultdict(list)
    for entry in audit.checkpoints:
        if entry.step is not None:
            fates[entry.status].append(entry.step)
    fates["drained"] += [fact.step for _, fact in of_kind(records, Drained)]
    drawn = {
        "curves": [_curve(name, curve) for name, curve in curves.series.items()],
        "incidents": [
            {
                "number": entry.incident,
                "onset": entry.onset.step,
                "detection": entry.detection.step,
                "title": f"incident {entry.incident}: {entry.cause} ({entry.outcome})",
            }
            for entry in audit.incidents
        ],
        "skips": [[fact.step, fact.first, fact.last] for _, fact in of_kind(records, PassedOver)],
        "checkpoints": [
            {"fate": fate, "steps": _packed(np.array(steps))} for fate, steps in sorted(fates.items()) if steps
        ],
        "attempts": curves.attempts,
        "first": curves.first,
        "last": curves.last,
    }
    return drawn, _around(curves, {fate: len(steps) for fate, steps in fates.items() if steps})


def _around(curves: DrawnCurves, fates: Mapping[str, int]) -> dict[str, Any]:
    own = curves.series
    shown, total = sum(c.shown for c in own.values()), sum(c.total for c in own.values())
    thinned = f"Of {total:,} values {shown:,} are drawn: the extremes of each stretch, and all near incidents."
    ranges = [(name, item) for name in own for item in own[name].nonfinite]
    return {
        "label": f"{' and '.join(own).lower()} over steps {curves.first:,} to {curves.last:,}",
        "shown": "" if shown >= total else thinned,
        "names": [name.lower() for name in own],
        "rows": [
            [f"{row[0].first:,} to {row[0].last:,}", *(cell for each in row for cell in _cells(each))]
            for row in zip(*curves.rows, strict=True)
        ],
        "fates": [(fate, f"{fates[fate]:,}") for fate in sorted(fates)],
        "nonfinite": [
            (
                f"{item.first:,}" + (f" to {item.last:,}" if item.last > item.first else ""),
                name.lower(),
                item.kind,
                f"{item.count:,}",
                "undone" if item.undone else "part of the run",
            )
            for name, item in ranges[:_NONFINITE_ROWS]
        ],
        "nonfinite_total": sum(item.count for _, item in ranges),
    }


def _cells(row: Any) -> list[str]:
    values = ["-" if value is None else number(value) for value in (row.lowest, row.mean, row.highest)]
    return [*values, f"{row.nonfinite:,}" if row.nonfinite else ""]


def _curve(name: str, curve: Series) -> dict[str, Any]:
    return {
        "name": name,
        "lines": [
            {
                "undone": line.stretch.undone,
                "attempt": line.stretch.attempt,
                "steps": _packed(line.steps),
                "values": base64.b64encode(
                    np.clip(line.values, -_FARTHEST, _FARTHEST).astype("<f4").tobytes()
                ).decode(),
            }
            for line in curve.lines
        ],
        "nonfinite": [[item.first, item.last, item.kind, item.count] for item in curve.nonfinite],
    }


def _attempts(columns: MetricColumns, parts: Sequence[Stretch]) -> list[list[int]]:
    bars: list[list[int]] = []
    for part in parts:
        first, last = int(columns.step[part.rows.start]), int(columns.step[part.rows.stop - 1])
        if bars and bars[-1][0] == part.attempt and bars[-1][2] < first:
            bars[-1][2] = last
        else:
            bars.append([part.attempt, first, last])
    return bars


def _packed(steps: Integers) -> str:
    """Steps as unsigned 32-bit numbers: far more than any run has."""
    return base64.b64encode(np.minimum(steps, (1 << 32) - 1).astype("<u4").tobytes()).decode()
