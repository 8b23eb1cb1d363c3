"""What the page's script draws: curves, incidents, skips, checkpoints and attempts, by step. Pure."""

import base64
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollback.facts.ring import Drained
from rollback.facts.training import JournalEntry, PassedOver
from rollback.inspect.audit.report import AuditReport
from rollback.report.series import Series, Stretch, series, stretches, table
from rollback.rundir.metrics.metric_columns import Floats, Integers, MetricColumns
from rollback.terminal.quantities import number

_ROWS = 60  # of the curve in numbers
_NONFINITE_ROWS = 200


def chart(
    ledger: AuditReport, records: Sequence[JournalEntry], columns: MetricColumns
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """What the script draws, and what stands around it in the page; None where no step has been judged."""
    if not len(columns):
        return None
    parts = stretches(columns)
    spans = [(entry.onset.step, entry.detection.step) for entry in ledger.incidents]
    own = {
        "Loss": (columns.loss, columns.no_loss),
        "Gradient norm": (columns.grad_norm, columns.no_grad_norm),
    }
    curves = {
        name: series(columns, values, missing, parts, spans)
        for name, (values, missing) in own.items()
        if not missing.all()
    }
    fates: dict[str, list[int]] = defaultdict(list)
    for entry in ledger.checkpoints:
        if entry.step is not None:
            fates[entry.status].append(entry.step)
    for record in records:
        if isinstance(record.fact, Drained):
            fates["drained"].append(record.fact.step)
    drawn = {
        "curves": [_curve(name, curve) for name, curve in curves.items()],
        "incidents": [
            {
                "number": entry.incident,
                "onset": entry.onset.step,
                "detection": entry.detection.step,
                "title": f"incident {entry.incident}: {entry.cause} ({entry.outcome})",
            }
            for entry in ledger.incidents
        ],
        "skips": [
            [record.fact.step, record.fact.first, record.fact.last]
            for record in records
            if isinstance(record.fact, PassedOver)
        ],
        "checkpoints": [{"fate": fate, "steps": _packed(np.array(steps))} for fate, steps in sorted(fates.items())],
        "attempts": _attempts(columns, parts),
        "first": int(columns.step.min()),
        "last": int(columns.step.max()),
    }
    return drawn, _around(columns, own, curves, parts, fates)


def _around(
    columns: MetricColumns,
    own: dict[str, tuple[Floats, Any]],
    curves: dict[str, Series],
    parts: Sequence[Stretch],
    fates: dict[str, list[int]],
) -> dict[str, Any]:
    first, last = int(columns.step.min()), int(columns.step.max())
    shown, total = sum(c.shown for c in curves.values()), sum(c.total for c in curves.values())
    names = list(curves)
    thinned = f"Of {total:,} values {shown:,} are drawn: the extremes of each stretch, and all near incidents."
    rows = [table(columns, *own[name], parts, _ROWS) for name in names]
    ranges = [(name, item) for name in names for item in curves[name].nonfinite]
    return {
        "label": f"{' and '.join(names).lower()} over steps {first:,} to {last:,}",
        "shown": "" if shown >= total else thinned,
        "names": [name.lower() for name in names],
        "rows": [
            [f"{row[0].first:,} to {row[0].last:,}", *(cell for each in row for cell in _cells(each))]
            for row in zip(*rows, strict=True)
        ],
        "fates": [(fate, f"{len(fates[fate]):,}") for fate in sorted(fates)],
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
                "values": base64.b64encode(line.values.astype("<f4").tobytes()).decode(),
            }
            for line in curve.lines
        ],
        "nonfinite": [[item.first, item.last, item.kind, item.count] for item in curve.nonfinite],
    }


def _attempts(columns: MetricColumns, parts: Sequence[Stretch]) -> list[list[int]]:
    """Attempt, first and last step of each unbroken run of steps, one for each restore and restart."""
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
