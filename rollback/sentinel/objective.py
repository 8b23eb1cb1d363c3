"""Whether the loss measures progress at all, and the range of losses and norms seen, for objectives where it does not.

The losses of two nets that play against each other go up and down, and those of reinforcement learning jump with each
new target. Their level means nothing, so no rule that rests on a level may call. What is far beyond all that was seen
is called all the same.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from rollback.config import Objective

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

_BLOCK = 16
_CLIMB = 2.5  # noise units; less is no climb
_PROGRESS = 2.0  # noise units; less is no progress
_MOST_CLIMBED = 0.5  # of the progress; harder data and restarts of the learning rate climb by less
_SETTLED = 1.25  # noise units; medians of 16 of a loss that stands still lie within 0.7
_SETTLED_BLOCKS = 4
_BEYOND_RANGE = 1.0
_BEYOND_NOISE = 10.0
_NORM_BEYOND = math.log(10.0)
_BEYOND_PATIENCE = 5
_FEWEST_BLOCKS = 4  # before that, little was seen: what is far beyond it is farther
_FARTHER = 10.0
_FEWEST_UNLIKE_ZERO = 16


class Range:
    """The lowest and the highest median of 16 values in a row, and how many medians there were."""

    def __init__(self, lowest: float = math.inf, highest: float = -math.inf, count: int = 0) -> None:
        self.lowest, self.highest, self.count = lowest, highest, count
        self.block: list[float] = []

    def add(self, value: float) -> float | None:
        """Add a value; returns the median when it completes one."""
        self.block.append(value)
        if len(self.block) < _BLOCK:
            return None
        median = sorted(self.block)[_BLOCK // 2]
        self.block.clear()
        self.lowest, self.highest, self.count = min(self.lowest, median), max(self.highest, median), self.count + 1
        return median

    def beyond(self, least: float) -> float:
        """What is above it by its own width, and by `least`; infinite while nothing was seen."""
        if not self.count:
            return math.inf
        times = 1.0 if self.count >= _FEWEST_BLOCKS else _FARTHER
        return self.highest + times * max(_BEYOND_RANGE * (self.highest - self.lowest), least)

    def state_dict(self) -> list[Any]:
        """JSON types only."""
        return [self.lowest, self.highest, self.count, list(self.block)] if self.count else [0, 0, 0, list(self.block)]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Range":
        """The range that `state_dict` wrote."""
        *known, block = state
        made = cls(*known) if known[2] else cls()
        made.block = list(block)
        return made


class Seen:
    """What a run's losses and norms have been like so far, those of incidents left out."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._measured_before = False
        self._largest = self._next_largest = 0.0  # losses, by their distance from zero
        self._unlike_zero = 0
        self._restart()

    def _restart(self) -> None:
        self._losses, self._norms = Range(), Range()
        self._noise: float | None = None  # when the loss was lowest
        self._low: float | None = None  # of the present climb
        self._top = self._climbed = 0.0
        self._last: deque[float] = deque(maxlen=_SETTLED_BLOCKS)
        self._beyond = 0

    def begin_phase(self, *, measured_progress: bool) -> None:
        """Forget what was seen: a new phase may have any level. If the loss measured progress before, it does now."""
        self._restart()
        self._measured_before |= measured_progress
        if not measured_progress:  # else what is large is still known where a solved task has come to zero
            self._largest = self._next_largest = 0.0
            self._unlike_zero = 0

    def update(self, loss: float, log_norm: float | None, noise: Callable[[], float | None]) -> None:
        """Add an observation. noise: says what it is now; None: not known yet."""
        if log_norm is not None:
            self._norms.add(log_norm)
        self._unlike_zero += loss != 0 and self._unlike_zero < _FEWEST_UNLIKE_ZERO
        self.came_back(loss)
        lowest = self._losses.lowest
        median = self._losses.add(loss)
        if median is None:
            return
        self._last.append(median)
        if median < lowest or self._noise is None:
            self._noise = noise()
        if self._low is None or median < self._low:
            self._low = self._top = median
        self._top = max(self._top, median)
        climb = self._top - self._low
        if self._noise is not None and climb > _CLIMB * self._noise and self._top - median > climb / 2:
            self._climbed = max(self._climbed, climb)
            self._low = self._top = median

    def came_back(self, *losses: float) -> None:
        """Remember how far from zero losses were that did not stay there."""
        for distance in map(abs, losses):
            if distance > self._next_largest:
                self._next_largest, self._largest = sorted((distance, self._largest))

    @property
    def largest(self) -> float:
        """The loss farthest from zero but for one, which may be a fault, without its sign; infinite while fewer than 16
        losses were other than zero."""
        return self._next_largest if self._unlike_zero == _FEWEST_UNLIKE_ZERO else math.inf

    def measures_progress(self, start: float, level: float, noise: float) -> bool:
        """Whether the loss came down, and never climbed by half as much and turned.

        One that has not come down yet must have settled. So must one that began at zero and went below it: it may be a
        critic's, which says how well two nets are told apart. start: the typical first loss. level, noise: of the loss
        now.
        """
        if self._objective != "auto":
            return self._objective == "supervised"
        if self._measured_before or self._low is None:
            return True
        noise, lowest = self._noise or noise, min(self._losses.lowest, level)  # medians lag behind a descent
        came_down = max(0.0, start - lowest)
        if self._climbed > _MOST_CLIMBED * came_down:
            return False
        may_be_a_critic = lowest < -_CLIMB * noise and start < noise
        if came_down > _PROGRESS * noise and not may_be_a_critic:
            return True
        settled = len(self._last) == _SETTLED_BLOCKS and max(self._last) - min(self._last) < _SETTLED * noise
        return settled and level - min(self._low, start) < _CLIMB * noise

    def loss_beyond(self, noise: float) -> float:
        """The loss from which on it is far beyond all seen."""
        return self._losses.beyond(_BEYOND_NOISE * noise)

    def norm_beyond(self, log_norm: float) -> float | None:
        """The norm (logarithm) that the last five were far beyond, if they were. Call once for each observation."""
        if log_norm <= self._norms.highest:  # nearly always, and cheap
            self._beyond = 0
            return None
        bound = self._norms.beyond(_NORM_BEYOND)
        self._beyond = self._beyond + 1 if log_norm > bound else 0
        return bound if self._beyond == _BEYOND_PATIENCE else None

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "losses": self._losses.state_dict(),
            "norms": self._norms.state_dict(),
            "measured_before": self._measured_before,
            "largest": [self._next_largest, self._largest],
            "unlike_zero": self._unlike_zero,
            "noise": self._noise,
            "low": self._low,
            "top": self._top,
            "climbed": self._climbed,
            "last": list(self._last),
            "beyond": self._beyond,
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from `state`. The objective that was told is not part of it and may differ. None: an earlier version
        kept nothing; its run counts as one whose loss measures progress."""
        if state is None:
            self.begin_phase(measured_progress=True)
            return
        self._losses, self._norms = Range.from_state(state["losses"]), Range.from_state(state["norms"])
        self._measured_before = state["measured_before"]
        self._next_largest, self._largest = state.get("largest", (0.0, 0.0))
        self._unlike_zero = state.get("unlike_zero", 0)
        self._noise, self._low, self._top = state["noise"], state["low"], state["top"]
        self._climbed, self._beyond = state["climbed"], state["beyond"]
        self._last.clear()
        self._last.extend(state["last"])
