"""The curve of a run, thinned for a picture: extremes, ends and everything that is not finite are kept. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollback.rundir.metrics.metric_columns import Flags, Floats, Integers, MetricColumns

BUCKETS = 12_000  # of the whole run, for each curve; two points each
DETAIL = 400  # steps around an incident that are kept one by one
ALL_DETAIL = 200_000  # of these, around all incidents together
RANGES = 2_000  # of non-finite values, for each curve
_AT_ONCE = 1 << 17  # rows: what is made of them stays in the processor's memory


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
    undone: bool


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
    turns = step[1:] <= step[:-1]
    for each in (columns.attempt, columns.timeline):
        turns |= each[1:] != each[:-1]
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


def thin(steps: Integers, values: Floats, starts: Integers, buckets: Integers, keep: Flags) -> Integers:
    """Rows to draw, ascending: of each bucket the lowest and the highest finite value, the first and the last finite
    value of each stretch, and the finite ones of `keep`.

    starts: where the stretches begin, in rows; the steps of each ascend. buckets: of each stretch, of equal width in
    steps; one with at most twice as many finite values has no need of them. keep: by row.
    """
    finite = np.flatnonzero(np.isfinite(values))
    sizes = np.diff(np.searchsorted(finite, starts), append=len(finite))
    own, sizes = buckets[sizes > 0], sizes[sizes > 0]  # of each stretch that has any finite value
    if not len(sizes):
        return finite
    ends = np.cumsum(sizes) - 1
    begins = ends - sizes + 1
    at, values = steps[finite], values[finite]
    chosen = keep[finite] | np.repeat(sizes <= 2 * own, sizes)
    chosen[begins] = chosen[ends] = True
    groups = _groups(at, begins, sizes, own)
    chosen[_equal(values, np.minimum.reduceat(values, groups), groups)[0]] = True
    chosen[_equal(values, np.maximum.reduceat(values, groups), groups)[1]] = True
    drawn: Integers = finite[chosen]
    return drawn


def _groups(at: Integers, begins: Integers, sizes: Integers, buckets: Integers) -> Integers:
    """The first row of each bucket that has any. The rows of millions of steps are not looked at: the buckets' bounds
    are looked up, in steps that go on from one stretch to the next."""
    widths = at[begins + sizes - 1] - at[begins] + 1
    before = np.cumsum(widths) - widths
    number = np.arange(buckets.sum()) - np.repeat(np.cumsum(buckets) - buckets, buckets)
    offsets = -(-number * np.repeat(widths, buckets) // np.repeat(buckets, buckets))  # rounded up
    steps = at + np.repeat(before - at[begins], sizes)
    rows = np.unique(np.searchsorted(steps, np.repeat(before, buckets) + offsets))
    found: Integers = rows[rows < len(at)]
    return found


def _equal(values: Floats, sought: Floats, groups: Integers) -> tuple[Integers, Integers]:
    """Where each group has the value that is sought in it, for the first and for the last time. groups: where they
    begin."""
    hits = np.flatnonzero(values == np.repeat(sought, np.diff(groups, append=len(values))))
    group = np.searchsorted(groups, hits, side="right")
    return hits[np.diff(group, prepend=-1) != 0], hits[np.diff(group, append=-1) != 0]


def near(steps: Integers, parts: Sequence[Stretch], incidents: Iterable[tuple[int, int]]) -> Flags:
    """By row, whether it is so near to an incident that nothing is left out. incidents: their steps of onset and
    detection."""
    kept = np.zeros(len(steps), bool)
    spans = np.array(sorted(incidents), np.int64).reshape(-1, 2)
    if not len(spans):
        return kept
    margin = min(DETAIL, ALL_DETAIL // len(spans)) // 2
    first, last = spans[:, 0] - margin, spans[:, 1] + margin
    begins = steps[[part.rows.start for part in parts]]
    ends = steps[[part.rows.stop - 1 for part in parts]]
    lowest = np.searchsorted(np.maximum.accumulate(last), begins)
    highest = np.searchsorted(first, ends, side="right")
    for part, low, high in zip(parts, lowest.tolist(), highest.tolist(), strict=True):
        own, start = steps[part.rows], part.rows.start
        near_ones = np.searchsorted(own, first[low:high]), np.searchsorted(own, last[low:high], side="right")
        for begin, end in zip(*(each.tolist() for each in near_ones), strict=True):
            kept[start + begin : start + end] = True
    return kept


def nonfinite_ranges(steps: Integers, values: Floats, known: np.ndarray, most: int, *, undone: bool) -> list[NonFinite]:
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
            undone,
        )
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]


def series(columns: MetricColumns, values: Floats, missing: Flags, parts: Sequence[Stretch], keep: Flags) -> Series:
    """A column of a run as a curve. keep: rows of which none is left out."""
    total = max(1, len(columns))
    lines: list[Line] = []
    ranges: list[NonFinite] = []
    for some in _batches(parts):
        begin = some[0].rows.start
        rows = slice(begin, some[-1].rows.stop)
        steps, own, known = columns.step[rows], values[rows], ~missing[rows]
        starts = np.array([part.rows.start - begin for part in some])
        lengths = np.diff(starts, append=len(own))
        index = thin(steps, own, starts, np.maximum(2, np.rint(BUCKETS * lengths / total).astype(np.int64)), keep[rows])
        cuts = np.searchsorted(index, [*starts, len(own)])
        broken = np.add.reduceat(known & ~np.isfinite(own), starts)
        for place, part in enumerate(some):
            drawn = index[cuts[place] : cuts[place + 1]]
            if len(drawn):
                lines.append(Line(part, steps[drawn], own[drawn]))
            if broken[place]:
                inner = slice(starts[place], starts[place] + lengths[place])
                most = max(8, round(RANGES * int(lengths[place]) / total))
                ranges += nonfinite_ranges(steps[inner], own[inner], known[inner], most, undone=part.undone)
    shown = sum(len(line.steps) for line in lines) + sum(item.count for item in ranges)
    return Series(lines, ranges, shown, int(len(values) - missing.sum()))


def _batches(parts: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Neighbours, as many together as have some rows: one call for many short ones, and no large copies."""
    some: list[Stretch] = []
    for part in parts:
        if some and part.rows.stop - some[0].rows.start > _AT_ONCE:
            yield some
            some = []
        some.append(part)
    if some:
        yield some


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
    kept = np.flatnonzero(np.repeat([not p.undone for p in parts], [p.rows.stop - p.rows.start for p in parts]))
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
                float((finite / len(finite)).sum()) if len(finite) else None,
                float(finite.max()) if len(finite) else None,
                int(len(known) - len(finite)),
            )
        )
    return rows
