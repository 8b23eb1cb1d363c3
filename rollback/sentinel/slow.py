"""Failures that no single step shows: a slow rise of the loss, and a loss that is stuck without a gradient.

All rules compare the present with an older reference. The level is no use here: it follows a slow change.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BLOCK = 16
_BLOCKS_ABOVE = 3
_BLOCKS_KEPT = 32
_LEAST_RISE = 0.5  # in noise units, from the first to the last of the blocks above: a shift decays, a ramp does not
LITTLE_LOST = 0.2
"""Share of the progress; a rise that undoes less is no drift, and a jump of the loss alone must be higher."""
_BLOCKS_STAYING = 4
_STAYS = 0.6  # of the margin: what neither rises nor falls for so long is no chance
STAYS_LOST = 0.3
"""Share of what the loss had come down by that a rise undoes which is called because it stays."""
_ASKED_ABOVE = 1.5  # noise units; a rise that stays so far up is looked into
_ASKED_FALL = -0.5  # that much less in the last of the blocks is no fall
HAS_COME_DOWN = 2.5
"""Noise units; a loss that has come down by less has nothing of which a share can be lost."""

_NOW = 10
_BEFORE = 32
_HALVED = math.log(2.0)
_FALL_IN_NOISE = 0.75
_LOSS_UP_IN_NOISE = 1.5
_BLOCKS_BEFORE = 4
_BLOCKS_FADED = 3
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class Slow:
    """A finding of this module."""

    onset: int
    """The step at which the change began."""
    value: float
    threshold: float
    reference: float
    """For a drift, the lowest block; for a collapse, the rise of the loss."""
    window: tuple[float, ...]
    """For a drift, the medians of the blocks so far; for a collapse, the gradient norms that were compared."""
    stays: bool = False
    """The loss has risen and stays up, and does not rise on."""


class Drift:
    """Compares medians of 16 accepted losses with the lowest such median so far.

    A drift is called when three blocks in a row are above the lowest by a margin that would be called in a single jump,
    *and* they still rise. A healthy shift steps up and decays, so it fails the second test. Four blocks in a row may be
    lower if they do not fall: a shift decays, but labels that are wrong from some point on go on to be wrong.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._block: list[float] = []
        self._block_began = 0
        self._medians: deque[tuple[int, float]] = deque(maxlen=_BLOCKS_KEPT)
        self.restart()

    def restart(self) -> None:
        """Forget the lowest block: a new phase begins."""
        self._lowest: float | None = None
        self._noise_at_lowest = 0.0
        self._medians.clear()
        self._block.clear()

    def update(self, step: int, loss: float, noise: float, progress: float, start: float) -> Slow | None:
        """Add an accepted loss; return a finding when it completes a block that makes a drift.

        noise: of the loss now. progress: the first loss minus the level, zero if the loss rose. start: the first loss.
        """
        if not self._block:
            self._block_began = step
        self._block.append(loss)
        if len(self._block) < _BLOCK:
            return None
        median = sorted(self._block)[_BLOCK // 2]
        self._medians.append((self._block_began, median))
        self._block.clear()
        if self._lowest is None or median < self._lowest:
            self._lowest, self._noise_at_lowest = median, noise
        margin = max(self._margin * self._noise_at_lowest, LITTLE_LOST * progress)
        if self._above(_BLOCKS_ABOVE, margin, _LEAST_RISE * self._noise_at_lowest):
            return self._found(margin)
        came_down, stays = start - self._lowest, _STAYS * self._margin * self._noise_at_lowest
        margin = max(stays, STAYS_LOST * came_down)
        if came_down > HAS_COME_DOWN * self._noise_at_lowest and self._above(_BLOCKS_STAYING, margin, 0.0):
            return self._found(margin, stays=True)
        return None

    def unexplained(self) -> Slow | None:
        """Where a block has just been completed: a rise that stays, of too little for a call."""
        if self._block:
            return None
        margin = _ASKED_ABOVE * self._noise_at_lowest
        if not self._above(_BLOCKS_ABOVE, margin, _ASKED_FALL * self._noise_at_lowest):
            return None
        assert self._lowest is not None
        window = tuple(median for _, median in self._medians)
        return Slow(self._onset(margin / 2), window[-1], self._lowest + margin, self._lowest, window, stays=True)

    @property
    def is_up(self) -> bool:
        """Whether the last block was half as far up as what is looked into."""
        return self._above(1, _ASKED_ABOVE / 2 * self._noise_at_lowest, 0.0)

    @property
    def noise_at_lowest(self) -> float:
        return self._noise_at_lowest

    def _above(self, count: int, margin: float, rise: float) -> bool:
        """Whether the last `count` blocks are all above the lowest by more than `margin`, and rise by `rise`."""
        last = [median for _, median in self._medians][-count:]
        return len(last) == count and min(last) - (self._lowest or 0.0) > margin and last[-1] - last[0] >= rise

    def _found(self, margin: float, *, stays: bool = False) -> Slow:
        assert self._lowest is not None
        window = tuple(median for _, median in self._medians)
        found = Slow(self._onset(margin / 3), window[-1], self._lowest + margin, self._lowest, window, stays)
        self.restart()  # a further call needs a further rise
        return found

    def _onset(self, up: float) -> int:
        """The step from which on the blocks are above the lowest by more than `up`."""
        onset = self._medians[-1][0]
        for began, median in reversed(self._medians):
            if median - (self._lowest or 0.0) <= up:
                break
            onset = began
        return onset

    def state_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "block": list(self._block),
            "block_began": self._block_began,
            "medians": [list(pair) for pair in self._medians],
            "lowest": self._lowest,
            "noise_at_lowest": self._noise_at_lowest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._block = list(state["block"])
        self._block_began = state["block_began"]
        self._medians = deque(((began, median) for began, median in state["medians"]), maxlen=_BLOCKS_KEPT)
        self._lowest = state["lowest"]
        self._noise_at_lowest = state["noise_at_lowest"]


class Collapse:
    """Finds a loss that stays up while the gradient norm falls to less than half of its earlier value.

    A network that has died (saturated units, all-constant output) is on a plateau: the loss is not remarkably high, but
    no gradient is left that would lower it. Healthy training does not do both at once: a harder mix of data raises the
    gradient norm, a lower learning rate lowers the loss.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_BEFORE + _NOW)

    def restart(self) -> None:
        """Forget the reference."""
        self._recent.clear()

    def update(self, step: int, loss: float, log_norm: float, norm_is_low: bool) -> Slow | None:
        """Add an observation, accepted or not. norm_is_low: a cheap test that saves the medians on most steps."""
        self._recent.append((step, loss, log_norm))
        if not norm_is_low or len(self._recent) < _BEFORE + _NOW:
            return None
        steps, losses, norms = zip(*self._recent, strict=True)
        norm_before, norm_noise = _median_and_spread(norms[:_BEFORE])
        fall = norm_before - _median(norms[_BEFORE:])
        if fall < max(_HALVED, _FALL_IN_NOISE * norm_noise):
            return None
        loss_before, loss_noise = _median_and_spread(losses[:_BEFORE])
        threshold = loss_before + _LOSS_UP_IN_NOISE * loss_noise
        loss_now = _median(losses[_BEFORE:])
        if loss_now <= threshold:
            return None
        self.restart()
        before = math.exp(norm_before)
        window = tuple(math.exp(norm) for norm in norms)
        return Slow(steps[_BEFORE], before * math.exp(-fall), before / 2, loss_now - loss_before, window)

    def state_dict(self) -> list[list[float]]:
        """JSON types only."""
        return [list(row) for row in self._recent]

    def load_state_dict(self, state: list[list[float]]) -> None:
        """Go on from `state`."""
        self._recent = deque(((int(step), loss, norm) for step, loss, norm in state), maxlen=_BEFORE + _NOW)


class Fading:
    """Finds a loss that is up while the gradient norm fades, too slowly for `Collapse`: its reference sinks with it.

    Compares blocks of 16 observations: the last three with four in a row among the 29 before. All three must have a
    median loss above the mean of these four by 1.5 noise units, and a median norm below a share of theirs.
    """

    def __init__(self, share: float) -> None:
        self._fall = -math.log(share)
        self._block: list[tuple[int, float, float]] = []
        self._blocks: deque[tuple[int, float, float]] = deque(maxlen=_BLOCKS_KEPT)

    def restart(self) -> None:
        """Forget the reference."""
        self._block.clear()
        self._blocks.clear()

    def update(self, step: int, loss: float, log_norm: float, noise: float) -> Slow | None:
        """Add an observation, accepted or not. noise: of the accepted losses now."""
        self._block.append((step, loss, log_norm))
        if len(self._block) < _BLOCK:
            return None
        steps, losses, norms = zip(*self._block, strict=True)
        self._blocks.append((steps[0], _median(losses), _median(norms)))
        self._block.clear()
        found = self._compared(noise)
        if found is not None:
            self.restart()
        return found

    def _compared(self, noise: float) -> Slow | None:
        steps, losses, norms = zip(*self._blocks, strict=True)
        least_loss, most_norm = min(losses[-_BLOCKS_FADED:]), max(norms[-_BLOCKS_FADED:])
        for end in range(len(steps) - _BLOCKS_FADED, _BLOCKS_BEFORE - 1, -1):
            rise = least_loss - sum(losses[end - _BLOCKS_BEFORE : end]) / _BLOCKS_BEFORE
            bound = sum(norms[end - _BLOCKS_BEFORE : end]) / _BLOCKS_BEFORE - self._fall
            if rise > _LOSS_UP_IN_NOISE * noise and most_norm < bound:
                return Slow(steps[end], math.exp(norms[-1]), math.exp(bound), rise, tuple(map(math.exp, norms)))
        return None

    def state_dict(self) -> dict[str, list[list[float]]]:
        """JSON types only."""
        return {"block": [list(row) for row in self._block], "blocks": [list(row) for row in self._blocks]}

    def load_state_dict(self, state: dict[str, list[list[float]]]) -> None:
        """Go on from `state`."""
        self._block = [(int(step), loss, norm) for step, loss, norm in state["block"]]
        self._blocks = deque(((int(step), loss, norm) for step, loss, norm in state["blocks"]), maxlen=_BLOCKS_KEPT)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _median_and_spread(values: tuple[float, ...]) -> tuple[float, float]:
    middle = _median(values)
    return middle, _MAD_TO_SIGMA * _median([abs(value - middle) for value in values])
