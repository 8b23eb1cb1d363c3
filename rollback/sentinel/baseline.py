"""The normal level and noise of a witness, from accepted values only, in constant memory."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import Any

LEVEL_WINDOW = 16
"""Accepted values whose median is the level. Short, because the level must keep up with the early descent."""
NOISE_WINDOW = 128
"""Residuals from which the noise is read. Long, because a tail quantile needs samples."""
_FEWEST_RESIDUALS = 16
_IQR_TO_SIGMA = 0.7413  # half of 1.4826: a normal distribution's interquartile range is 1.349 sigma
_TAIL = 0.98
TAIL_TO_SIGMA = 2.0537  # the normal distribution's 98 % quantile
_FEWEST_IN_A_PHASE = 8  # the noise before it serves as well, until there are `_FEWEST_RESIDUALS` * 2
_RANGE_IN_NOISE = 5.0  # the range of 128 normal residuals
_SAME = 1e-3  # in a logarithm: equal but for rounding


class RollingWindow:
    """The last `size` values, in order of arrival and in order of size, so that a quantile is one look-up: the value
    below which a share of them lies is the one at that share of their number, without interpolation."""

    __slots__ = ("_arrived", "_size", "ordered")

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._arrived: deque[float] = deque(values, maxlen=size)
        self.ordered = sorted(self._arrived)

    def add(self, value: float) -> None:
        """Add a value; a full window drops its oldest value."""
        if len(self._arrived) == self._size:
            del self.ordered[bisect_left(self.ordered, self._arrived[0])]
        self._arrived.append(value)
        insort(self.ordered, value)

    def median(self) -> float:
        """The median; for an even number of values, the mean of the middle two; NaN of none."""
        if not self.ordered:
            return math.nan
        half, odd = divmod(len(self.ordered), 2)
        return self.ordered[half] if odd else (self.ordered[half - 1] + self.ordered[half]) / 2

    def values(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._arrived)


class Baseline:
    """Level and noise of one witness.

    The level is the median of the last 16 accepted values. The noise comes from the residuals (each accepted value
    minus the level before it), so a steep descent does not count as noise. It is the larger of two estimates that agree
    on normal noise: the interquartile range (robust) and the upper 98 % quantile (aware of the tail). Bimodal and
    heavy-tailed losses have a narrow middle and a long upper tail: with the middle alone, every value in the tail would
    be called. Losses that are rounded, or nearly always zero, have no middle at all: where a quarter of the residuals
    are equal, the noise is at least a fifth of their range, as it is in normal noise. And it is at least half of the
    smallest difference between two values that followed each other: what is rounded cannot move by less.
    """

    __slots__ = ("_finest", "_last", "_noise_before", "_recent", "_residuals", "_tail_aware", "level")

    def __init__(self, *, tail_aware: bool) -> None:
        self._tail_aware = tail_aware
        self._finest = math.inf
        self._last: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget everything: a new level begins."""
        self._recent = RollingWindow(LEVEL_WINDOW)
        self._residuals = RollingWindow(NOISE_WINDOW)
        self._noise_before: float | None = None
        self.level = math.nan
        """Median of the recent accepted values; NaN while there is none."""

    def begin_phase(self) -> None:
        """Forget the level. The noise so far is the least that is expected, until there is enough of the new one."""
        before = self.noise() if self.ready else None
        self.restart()
        self._noise_before = before

    @property
    def ready(self) -> bool:
        """Whether there are enough accepted values to judge by."""
        return len(self._residuals.ordered) >= (_FEWEST_RESIDUALS if self._noise_before is None else _FEWEST_IN_A_PHASE)

    def accept(self, value: float) -> None:
        """Learn from a healthy value."""
        if self._last is not None and value != self._last:
            self._finest = min(self._finest, abs(value - self._last))
        self._last = value
        if len(self._recent.ordered) >= LEVEL_WINDOW // 2:
            self._residuals.add(value - self.level)
            if len(self._residuals.ordered) >= 2 * _FEWEST_RESIDUALS:
                self._noise_before = None
        self._recent.add(value)
        self.level = self._recent.median()

    def noise(self) -> float:
        """Standard deviation that normal noise of this spread would have; only once `ready`."""
        residuals, count = self._residuals.ordered, len(self._residuals.ordered)
        low, median, high = residuals[count // 4], residuals[count // 2], residuals[3 * count // 4]
        tail = residuals[int(_TAIL * count)]
        ties = residuals[-1] - residuals[0] if median in (low, high) else 0.0
        rounded = self._finest / 2 if self._finest < math.inf else 0.0
        middle = max(_IQR_TO_SIGMA * (high - low), rounded, ties / _RANGE_IN_NOISE, self._noise_before or 0.0)
        return max(middle, (tail - median) / TAIL_TO_SIGMA) if self._tail_aware else middle

    @property
    def mostly_zero(self) -> bool:
        """Whether the level is zero, and half of the residuals are equal; only once `ready`."""
        residuals, count = self._residuals.ordered, len(self._residuals.ordered)
        return self.level == 0 and residuals[count // 4] == residuals[3 * count // 4]

    def at_ceiling(self) -> bool:
        """Whether a quarter of the recent values are at the highest of them, as logarithms behind clipping are."""
        if not self.ready:
            return False
        recent = self._recent.ordered
        return recent[-1] - recent[3 * len(recent) // 4] < _SAME

    def recent(self) -> tuple[float, ...]:
        """The accepted values whose median is the level, oldest first."""
        return self._recent.values()

    def state_dict(self) -> dict[str, Any]:
        """Both windows, oldest first, and what is known of the noise besides."""
        return {
            "finest": self._finest if self._finest < math.inf else None,
            "last": self._last,
            "level": list(self._recent.values()),
            "noise": list(self._residuals.values()),
            "noise_before": self._noise_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        finest = state.get("finest")
        self._finest = math.inf if finest is None else finest
        self._last, self._noise_before = state.get("last"), state.get("noise_before")
        self._recent = RollingWindow(LEVEL_WINDOW, state["level"])
        self._residuals = RollingWindow(NOISE_WINDOW, state["noise"])
        self.level = self._recent.median()
