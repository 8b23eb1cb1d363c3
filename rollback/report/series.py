"""The curve of a run, thinned for a picture: extremes, ends and everything that is not finite are kept. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollback.rundir.metrics.metric_columns import Floats, Integers, MetricColumns

BUCKETS = 12_000  # of the whole run, for each curve; two points each
DETAIL = 400  # steps around an incident that are kept one by one
ALL_DETAIL = 200_000  # of these, around all incidents together
RANGES = 2_000  # of non-finite values, for each curve


@dataclass(frozen=True)
class Stretch:
    """Steps that were run one after the other. undone: a later restore or restart went back behind them."""

    attempt: int
    timeline: int
    undone: bool
    rows: slice


@dataclass(frozen=True)
class NonFinite:
    """Steps `first` to `last` of a stretch that had values of this kind; `count` of them."""

    first: int
    last: int
    kind: str
    count: int
    undone: bool = False


@dataclass(frozen=True)
class Line:
    """The points of a stretch that are drawn: steps ascend, values are finite."""

    stretch: Stretch
    steps: Integers
    values: Floats


@dataclass(frozen=True)
class Series:
    """One curve. `shown` of `total` values are drawn."""

    lines: list[Line]
    nonfinite: list[NonFinite]
    shown: int
    total: int


def stretches(columns: MetricColumns) -> list[Stretch]:
    """The run's stretches in the order in which they were run; one that is undone in part becomes two."""
    count = len(columns)
    if not count:
        return []
    step = columns.step
    turns = (np.diff(columns.attempt) != 0) | (np.diff(columns.timeline) != 0) | (np.diff(step) <= 0)
    bounds = [0, *(np.flatnonzero(turns) + 1).tolist(), count]
    pieces = [(bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)]
    found: list[Stretch] = []
    earliest = np.iinfo(np.int64).max  # the first step of all that was run later
    for first, last in reversed(pieces):
        cut = first + int(np.searchsorted(step[first:last], earliest))
        attempt, timeline = int(columns.attempt[first]), int(columns.timeline[first])
        for begin, end, undone in ((cut, last, True), (first, cut, False)):
            if end > begin:
                found.append(Stretch(attempt, timeline, undone, slice(begin, end)))
        earliest = min(earliest, int(step[first]))
    return found[::-1]


def thin(steps: Integers, values: Floats, buckets: int, keep: Iterable[tuple[int, int]] = ()) -> Integers:
    """Indices of the points to draw, ascending: of each bucket the lowest and the highest finite value, the first and
    the last finite value, and all that lie in one of the ranges of steps `keep` (both ends included).

    steps: ascending. buckets: at least 1, of equal width in steps.
    """
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) <= 2 * buckets:
        return finite
    at, value = steps[finite], values[finite]
    span = int(at[-1]) - int(at[0]) + 1
    bucket = (at - at[0]) * buckets // span
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    chosen = [np.array([0, len(finite) - 1])]
    order = np.lexsort((value, bucket))
    ends = np.append(starts[1:], len(finite)) - 1
    chosen += [order[starts], order[ends]]
    for first, last in keep:
        chosen.append(np.arange(np.searchsorted(at, first), np.searchsorted(at, last, side="right")))
    drawn: Integers = finite[np.unique(np.concatenate(chosen))]
    return drawn


def nonfinite_ranges(steps: Integers, values: Floats, known: np.ndarray, most: int) -> list[NonFinite]:
    """Ranges of neighbouring rows whose known values are not finite, of one kind each. Where there are more than
    `most`, near ones are joined: no step is lost, and the counts stay right."""
    rows = np.flatnonzero(known & ~np.isfinite(values))
    if not len(rows):
        return []
    kinds = np.where(np.isnan(values[rows]), 0, np.sign(values[rows])).astype(np.int64)
    breaks = (np.diff(rows) != 1) | (np.diff(kinds) != 0)
    first = np.append(0, np.flatnonzero(breaks) + 1)
    last = np.append(np.flatnonzero(breaks), len(rows) - 1)
    if len(first) > most:
        gaps = steps[rows[first[1:]]] - steps[rows[last[:-1]]]
        apart = np.sort(np.argsort(gaps, kind="stable")[::-1][: most - 1])
        first, last = np.append(first[0], first[apart + 1]), np.append(last[apart], last[-1])
    names = {0: "NaN", 1: "Infinity", -1: "-Infinity"}
    return [
        NonFinite(
            int(steps[rows[a]]),
            int(steps[rows[b]]),
            " and ".join(names[kind] for kind in sorted(set(kinds[a : b + 1].tolist()))),
            int(b - a + 1),
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]


def series(
    columns: MetricColumns,
    values: Floats,
    missing: np.ndarray,
    parts: Sequence[Stretch],
    incidents: Iterable[tuple[int, int]],
) -> Series:
    """A column of a run as a curve. incidents: the steps of onset and detection, around which nothing is left out."""
    spans = np.array(list(incidents), np.int64).reshape(-1, 2)
    margin = min(DETAIL, ALL_DETAIL // max(1, len(spans))) // 2
    spans += np.array([-margin, margin])
    total = max(1, len(columns))
    lines, ranges = [], []
    for part in parts:
        steps, own = columns.step[part.rows], values[part.rows]
        share = max(2, round(BUCKETS * len(steps) / total))
        near = (spans[:, 0] <= steps[-1]) & (spans[:, 1] >= steps[0])
        index = thin(steps, own, share, spans[near].tolist())
        if len(index):
            lines.append(Line(part, steps[index], own[index]))
        most = max(8, round(RANGES * len(steps) / total))
        found = nonfinite_ranges(steps, own, ~missing[part.rows], most)
        ranges += [replace(item, undone=part.undone) for item in found]
    shown = sum(len(line.steps) for line in lines) + sum(item.count for item in ranges)
    return Series(lines, ranges, shown, int(len(values) - missing.sum()))


@dataclass(frozen=True)
class SeriesRow:
    """What a range of steps amounts to, for those who read numbers: of the steps that count."""

    first: int
    last: int
    lowest: float | None
    mean: float | None
    highest: float | None
    nonfinite: int


def table(
    columns: MetricColumns, values: Floats, missing: np.ndarray, parts: Sequence[Stretch], most: int
) -> list[SeriesRow]:
    """The curve in at most `most` rows."""
    kept = np.concatenate([np.arange(p.rows.start, p.rows.stop) for p in parts if not p.undone] or [np.array([], int)])
    if not len(kept):
        return []
    rows = []
    for index in np.array_split(kept, min(most, len(kept))):
        known = values[index][~missing[index]]
        finite = known[np.isfinite(known)]
        rows.append(
            SeriesRow(
                int(columns.step[index[0]]),
                int(columns.step[index[-1]]),
                float(finite.min()) if len(finite) else None,
                float(finite.mean()) if len(finite) else None,
                float(finite.max()) if len(finite) else None,
                int(len(known) - len(finite)),
            )
        )
    return rows
