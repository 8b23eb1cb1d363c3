"""Rules that detect loss spikes in other libraries, re-implemented from their documented behaviour and defaults.

Each is a function from loss and gradient norm (None where the log has none) to the indices of the steps at which it
would have acted. A rule that acts on every bad step (skips or clips it) returns every one.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev

Losses = Sequence[float]
Norms = Sequence[float] | None
Detector = Callable[[Losses, Norms], list[int]]


def nan_only(loss: Losses, norm: Norms) -> list[int]:
    """Stop at a loss that is not finite: what most scripts have."""
    return [i for i, value in enumerate(loss) if not math.isfinite(value)]


def axolotl(loss: Losses, norm: Norms, threshold: float = 5.0, patience: int = 3) -> list[int]:
    """loss_watchdog: a loss above a fixed threshold for `patience` steps in a row. The threshold is the user's."""
    calls, run = [], 0
    for i, value in enumerate(loss):
        run = run + 1 if value > threshold else 0
        if run >= patience:
            calls.append(i)
    return calls


def lightning(loss: Losses, norm: Norms, window: int = 10, warmup: int = 1, rtol: float = 2.0) -> list[int]:
    """SpikeDetection: not finite, or above the mean of the last 10 by more than twice that mean."""
    calls: list[int] = []
    recent: deque[float] = deque(maxlen=window)
    for i, value in enumerate(loss):
        if not math.isfinite(value):
            calls.append(i)
            continue
        if len(recent) > warmup and value > (mean := fmean(recent)) and abs(value - mean) >= rtol * abs(mean):
            calls.append(i)
            continue
        recent.append(value)
    return calls


def llm_foundry(loss: Losses, norm: Norms, patience: int = 4, multiplier: float = 2.0) -> list[int]:
    """KillLossSpike: more than 4 losses in a row above twice the mean of the window (100 steps or 5 % of the run), or
    half the window above a cap of 10."""
    size = max(100, round(0.05 * len(loss)))
    window: deque[float] = deque(maxlen=size)
    calls, run = [], 0
    for i, value in enumerate(loss):
        if len(window) == size:
            run = run + 1 if value > multiplier * fmean(window) else 0
            if run > patience or sum(past > 10 for past in window) > size / 2:
                calls.append(i)
        window.append(value)
    return calls


def olmo_core(loss: Losses, norm: Norms, interval: int = 128, sigmas: float = 6.0) -> list[int]:
    """SkipStepOptimizer: drop the update when loss or gradient norm is above mean + 6 deviations of the last 128."""
    calls = []
    for i in range(interval // 2, len(loss)):
        for series in (loss, norm):
            if series is None:
                continue
            past = series[max(0, i - interval) : i]
            if not all(map(math.isfinite, past)) or not series[i] - fmean(past) <= sigmas * stdev(past):
                calls.append(i)
                break
    return calls


def megatron(loss: Losses, norm: Norms, factor: float = 10.0, samples: int = 100) -> list[int]:
    """Rerun state machine: NaN or Inf, or ten times the largest of the first hundred losses."""
    calls, largest, seen = [], 0.0, 0
    for i, value in enumerate(loss):
        if not math.isfinite(value):
            calls.append(i)
        elif seen < samples:
            largest, seen = max(largest, abs(value)), seen + 1
        elif abs(value) >= factor * largest:
            calls.append(i)
    return calls


def zclip(loss: Losses, norm: Norms, alpha: float = 0.97, sigmas: float = 2.5, warmup: int = 25) -> list[int]:
    """ZClip: clip a norm whose z-score by exponential averages is above 2.5, and average the clipped norm."""
    if norm is None:
        return []
    calls: list[int] = []
    first = [value for value in norm[:warmup] if math.isfinite(value)]
    mean, variance = fmean(first), stdev(first) ** 2
    for i in range(warmup, len(norm)):
        value = norm[i]
        deviation = math.sqrt(variance) + 1e-6
        if not math.isfinite(value):
            continue
        if (height := (value - mean) / deviation) > sigmas:
            calls.append(i)
            value = mean + sigmas / height * sigmas * deviation
        mean = alpha * mean + (1 - alpha) * value
        variance = alpha * variance + (1 - alpha) * (value - mean) ** 2
    return calls


def ewma(loss: Losses, norm: Norms, alpha: float = 0.98, sigmas: float = 6.0, warmup: int = 50) -> list[int]:
    """Above the exponential average by 6 exponential deviations; what is called is not averaged."""
    calls: list[int] = []
    mean = variance = 0.0
    seen = 0
    for i, value in enumerate(loss):
        if not math.isfinite(value):
            calls.append(i)
            continue
        if seen >= warmup and value - mean > sigmas * math.sqrt(variance):
            calls.append(i)
            continue
        seen += 1
        weight = max(1 - alpha, 1 / seen)
        variance = (1 - weight) * (variance + weight * (value - mean) ** 2)
        mean += weight * (value - mean)
    return calls


def mad(loss: Losses, norm: Norms, sigmas: float = 6.0, patience: int = 5, size: int = 128) -> list[int]:
    """Five losses in a row above median + 6 scaled absolute deviations of the last 128 accepted ones."""
    window: deque[float] = deque(maxlen=size)
    calls, run = [], 0
    for i, value in enumerate(loss):
        if not math.isfinite(value):
            calls.append(i)
            continue
        if len(window) >= 32:
            middle = median(window)
            spread = 1.4826 * median(abs(past - middle) for past in window)
            run = run + 1 if value > middle + sigmas * spread else 0
            if run == patience:
                calls.append(i)
            if 0 < run <= 100:
                continue
        window.append(value)
    return calls


PEERS: dict[str, Detector] = {
    "NaN only": nan_only,
    "axolotl, threshold 5": axolotl,
    "Lightning SpikeDetection": lightning,
    "llm-foundry KillLossSpike": llm_foundry,
    "OLMo-core skip step": olmo_core,
    "Megatron spiky loss": megatron,
    "ZClip z-score": zclip,
    "EWMA z 6": ewma,
    "MAD z 6, five in a row": mad,
}
