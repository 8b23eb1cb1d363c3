"""What is done about it: the measures that the runs are compared under.

The rules of others are written from their documentation, with their defaults. Rollback is the package itself, with its
defaults; only `snapshot_every` is given, because a distance that follows the clock would make no run like another.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Protocol

CLIP = 1.0
WARMUP = 80  # steps: a tenth of the run
SNAPSHOT_EVERY = 50
RESTARTS = 3


class Rule(Protocol):
    """Decides about an update before it is made."""

    def limit(self, loss: float, norm: float) -> float | None:
        """The norm to which the gradient is clipped; infinite: it is not; None: the update is dropped."""
        ...


class SkipStep:
    """OLMo-core's SkipStepOptimizer: drop an update whose loss or gradient norm is more than 6 standard deviations
    above the mean of the last 128. It learns from dropped updates too, and decides nothing in the first 64."""

    def __init__(self, interval: int = 128, sigmas: float = 6.0) -> None:
        self._interval, self._sigmas = interval, sigmas
        self._losses: deque[float] = deque(maxlen=interval)
        self._norms: deque[float] = deque(maxlen=interval)

    def limit(self, loss: float, norm: float) -> float | None:
        early = len(self._losses) < self._interval // 2
        usual = all(self._is_usual(value, past) for value, past in ((loss, self._losses), (norm, self._norms)))
        self._losses.append(loss)
        self._norms.append(norm)
        return math.inf if early or usual else None

    def _is_usual(self, value: float, past: deque[float]) -> bool:
        if len(past) < 2:
            return True
        if not all(map(math.isfinite, past)):
            return False  # a comparison with NaN is false: the update is dropped
        return value - fmean(past) <= self._sigmas * stdev(past)


class ZClip:
    """ZClip: a gradient norm more than 2.5 deviations above its exponential average is clipped, the more the higher it
    is. Averages begin with the first 25 norms, and follow what was clipped by the clipped norm."""

    def __init__(self, alpha: float = 0.97, sigmas: float = 2.5, warmup: int = 25) -> None:
        self._alpha, self._sigmas, self._warmup = alpha, sigmas, warmup
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def limit(self, loss: float, norm: float) -> float | None:
        if len(self._first) < self._warmup:
            self._first.append(norm)
            if len(self._first) == self._warmup:
                self._mean, self._variance = fmean(self._first), stdev(self._first) ** 2
            return math.inf
        deviation = math.sqrt(self._variance) + 1e-6
        height = (norm - self._mean) / deviation
        limit = self._mean + self._sigmas / height * self._sigmas * deviation if height > self._sigmas else math.inf
        kept = min(norm, limit)
        if math.isfinite(kept):
            self._mean = self._alpha * self._mean + (1 - self._alpha) * kept
            self._variance = self._alpha * self._variance + (1 - self._alpha) * (kept - self._mean) ** 2
        return limit


class Watch:
    """Stops a run: at a loss that is not finite, or by llm-foundry's KillLossSpike (more than 4 losses in a row above
    twice the mean of the last 100; most of these above 10). It begins anew in each process."""

    def __init__(self, size: int = 100, patience: int = 4, multiplier: float = 2.0) -> None:
        self._window: deque[float] = deque(maxlen=size)
        self._patience, self._multiplier = patience, multiplier
        self._row = 0

    def stops(self, loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        size = self._window.maxlen or 0
        stop = False
        if len(self._window) == size:
            self._row = self._row + 1 if loss > self._multiplier * fmean(self._window) else 0
            stop = self._row > self._patience or sum(past > 10 for past in self._window) > size / 2
        self._window.append(loss)
        return stop


@dataclass(frozen=True)
class Restart:
    """Where a run goes on that was stopped."""

    back: int
    """Which checkpoint: 1 is the newest."""
    rate: float
    """The factor on the learning rate from there on."""
    most: int
    """After so many restarts it is given up."""


@dataclass(frozen=True)
class Arm:
    """clip: the gradient's largest norm. guard: the settings of `rollback.Guard`; None: there is none."""

    words: str
    clip: float = math.inf
    warmup: int = 0
    half: bool = False
    scaler: bool = False
    rule: Callable[[], Rule] | None = None
    restart: Restart | None = None
    guard: Mapping[str, Any] | None = field(default=None)


def _rollback(**settings: Any) -> Mapping[str, Any]:
    return {"snapshot_every": SNAPSHOT_EVERY, **settings}


ARMS: Mapping[str, Arm] = {
    "nothing": Arm("no measure"),
    "balanced": Arm("rollback, its defaults", guard=_rollback()),
    "screen": Arm("rollback --policy screen", guard=_rollback(policy="screen")),
    "clip": Arm("gradients clipped to 1", clip=CLIP),
    "balanced, clip": Arm("rollback and clipping", clip=CLIP, guard=_rollback()),
    "skip-step": Arm("OLMo-core's skip step", rule=SkipStep),
    "ZClip": Arm("ZClip", rule=ZClip),
    "restart": Arm("stop, and restart from the newest checkpoint", restart=Restart(back=1, rate=1.0, most=RESTARTS)),
    "halve": Arm("an earlier checkpoint and half the rate, as for OPT", restart=Restart(back=2, rate=0.5, most=10)),
    "clip, warmup": Arm("clipping and warm-up", clip=CLIP, warmup=WARMUP),
    "complete": Arm(
        "clipping, warm-up, rollback --policy screen --lr-after 0.5:200",
        clip=CLIP, warmup=WARMUP, guard=_rollback(policy="screen", lr_after="0.5:200"),
    ),
    "retry first": Arm("rollback --retry-first", guard=_rollback(retry_first=True)),
    "palm": Arm("rollback --policy palm", guard=_rollback(policy="palm")),
    "surgical": Arm("rollback --policy surgical", guard=_rollback(policy="surgical")),
    "fp16": Arm("float16 without GradScaler", half=True),
    "fp16, scaler": Arm("float16 with GradScaler", half=True, scaler=True),
    "fp16, balanced": Arm(
        "float16 with GradScaler, rollback --lr-after 0.5:200", half=True, scaler=True,
        guard=_rollback(lr_after="0.5:200"),
    ),
}  # fmt: skip
QUICK = ("nothing", "balanced", "screen", "clip", "balanced, clip", "skip-step", "ZClip", "restart")
