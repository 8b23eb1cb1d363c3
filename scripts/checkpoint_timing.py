"""Timing of ways to save, for the benchmarks of checkpoints."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from savers import Method, Ours, barrier


def timed(act: Callable[[], object]) -> float:
    barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Peak:
    """The most private memory that this process has had resident within: `bytes`. The kernel keeps count of it."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        return self

    def __exit__(self, *_: object) -> None:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        most, shared = (int(status[field].split()[0]) * 1024 for field in ("VmHWM", "RssShmem"))
        self.bytes = most - shared


def ordinary(method: Method, steps: int = 6) -> None:
    """About as many steps without a save as are needed until one has landed."""
    for _ in range(steps):
        method.step()


def lost(method: Method, steps_around: int = 6) -> tuple[float, float]:
    """Loop time lost to one checkpoint until it is durable, and for how long the call blocked.

    What a step takes without is measured before and behind, in so many steps each: the machine's own speed drifts.
    """
    for _ in range(2):
        method.step()
    ordinary_steps = [timed(method.step) for _ in range(steps_around)]
    steps, synced = 0, False
    began = time.perf_counter()
    method.save()
    blocked = time.perf_counter() - began
    if isinstance(method, Ours):
        steps += 1
    while steps < 4 or not synced:
        if not synced and method.done():
            if not isinstance(method, Ours):
                method.sync()
            synced = True
        method.step()
        steps += 1
    took = time.perf_counter() - began
    ordinary_steps += [timed(method.step) for _ in range(steps_around)]
    return took - steps * statistics.fmean(ordinary_steps), blocked


def restored(method: Method, steps_around: int = 3) -> float:
    before = [timed(method.step) for _ in range(steps_around)]
    took = timed(method.restore) + timed(method.step)
    return took - statistics.fmean([*before, *(timed(method.step) for _ in range(steps_around))])


def of_all_ranks(value: float, kind: Any) -> float:
    number = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(number, op=kind)
    return float(number)
