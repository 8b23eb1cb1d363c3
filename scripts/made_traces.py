#!/usr/bin/env python3
"""Make labelled loss traces by training: small jobs of thirteen fields (`made_tasks.py`), with faults and clean twins.

    python scripts/made_traces.py OUT [--seed N] [--jobs 3] [--only FAMILY,...]

writes OUT/labels.json and OUT/data/NAME.npz (step, loss, gn), which `bench_sentinel.py OUT` scores; some minutes on one
core. Every job is run once without a fault. From the middle of that run on it is repeated with one fault each, on
the same batches. What a fault did is measured against that clean twin, not taken for granted: `divergence` if the loss
is above the twin's for over 100 steps, `blip` if it is back within 30, `grey` between them, `silent` if nothing shows.
The loss of a GAN or of reinforcement learning is chaotic, so there a divergence must leave all that the twin has shown.
"""

import argparse
import copy
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Generator

from made_faults import GRADUAL, HEALTHY, PASSING, SUDDEN, Effect, Fault
from made_job import Job
from made_tasks import JOBS
from traces import Array, Label

STEPS = 900
AFTER = 340
"""Steps that a run goes on after its fault."""
LASTS = 100
PASSES = 30
_SMOOTH = 15
_RAISED = 1.5  # noise units of the twin
_RAISED_PROGRESS = 0.02  # a solved task whose tiny loss triples has lost nothing


def run(job: Job, first: int, last: int, peak: int, fault: Fault | None, chance: np.random.Generator) -> Array:
    """Loss and norm of the steps from `first` up to `last`; after a non-finite loss 40 more, as a log would hold."""
    rows: list[tuple[float, float]] = []
    rates = [float(group["lr"]) for group in job.optimizer.param_groups]
    broken = 0
    for number in range(first, last):
        effect = fault(job, number - first, chance) if fault else Effect()
        schedule = 0.5 + 0.5 * math.cos(math.pi * number / peak) if job.seed % 2 else 1.0
        for group, rate in zip(job.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * effect.lr * max(schedule, 0.1) * min(1.0, (number + 1) / 20)
        rows.append(job.step(Generator().manual_seed(job.seed * 1_000_003 + number), effect.data, effect.gradient))
        broken += not math.isfinite(rows[-1][0])
        if broken >= 40:
            break
    for group, rate in zip(job.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return np.array(rows)


def _smooth(values: Array) -> Array:
    """Running median, over `_SMOOTH` values from each on."""
    padded = np.concatenate([values, np.full(_SMOOTH - 1, values[-1])])
    smooth: Array = np.median(np.lib.stride_tricks.sliding_window_view(padded, _SMOOTH), axis=1)
    return smooth


def measured(twin: Array, hurt: Array, at: int, supervised: bool) -> list[Label]:
    """What the fault at index `at` did to the loss, as labels. Rows hold the loss and what else is logged."""
    end = len(hurt)
    broken = np.flatnonzero(~np.isfinite(hurt[at:]).all(axis=1))
    labels: list[Label] = [(at + int(broken[0]), end, "nonfinite")] if len(broken) else []
    stop = labels[0][0] if labels else end
    twin, hurt = twin[:, 0], hurt[:, 0]
    if stop - at < 2:
        return labels
    calm = twin[max(0, at - 200) : at]
    noise = 1.4826 * float(np.median(np.abs(calm - _smooth(calm)))) + 1e-12
    progress = max(0.0, float(np.median(twin[:8])) - float(np.median(calm)))
    if supervised:
        bound = max(_RAISED * noise, _RAISED_PROGRESS * progress)
        excess = hurt[at:stop] - twin[at:stop]
    else:
        smooth = _smooth(twin)
        bound, excess = float(smooth.max()) + float(np.ptp(smooth)), hurt[at:stop]
    away = _smooth(excess) > bound
    if not away.any():
        high = np.flatnonzero(excess > bound + 3 * noise)
        mark = (at, min(end, at + 15), "blip") if len(high) and high[-1] < PASSES else (at, end, "silent")
        return [*labels, mark]
    first = int(away.argmax())
    back = np.flatnonzero(np.convolve(~away[first:], np.ones(20), "valid") >= 20)
    length = int(back[0]) if len(back) else len(away) - first
    onset = at + first if first > PASSES else at
    if onset > at:
        labels.append((at, onset, "grey"))  # the fault is there, and does not show yet
    if length >= LASTS or len(broken):
        return [*labels, (onset, min(end, onset + max(length, 15)) if len(back) else end, "divergence")]
    return [*labels, (onset, min(end, onset + max(length, 15)), "blip" if first + length <= PASSES else "grey")]


def make(family: str, seed: int, target: Path) -> dict[str, dict[str, object]]:
    """All traces of one job, written; their entries in labels.json."""
    chance = np.random.default_rng([seed, *family.encode()])
    job = JOBS[family](seed)
    at = int(chance.integers(350, STEPS - AFTER))
    before = run(job, 0, at, STEPS, None, chance)
    middle = copy.deepcopy(job)
    clean = np.concatenate([before, run(job, at, STEPS, STEPS, None, chance)])
    entries: dict[str, dict[str, object]] = {}

    def write(kind: str, rows: Array, labels: list[Label], hints: dict[int, str]) -> None:
        name = f"{family}-{seed}-{kind}"
        columns = {"step": np.arange(len(rows), dtype=np.int32), "loss": rows[:, 0], "gn": rows[:, 1]}
        if seed % 4 == 3:
            del columns["gn"]  # many logs have none
        np.savez_compressed(target / "data" / f"{name}.npz", **columns)  # type: ignore[arg-type]
        entries[name] = {
            "source": "made" if job.supervised else "chaotic",
            "family": family,
            "kind": kind,
            "n": len(rows),
            "stride": 1,
            "has_gn": "gn" in columns,
            "onset": "exact",
            "labels": labels,
            "hints": hints,
        }

    def rerun(fault: Fault) -> Array:
        rows = run(copy.deepcopy(middle), at, min(at + AFTER, STEPS), STEPS, fault, chance)
        return np.concatenate([before, rows])

    write("clean", clean, [], {})
    gradual = [name for name in GRADUAL if name != "routing" or family == "experts"]
    for faults, names, count in ((SUDDEN, list(SUDDEN), 5), (GRADUAL, gradual, 4), (PASSING, list(PASSING), 2)):
        for kind in sorted(chance.choice(names, min(count, len(names)), replace=False)):
            rows = rerun(faults[kind])
            logged = slice(1 if seed % 4 == 3 else 2)
            write(kind, rows, measured(clean[:, logged], rows[:, logged], at, job.supervised), {})
    for kind, (fault, later, label, hint) in HEALTHY.items():
        begins = at + later
        write(kind, rerun(fault), [(begins, begins + (150 if label == "shift" else 100), label)], {begins: hint})
    return entries


def main() -> None:
    """Make them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="an empty directory, or one to be made")
    parser.add_argument("--seed", type=int, default=0, help="the first job's seed; the others follow it")
    parser.add_argument("--jobs", type=int, default=3, help="jobs of each family")
    parser.add_argument("--only", default=",".join(JOBS), help="families, separated by commas")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    (options.out / "data").mkdir(parents=True, exist_ok=True)
    traces: dict[str, dict[str, object]] = {}
    for family in options.only.split(","):
        for number in range(options.jobs):
            traces |= make(family, options.seed + number, options.out)
        print(f"{family}: {sum(entry['family'] == family for entry in traces.values())} traces", flush=True)
        (options.out / "labels.json").write_text(json.dumps({"traces": traces}, indent=1))


if __name__ == "__main__":
    main()
