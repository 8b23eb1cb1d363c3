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
_TEETH = 3  # climbs that were called; an unstable run may come back by itself from one or two
_ALIKE = 0.5  # of the highest; the rises of an unstable run are of all heights
_TOOTH_BLOCK = 8  # the minibatches of one target may be no more than 32
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

    def beyond(self, least: float, reached: float = 0.0) -> float:
        """What is above it by its own width, and by `least`; infinite while nothing was seen. reached: how wide it is
        at least."""
        if not self.count:
            return math.inf
        times = 1.0 if self.count >= _FEWEST_BLOCKS else _FARTHER
        highest = max(self.highest, self.lowest + reached)
        return highest + times * max(_BEYOND_RANGE * (highest - self.lowest), least)

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


class Climbs:
    """Climbs of medians: from a low, by 2.5 noise units or more, and down again by half."""

    def __init__(self) -> None:
        self.low: float | None = None  # of the present climb
        self.top = 0.0

    def add(self, median: float, noise: float | None) -> float | None:
        """Add a median; returns the height of the climb that has turned with it. noise: None: not known yet."""
        if self.low is None or median < self.low:
            self.low = self.top = median
        self.top = max(self.top, median)
        climb = self.top - self.low
        if noise is None or climb <= _CLIMB * noise or self.top - median <= climb / 2:
            return None
        self.low = self.top = median
        return climb


class Teeth:
    """Climbs that were called and came down again by themselves, as the teeth of a saw do.

    A rollback brings back what was known before the call, and a resume cuts the climb. So a divergence that these have
    answered is none, however often it comes.
    """

    def __init__(self) -> None:
        self._block: list[float] = []
        self._climbs, self._called = Climbs(), False  # called: in the present climb
        self._highest: list[float] = []

    def add(self, loss: float, noise: float | None) -> None:
        """Add any finite loss, those of incidents too."""
        self._block.append(loss)
        if len(self._block) < _TOOTH_BLOCK:
            return
        climb = self._climbs.add(sorted(self._block)[_TOOTH_BLOCK // 2], noise)
        self._block.clear()
        if climb is not None:
            self._highest = sorted([*self._highest, climb * self._called], reverse=True)[:_TEETH]
            self._called = False

    def call(self) -> None:
        """What is going on is called."""
        self._called = True

    def cut(self) -> None:
        """The run goes on from elsewhere: what is lower there did not come down by itself."""
        self._block.clear()
        self._climbs, self._called = Climbs(), False

    @property
    def height(self) -> float:
        """What three of them have reached; 0 while there are fewer, or they are not alike."""
        alike = len(self._highest) == _TEETH and self._highest[-1] > _ALIKE * self._highest[0]
        return self._highest[-1] if alike else 0.0

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "block": list(self._block),
            "low": self._climbs.low,
            "top": self._climbs.top,
            "called": self._called,
            "highest": list(self._highest),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._block, self._highest = list(state["block"]), list(state["highest"])
        self._climbs.low, self._climbs.top, self._called = state["low"], state["top"], state["called"]


class LossHistory:
    """What a run's losses and norms have been like so far, those of incidents left out but for their `Teeth`."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._measured_before = False
        self._largest = self._next_largest = 0.0  # losses, by their distance from zero
        self._unlike_zero = 0
        self._restart()

    def _restart(self) -> None:
        self._losses, self._norms = Range(), Range()
        self.noise: float | None = None
        """Of the loss when it was lowest; None: not known yet."""
        self._climbs, self._climbed, self.teeth = Climbs(), 0.0, Teeth()
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
        """Add an accepted observation. noise: says what it is now; None: not known yet."""
        if log_norm is not None:
            self._norms.add(log_norm)
        self._unlike_zero += loss != 0 and self._unlike_zero < _FEWEST_UNLIKE_ZERO
        if abs(loss) > self._next_largest:
            self.came_back(loss)
        lowest = self._losses.lowest
        median = self._losses.add(loss)
        if median is None:
            return
        self._last.append(median)
        if median < lowest or self.noise is None:
            self.noise = noise()
        self._climbed = max(self._climbed, self._climbs.add(median, self.noise) or 0.0)

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
        """Whether the loss came down, and never climbed by half as much and turned, nor three times with calls.

        One that has not come down yet must have settled. So must one that began at zero and went below it: it may be a
        critic's, which says how well two nets are told apart. start: the typical first loss. level, noise: of the loss
        now.
        """
        if self.objective != "auto":
            return self.objective == "supervised"
        if self._measured_before or (low := self._climbs.low) is None:
            return True
        noise, lowest = self.noise or noise, min(self._losses.lowest, level)  # medians lag behind a descent
        came_down = max(0.0, start - lowest)
        if max(self._climbed, self.teeth.height) > _MOST_CLIMBED * came_down:
            return False
        may_be_a_critic = lowest < -_CLIMB * noise and start < noise
        if came_down > _PROGRESS * noise and not may_be_a_critic:
            return True
        settled = len(self._last) == _SETTLED_BLOCKS and max(self._last) - min(self._last) < _SETTLED * noise
        return settled and level - min(low, start) < _CLIMB * noise

    def loss_beyond(self, noise: float) -> float:
        """The loss from which on it is far beyond all seen."""
        return self._losses.beyond(_BEYOND_NOISE * noise, self.teeth.height)

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
            "noise": self.noise,
            "low": self._climbs.low,
            "top": self._climbs.top,
            "climbed": self._climbed,
            "teeth": self.teeth.state_dict(),
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
        self.noise, self._climbed, self._beyond = state["noise"], state["climbed"], state["beyond"]
        self._climbs.low, self._climbs.top = state["low"], state["top"]
        self.teeth = Teeth()
        if "teeth" in state:
            self.teeth.load_state_dict(state["teeth"])
        self._last.clear()
        self._last.extend(state["last"])
