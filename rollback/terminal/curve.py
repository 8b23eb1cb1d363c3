"""A curve in bounded memory: buckets of steps, each with its lowest and highest value; and its picture of braille dots,
two columns and four rows in a character. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

CAPACITY = 1024
_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, then by row from above
_LOG_FROM = 8.0  # a curve whose highest value is this many times its lowest is drawn on a logarithmic axis


@dataclass
class Bucket:
    """Values of neighbouring steps: the finite ones from `low` to `high` (NaN where there are none)."""

    low: float = math.nan
    high: float = math.nan
    nonfinite: bool = False

    @classmethod
    def of(cls, value: float) -> "Bucket":
        return cls(value, value) if math.isfinite(value) else cls(nonfinite=True)

    def take(self, other: "Bucket") -> None:
        if not math.isnan(other.low):
            self.low = other.low if math.isnan(self.low) else min(self.low, other.low)
            self.high = other.high if math.isnan(self.high) else max(self.high, other.high)
        self.nonfinite = self.nonfinite or other.nonfinite


class Curve:
    """The values of a run's steps so far, those of undone steps left out."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._stride = 1
        self._first = 0  # index of the first bucket
        self._buckets: list[Bucket] = []

    def add(self, step: int, value: float) -> None:
        """Add a step's value. A step that is not behind all others is done again: what it follows is dropped."""
        index = step // self._stride
        if not self._buckets or index < self._first:
            self._first, self._buckets = index, []
        place = index - self._first
        repeated = place < len(self._buckets) - 1
        del self._buckets[place + (0 if repeated else 1) :]
        while len(self._buckets) <= place:
            self._buckets.append(Bucket())
            if len(self._buckets) > self._capacity:
                self._halve()
                place = step // self._stride - self._first
        self._buckets[place].take(Bucket.of(value))

    def columns(self, width: int) -> list[Bucket]:
        """The curve in at most `width` columns, oldest first. A column without values has none."""
        count = len(self._buckets)
        if count <= width:
            return list(self._buckets)
        columns = [Bucket() for _ in range(width)]
        for place, bucket in enumerate(self._buckets):
            columns[place * width // count].take(bucket)
        return columns

    def _halve(self) -> None:
        halved: list[Bucket] = []
        for place, bucket in enumerate(self._buckets):
            if place == 0 or (self._first + place) % 2 == 0:
                halved.append(Bucket())
            halved[-1].take(bucket)
        self._stride, self._first, self._buckets = 2 * self._stride, self._first // 2, halved


def extent(columns: Sequence[Bucket]) -> tuple[float, float] | None:
    """The lowest and the highest finite value; None where there is none."""
    lows = [column.low for column in columns if not math.isnan(column.low)]
    highs = [column.high for column in columns if not math.isnan(column.high)]
    return (min(lows), max(highs)) if lows else None


def draw(columns: Sequence[Bucket], bounds: tuple[float, float] | None, height: int) -> list[Text]:
    """Rows of a curve, `height` characters high. A column of values that are not finite is a red cross below.

    bounds: the values at the lower and the upper edge, where what lies beyond them is drawn.
    """
    rows = 4 * height
    places = [_place(column, bounds, rows) for column in columns]
    lines = []
    for line in range(height):
        text = Text()
        for first in range(0, len(columns), 2):
            pair = range(first, min(first + 2, len(columns)))
            if line == height - 1 and any(columns[each].nonfinite for each in pair):
                text.append("×", style="bold red")
                continue
            dots = sum(_dots(places, each, each - first, line) for each in pair)
            text.append(chr(_BLANK + dots), style="cyan")
        lines.append(text)
    return lines


def is_logarithmic(bounds: tuple[float, float]) -> bool:
    """Whether a curve between these values is drawn on a logarithmic axis."""
    low, high = bounds
    return low > 0 and high / low > _LOG_FROM


def _half(value: float) -> float:
    """The linear scale. From -1e308 to 1e308 it is further than a float goes."""
    return value / 2


def _place(column: Bucket, bounds: tuple[float, float] | None, rows: int) -> tuple[int, int] | None:
    """The dot rows, from above, of the highest and the lowest value of a column."""
    if bounds is None or math.isnan(column.low):
        return None
    low, high = bounds
    scale = math.log if is_logarithmic(bounds) else _half
    span = scale(high) - scale(low)

    def row(value: float) -> int:
        value = min(high, max(low, value))
        share = (scale(value) - scale(low)) / span if span > 0 else 0.5
        return min(rows - 1, max(0, round((1 - share) * (rows - 1))))

    return row(column.high), row(column.low)


def _dots(places: Sequence[tuple[int, int] | None], column: int, side: int, line: int) -> int:
    """The dots of one column in one line of characters: its own range, drawn on towards the column before it."""
    place = places[column]
    if place is None:
        return 0
    top, bottom = place
    before = places[column - 1] if column else None
    if before is not None:
        top, bottom = (before[1] + 1, bottom) if before[1] < top - 1 else (top, bottom)
        top, bottom = (top, before[0] - 1) if before[0] > bottom + 1 else (top, bottom)
    return sum(_DOTS[side][row - 4 * line] for row in range(4 * line, 4 * line + 4) if top <= row <= bottom)
