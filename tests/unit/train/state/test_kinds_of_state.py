"""Training objects of many kinds go on bit for bit from what was kept of them: in new objects, and in their own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_state import through_disk
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, update_bn
from toy import flat, require_same

from rollback.sentinel import Sentinel
from rollback.train.data.cursor import cursor_for
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import StateCopy

X = torch.randn(12, 8, 4, generator=torch.Generator().manual_seed(1))
Optimizer = torch.optim.Optimizer


@dataclass
class Job:
    """after: what the script does behind an update."""

    model: nn.Module
    optimizer: Optimizer
    objects: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Tensor], object] = lambda loss: None

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:

            def loss_of(x: Tensor = X[step]) -> Tensor:
                self.optimizer.zero_grad()
                loss: Tensor = self.model(x).abs().square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            self.after(self.optimizer.step(loss_of))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        self.state = TrainingState(self.model, self.optimizer, self.objects, cursor_for([1]), Sentinel("normal"))

    def portrait(self) -> dict[str, str]:
        """With the strides, by which a fused optimizer goes."""
        states = [state for state in self.optimizer.state.values() if isinstance(state, dict)]
        tensors = [item for state in states for item in state.values() if isinstance(item, Tensor)]
        held = [*self.model.parameters(), *self.model.buffers(), *tensors]
        objects = {name: item.state_dict() for name, item in self.objects.items()}
        return flat({
            "model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict(), "objects": objects,
            "hidden": [*self.model.buffers()], "strides": [[*item.stride()] for item in held],
            "random": torch.get_rng_state(),
        })  # fmt: skip


def net(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *middle, nn.Dropout(0.2), nn.Linear(6, 1))


def trained_by(make: Callable[[Any], Optimizer], model: Callable[[], nn.Module] = net) -> Callable[[], Job]:
    def job() -> Job:
        made = model()
        return Job(made, make(made.parameters()))

    return job


def of(module: Callable[[], nn.Module]) -> Callable[[], Job]:
    return trained_by(lambda parameters: torch.optim.AdamW(parameters, lr=0.02), module)


def scheduled(make: Callable[[Optimizer], Any], *metric: float) -> Callable[[], Job]:
    def job() -> Job:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.05), momentum=0.9)
        scheduler = make(optimizer)
        return Job(model, optimizer, {"scheduler": scheduler}, lambda loss: scheduler.step(*metric))

    return job


def averaged(**how: Any) -> Callable[[], Job]:
    def job() -> Job:
        model = net(nn.BatchNorm1d(6))
        average = AveragedModel(model, **how)

        def after(loss: Tensor) -> None:
            average.update_parameters(model)
            update_bn([X[0], X[1]], average)

        return Job(model, torch.optim.Adam(model.parameters()), {"average": average}, after)

    return job


class Remembers(nn.Module):
    """Buffers that a forward makes anew, lets grow, gives another type, and has first; and an extra state."""

    seen: Tensor
    rows: Tensor
    count: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("rows", torch.zeros(0, 4), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("last", None, persistent=False)
        self.told: dict[str, Any] = {"mean": torch.zeros(()), "calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        self.rows = torch.cat([self.rows, x[:1]])
        self.count = self.count + (1 if self.count < 5 else 0.5)
        self.told = {"mean": self.told["mean"] + x.mean(), "calls": self.told["calls"] + 1}
        last, self.last = self.last, x[-1]
        shift = self.seen + self.rows.mean(0) + (0 if last is None else last)
        return self.linear(x - shift) * (1 + self.count + self.told["mean"] + self.told["calls"])  # type: ignore[no-any-return]

    def get_extra_state(self) -> dict[str, Any]:
        return self.told

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.told = dict(state)


class OfComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64).t())

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


def convolution() -> nn.Module:
    parts = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2), nn.Conv2d(4, 3, 2, padding=1))
    return parts.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


optim = torch.optim
JOBS: dict[str, Callable[[], Job]] = {
    "Adam fused amsgrad": trained_by(lambda p: optim.Adam(p, fused=True, amsgrad=True)),
    "Adadelta": trained_by(optim.Adadelta),
    "ASGD": trained_by(lambda p: optim.ASGD(p, t0=3)),
    "RAdam decoupled": trained_by(lambda p: optim.RAdam(p, decoupled_weight_decay=True, weight_decay=0.1)),
    "RMSprop centered": trained_by(lambda p: optim.RMSprop(p, centered=True, momentum=0.9)),
    "Rprop": trained_by(optim.Rprop),
    "LBFGS": trained_by(lambda p: optim.LBFGS(p, 0.1, 3, history_size=3, line_search_fn="strong_wolfe")),
    "Adafactor": trained_by(optim.Adafactor),
    "cyclic": scheduled(lambda o: lr.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9)),
    "one cycle": scheduled(lambda o: lr.OneCycleLR(o, 0.1, total_steps=40)),
    "in sequence": scheduled(lambda o: lr.SequentialLR(o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, 5)], [4])),
    "chained": scheduled(lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)])),
    "plateau": scheduled(lambda o: lr.ReduceLROnPlateau(o, patience=1), 1.0),
    "SWALR": scheduled(lambda o: SWALR(o, 0.01, anneal_epochs=8)),
    "average": averaged(use_buffers=True),
    "moving average": averaged(avg_fn=get_ema_avg_fn(0.9)),
    "BatchNorm without momentum": of(lambda: net(nn.BatchNorm1d(6, momentum=None))),
    "spectral norm": of(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Linear(6, 1))),
    "orthogonal": of(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 1))),
    "random activations": of(lambda: net(nn.RReLU(), nn.AlphaDropout(0.1))),
    "buffers of all kinds": of(Remembers),
    "complex numbers": of(OfComplexNumbers),
    "channels last": trained_by(lambda p: optim.AdamW(p, fused=True), convolution),
}


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.filterwarnings("ignore")
def test_it_goes_on_as_if_nothing_had_been(kind: str) -> None:
    torch.manual_seed(0)
    job = JOBS[kind]()
    job.train(range(6))
    kept, held = through_disk(job.state.image()), StateCopy(job.state)
    job.train(range(6, 12))
    expected = job.portrait()
    held.put_back(job.state)
    job.train(range(6, 12))
    require_same(job.portrait(), expected, "put back")
    torch.manual_seed(1)
    fresh = JOBS[kind]()
    fresh.state.load(*kept)
    fresh.train(range(6, 12))
    require_same(fresh.portrait(), expected, "in new objects")
