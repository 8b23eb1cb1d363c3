"""A curve in bounded memory: buckets of steps, each with its lowest and highest value. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CAPACITY = 1024


@dataclass
class Bucket:
    """Values of neighbouring steps: the finite ones from `low` to `high` (NaN where there are none)."""

    low: float = math.nan
    high: float = math.nan
    nonfinite: bool = False

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
        self._buckets[place].take(Bucket(value, value) if math.isfinite(value) else Bucket(nonfinite=True))

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
