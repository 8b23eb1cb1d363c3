"""Labelled loss traces made from formulas and seeds, for scoring detectors where no recorded ones are at hand.

Each family shows one thing that a training run does. The formulas are caricatures: they are there so that
`bench_sentinel.py` runs anywhere and a change of the sentinel shows at once, not to replace recorded runs.
"""

from collections.abc import Callable

import numpy as np

from rollback.sentinel import Hint
from traces import Array, Label, Trace


def language(chance: np.random.Generator, count: int) -> tuple[Array, Array]:
    """A small language model: 5.5 down to about 2.3, normal noise, log-normal gradient norm."""
    steps = np.arange(count)
    end, noise = chance.uniform(2.0, 2.6), chance.uniform(0.03, 0.3)
    loss = end + (5.5 - end) * np.exp(-steps / chance.uniform(30, 120)) - 1e-4 * steps
    return loss + chance.normal(0, noise, count), np.exp(chance.normal(0, chance.uniform(0.06, 0.25), count))


def solved(chance: np.random.Generator, count: int) -> tuple[Array, Array]:
    """A classifier that solves its task: 2.3 down to 0.01 or less, multiplicative noise."""
    steps = np.arange(count)
    level = 2.3 * np.exp(-steps / chance.uniform(40, 90)) + 10 ** chance.uniform(-3, -1.5)
    spread = chance.uniform(0.2, 0.6)
    return level * np.exp(chance.normal(0, spread, count)), level**0.5 * np.exp(chance.normal(0, spread, count))


def clean(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """Nothing happens."""
    curve = solved if chance.random() < 0.4 else language
    return *curve(chance, 1500), [], {}


def heavy_tail(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """Log-normal losses with a second mode in a few steps of a hundred."""
    loss = np.exp(chance.normal(0, 0.7, 2000)) * np.where(chance.random(2000) < 0.05, 8.0, 1.0)
    return loss, loss**0.5 * np.exp(chance.normal(0, 0.3, 2000)), [], {}


def epochs(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """The data is ordered, so the loss goes up and down with each epoch."""
    loss, norm = language(chance, 1500)
    period = int(chance.integers(110, 200))
    loss += 0.25 * np.sin(2 * np.pi * np.arange(1500) / period)
    return loss, norm, [], dict.fromkeys(range(period, 1500, period), Hint.EPOCH)


def blip(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """One to four bad batches, and a short after-effect."""
    loss, norm = language(chance, 900)
    at, length = int(chance.integers(300, 700)), int(chance.integers(1, 5))
    high = chance.uniform(0.5, 8.0)
    loss[at : at + length] += high
    norm[at : at + length] *= chance.uniform(1.5, 12)
    loss[at + length : at + length + 12] += 0.08 * high * np.exp(-np.arange(12) / 4)
    return loss, norm, [(at, at + 15, "blip")], {}


def shift(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """Harder data: up by up to a third, and then learned."""
    loss, norm = language(chance, 1300)
    at = int(chance.integers(400, 900))
    since = np.arange(1300 - at)
    loss[at:] += chance.uniform(0.1, 0.7) * (0.3 + 0.7 * np.exp(-since / chance.uniform(40, 150)))
    norm[at:] *= 1 + chance.uniform(0, 0.3) * np.exp(-since / 60)
    return loss, norm, [(at, at + 150, "shift")], {at: Hint.ANNOUNCED}


def restart(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """Warm restarts of the learning rate."""
    loss, norm = language(chance, 1500)
    for at in (500, 1000):
        loss[at:] += chance.uniform(0, 0.35) * np.exp(-np.arange(1500 - at) / 60)
        norm[at:] *= 1 + chance.uniform(0.2, 1.0) * np.exp(-np.arange(1500 - at) / 60)
    return loss, norm, [(500, 600, "bump"), (1000, 1100, "bump")], dict.fromkeys((500, 1000), Hint.LR_CHANGED)


def damage(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """A language model is hurt: the loss jumps and hardly comes back, the gradient norm shoots up and then falls."""
    loss, norm = language(chance, 1000)
    at = int(chance.integers(300, 700))
    since = np.arange(1000 - at)
    loss[at:] += chance.uniform(0.9, 4.0) * (0.5 + 0.5 * np.exp(-since / 30))
    norm[at:] *= np.exp(chance.uniform(0.8, 2.5) * np.exp(-since / 6) - 0.8 * (1 - np.exp(-since / 20)))
    return loss, norm, [(at, 1000, "divergence")], {}


def lost(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """A solved task is lost: back to the loss of an untrained model or above."""
    loss, norm = solved(chance, 1000)
    at = int(chance.integers(300, 700))
    since = np.arange(1000 - at)
    loss[at:] = 2.3 * (1 + chance.exponential(3.0) * np.exp(-since / 5)) + chance.normal(0, 0.05, 1000 - at)
    norm[at:] *= np.exp(chance.uniform(0.5, 3.0) * np.exp(-since / 10))
    return loss, norm, [(at, 1000, "divergence")], {}


def ramp(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """The loss creeps up, faster and faster."""
    loss, norm = language(chance, 1300)
    at = int(chance.integers(400, 800))
    since = np.arange(1300 - at)
    loss[at:] += 0.15 * (np.exp(np.minimum(since / chance.uniform(50, 110), 12)) - 1)
    norm[at:] *= np.exp(np.minimum(since / 150, 4))
    return loss, norm, [(at, 1300, "divergence")], {}


def nonfinite(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """A NaN loss or an infinite norm, from one step on."""
    loss, norm = (solved if chance.random() < 0.5 else language)(chance, 600)
    at = int(chance.integers(1, 560))
    (loss if chance.random() < 0.5 else norm)[at:] = chance.choice([np.nan, np.inf])
    return loss, norm, [(at, 600, "nonfinite")], {}


def scaler(chance: np.random.Generator) -> tuple[Array, Array, list[Label], dict[int, Hint]]:
    """GradScaler probes for its scale: an infinite norm now and then, in steps that it skips."""
    loss, norm = language(chance, 1200)
    skipped = [*range(8), *map(int, chance.choice(np.arange(100, 1200), 4, replace=False))]
    norm[skipped] = np.inf
    return loss, norm, [(at, at + 1, "amp") for at in skipped], dict.fromkeys(skipped, Hint.SCALER_SKIPPED)


FAMILIES: dict[str, tuple[Callable[..., tuple[Array, Array, list[Label], dict[int, Hint]]], int]] = {
    "clean": (clean, 20),
    "heavy_tail": (heavy_tail, 6),
    "epochs": (epochs, 6),
    "blip": (blip, 20),
    "shift": (shift, 12),
    "restart": (restart, 8),
    "damage": (damage, 20),
    "lost": (lost, 10),
    "ramp": (ramp, 10),
    "nonfinite": (nonfinite, 10),
    "scaler": (scaler, 4),
}
"""Family and how many traces of it are made."""


def formula_traces(seed: int = 0) -> list[Trace]:
    """All families; the same seed gives the same traces."""
    traces = []
    for number, (kind, (family, count)) in enumerate(FAMILIES.items()):
        for index in range(count):
            loss, norm, labels, hints = family(np.random.default_rng([seed, number, index]))
            name = f"{kind}-{index:02d}"
            steps = np.arange(len(loss))
            traces.append(Trace(name, "formulas", kind, steps, loss, norm, labels, hints=hints, family=kind))
    return traces
