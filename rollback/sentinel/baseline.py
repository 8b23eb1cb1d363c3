"""The normal level and noise of a witness, from accepted values only, in constant memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

LEVEL_WINDOW = 16
"""Accepted values whose median is the level. Short, because the level must keep up with the early descent."""
NOISE_WINDOW = 128
"""Residuals from which the noise is read. Long, because a tail quantile needs samples."""
_FEWEST_RESIDUALS = 16
_IQR_TO_SIGMA = 0.7413  # half of 1.4826: a normal distribution's interquartile range is 1.349 sigma
_TAIL = 0.98
_TAIL_TO_SIGMA = 2.0537  # the normal distribution's 98 % quantile


class RollingWindow:
    """The last `size` values, in order of arrival and in order of size, so that a quantile is one look-up."""

    __slots__ = ("_arrived", "_ordered", "_size")

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._size = size
        self._arrived: deque[float] = deque(values, maxlen=size)
        self._ordered = sorted(self._arrived)

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, value: float) -> None:
        """Add a value; a full window drops its oldest value."""
        if len(self._arrived) == self._size:
            del self._ordered[bisect_left(self._ordered, self._arrived[0])]
        self._arrived.append(value)
        insort(self._ordered, value)

    def quantile(self, fraction: float) -> float:
        """The value below which `fraction` of the window lies; no interpolation."""
        return self._ordered[int(fraction * len(self._ordered))]

    def median(self) -> float:
        """The median; for an even number of values, the mean of the middle two."""
        half, odd = divmod(len(self._ordered), 2)
        return self._ordered[half] if odd else (self._ordered[half - 1] + self._ordered[half]) / 2

    def values(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._arrived)


class Baseline:
    """Level and noise of one witness.

    The level is the median of the last 16 accepted values. The noise comes from the residuals (each accepted value
    minus the level before it), so a steep descent does not count as noise. It is the larger of two estimates that agree
    on normal noise: the interquartile range (robust) and the upper 98 % quantile (aware of the tail). Bimodal and
    heavy-tailed losses have a narrow middle and a long upper tail: with the middle alone, every value in the tail would
    be called.
    """

    __slots__ = ("_level", "_noise", "_tail_aware")

    def __init__(self, *, tail_aware: bool) -> None:
        self._tail_aware = tail_aware
        self.restart()

    def restart(self) -> None:
        """Forget everything: a new level begins."""
        self._level = RollingWindow(LEVEL_WINDOW)
        self._noise = RollingWindow(NOISE_WINDOW)

    @property
    def ready(self) -> bool:
        """Whether there are enough accepted values to judge by."""
        return len(self._noise) >= _FEWEST_RESIDUALS

    def accept(self, value: float) -> None:
        """Learn from a healthy value."""
        if len(self._level) >= LEVEL_WINDOW // 2:
            self._noise.add(value - self._level.median())
        self._level.add(value)

    def level(self) -> float:
        """Median of the recent accepted values; only once `ready`."""
        return self._level.median()

    def noise(self) -> float:
        """Standard deviation that normal noise of this spread would have; only once `ready`."""
        middle = _IQR_TO_SIGMA * (self._noise.quantile(0.75) - self._noise.quantile(0.25))
        if not self._tail_aware:
            return middle
        tail = (self._noise.quantile(_TAIL) - self._noise.quantile(0.5)) / _TAIL_TO_SIGMA
        return max(middle, tail)

    def recent(self) -> tuple[float, ...]:
        """The accepted values whose median is the level, oldest first."""
        return self._level.values()

    def state_dict(self) -> dict[str, list[float]]:
        """Both windows, oldest first."""
        return {"level": list(self._level.values()), "noise": list(self._noise.values())}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from `state`."""
        self._level = RollingWindow(LEVEL_WINDOW, state["level"])
        self._noise = RollingWindow(NOISE_WINDOW, state["noise"])
