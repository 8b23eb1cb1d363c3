"""What goes wrong in the jobs of `made_traces.py`: each fault acts on a job before a step, or changes its data."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor, nn

from made_job import GOOD, Data, Job
from made_tasks import Experts

RESTARTS = 80
"""Steps at a low learning rate before it is high again."""


@dataclass
class Effect:
    """What a fault does in one step, `since` steps after its onset."""

    data: Data = GOOD
    gradient: float = 1.0
    lr: float = 1.0


Fault = Callable[[Job, int, np.random.Generator], Effect]
"""Acts on the job before a step, `since` steps after the onset, and says what else is different in this step."""


def _matrices(job: Job) -> list[Tensor]:
    return [each for each in job.model.parameters() if each.dim() > 1 and each.shape[0] > 4]


def _weights_noise(job: Job, since: int, chance: np.random.Generator) -> Effect:
    if since == 0:
        factor = float(chance.choice([0.7, 1.5, 3.0]))
        for each in job.model.parameters():
            each.data += factor * each.data.std(unbiased=False) * torch.randn(each.shape, generator=_generator(chance))
    return Effect()


def _bit_flip(job: Job, since: int, chance: np.random.Generator) -> Effect:
    if since == 0:
        for each in job.model.parameters():
            flat = each.data.view(-1).view(torch.int32)
            for _ in range(2):
                flat[int(chance.integers(len(flat)))] ^= 1 << int(chance.choice([26, 28, 30]))
    return Effect()


def _layer_reset(job: Job, since: int, chance: np.random.Generator) -> Effect:
    if since == 0:
        each = _matrices(job)[int(chance.integers(len(_matrices(job))))]
        each.data = torch.randn(each.shape, generator=_generator(chance)) / math.sqrt(each.shape[-1])
    return Effect()


def _dead_units(job: Job, since: int, chance: np.random.Generator) -> Effect:
    """A part of a matrix is lost, and stays so: a collapsed layer, a shard that is never updated."""
    if since == 0:
        job.fault = {
            "matrix": int(chance.integers(len(_matrices(job)))),
            "share": float(chance.choice([0.5, 0.75, 1.0])),
        }
    each = _matrices(job)[int(job.fault["matrix"])]
    each.data[: int(job.fault["share"] * len(each))] = 0
    return Effect()


def _weight_decay(job: Job, since: int, chance: np.random.Generator) -> Effect:
    if since == 0:
        job.fault["decay"] = float(chance.choice([0.003, 0.01, 0.03]))
    for each in job.model.parameters():
        each.data *= 1 - job.fault["decay"]
    return Effect()


def _routing(job: Job, since: int, chance: np.random.Generator) -> Effect:
    """The router sends everything to one expert, or anything anywhere."""
    assert isinstance(job.model, nn.Sequential)
    router = next(each for each in job.model if isinstance(each, Experts)).router
    if since == 0:
        job.fault["routed"] = int(chance.integers(2))
    router.weight.data = torch.zeros(router.weight.shape)
    if job.fault["routed"]:
        router.weight.data.normal_(0, 1, generator=_generator(chance))
    return Effect()


def _data(first: int, last: float, **wrong: float) -> Fault:
    return lambda job, since, chance: Effect(Data(**wrong) if first <= since < last else GOOD)


def _lr(factor: float, last: float = math.inf) -> Fault:
    return lambda job, since, chance: Effect(lr=factor if since < last else 1.0)


def _gradient(factor: float) -> Fault:
    return lambda job, since, chance: Effect(gradient=factor if since == 0 else 1.0)


def _rising_lr(job: Job, since: int, chance: np.random.Generator) -> Effect:
    return Effect(lr=1.015 ** min(since, 400))


def _resumed(job: Job, since: int, chance: np.random.Generator) -> Effect:
    """The optimizer's state is lost, and the learning rate warms up again."""
    if since == 0:
        job.optimizer.state.clear()
    return Effect(lr=min(1.0, (since + 1) / 30))


def _restart(job: Job, since: int, chance: np.random.Generator) -> Effect:
    """The learning rate has come down, and begins anew."""
    return Effect(lr=0.05 if since < RESTARTS else 1.0)


SUDDEN: dict[str, Fault] = {
    "bad-inputs": _data(0, math.inf, scale=30.0),
    "all-labels-wrong": _data(0, math.inf, wrong=1.0),
    "bad-inputs-while": _data(0, 60, scale=30.0),
    "gradient-1e4": _gradient(1e4),
    "lr-jump": _lr(20.0),
    "lr-jump-short": _lr(40.0, 15),
    "bit-flip": _bit_flip,
    "weights-noise": _weights_noise,
    "layer-reset": _layer_reset,
}
GRADUAL: dict[str, Fault] = {
    "wrong-labels": _data(0, math.inf, wrong=0.3),
    "dead-units": _dead_units,
    "weight-decay": _weight_decay,
    "rising-lr": _rising_lr,
    "routing": _routing,
}
PASSING: dict[str, Fault] = {
    "bad-short": _data(0, 3, scale=30.0),
    "labels-short": _data(0, 4, wrong=1.0),
    "gradient-100": _gradient(100.0),
}
HEALTHY: dict[str, tuple[Fault, int, str, str]] = {
    "shift": (_data(0, math.inf, harder=1.0), 0, "shift", "ANNOUNCED"),
    "small-shift": (_data(0, math.inf, harder=0.5), 0, "shift", "ANNOUNCED"),
    "resume": (_resumed, 0, "bump", "RESUMED"),
    "lr-restart": (_restart, RESTARTS, "bump", "LR_CHANGED"),
}
"""Fault, when it shows, label, hint."""


def _generator(chance: np.random.Generator) -> Generator:
    return Generator().manual_seed(int(chance.integers(1 << 31)))
