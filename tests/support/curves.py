"""Made loss curves for the tests of the sentinel: a descent with noise, and things that happen to it."""

import math
import random
from collections.abc import Iterable, Sequence

from rollback.sentinel import Hint, Observation, Sentinel, Verdict


def descent(count: int, seed: int = 0, start: float = 5.5, end: float = 2.3, noise: float = 0.15) -> list[float]:
    """A loss that falls exponentially from `start` to `end`, with normal noise."""
    chance = random.Random(seed)
    return [end + (start - end) * math.exp(-i / 60) + chance.gauss(0, noise) for i in range(count)]


def norms(count: int, seed: int = 0, level: float = 1.0) -> list[float]:
    """Gradient norms with log-normal noise."""
    chance = random.Random(seed + 1)
    return [level * math.exp(chance.gauss(0, 0.1)) for _ in range(count)]


def raised(
    losses: Sequence[float], at: int, by: float, length: int | None = None, decay: float = math.inf
) -> list[float]:
    """The same with everything from `at` on, or `length` values of it, higher by `by`; `decay` is a time constant."""
    stop = len(losses) if length is None else at + length
    return [loss + (by * math.exp(-(i - at) / decay) if at <= i < stop else 0.0) for i, loss in enumerate(losses)]


def observations(
    losses: Sequence[float],
    grad_norms: Sequence[float] | None = None,
    hints: dict[int, Hint] | None = None,
    stride: int = 1,
) -> list[Observation]:
    """Observations of a curve; `hints` by index."""
    return [
        Observation(i * stride, loss, grad_norms[i] if grad_norms else None, (hints or {}).get(i, Hint.NONE))
        for i, loss in enumerate(losses)
    ]


def verdicts(seen: Iterable[Observation], sentinel: Sentinel | None = None) -> list[Verdict]:
    """What a sentinel says of them, a new one by default."""
    sentinel = sentinel or Sentinel()
    return [sentinel.update(observation) for observation in seen]
