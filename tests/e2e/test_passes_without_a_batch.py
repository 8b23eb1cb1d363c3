"""Epochs of which a skip window takes all that is left: the loop over the guard is empty, or has a rehearsal."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from toy import facts, flat, require_same, skip_list
from warm_server import run_warm

import rollback
from rollback.facts.training import Finished, Incident

SETTINGS = {"snapshot_every": 5, "rewind": 5, "skip_after": 3, "probation": 8, "max_skipped": "100%"}
_EPOCH = 10  # batches


class Training:
    """Ten batches in an epoch; evaluation and the scheduler's step behind each. bodies: epochs whose body has run."""

    def __init__(self, run: Path, *, bad: int = -1, **settings: Any) -> None:
        torch.manual_seed(1)
        self.bad, self.bodies, self.losses = bad, list[int](), list[float]()
        x = torch.randn(4 * _EPOCH, 3)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.9)
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=self.loader, scheduler=self.scheduler, run=run,
            **{**SETTINGS, **settings},
        )  # fmt: skip

    def epochs(self, rehearse: Callable[[], Any] | None) -> dict[str, str]:
        for epoch in self.guard.epochs(4, rehearse=rehearse):
            self.bodies.append(epoch)
            loss = self.train() if rehearse else self.train_if_any()
            if loss is not None:
                self.losses.append(loss)
            torch.rand(3)
            self.scheduler.step()
        self.guard.close()
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return flat({**{name: part.state_dict() for name, part in parts.items()}, "random": torch.get_rng_state()})

    def train(self) -> float:
        for x, y in self.guard:
            loss = self.update(x, y)
        return loss

    def train_if_any(self) -> float | None:
        loss = None
        for x, y in self.guard:
            loss = self.update(x, y)
        return loss

    def update(self, x: torch.Tensor, y: torch.Tensor) -> float:
        if self.guard.batch == self.bad:
            y = y * float("nan")
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.observe(loss)
        return loss.item()

    def first_batch(self) -> Any:
        return next(iter(self.loader))


WINDOWS = {
    "an epoch": [(10, 19)],
    "two epochs": [(10, 29)],
    "the first epoch": [(0, 9)],
    "the last epoch": [(30, 39)],
    "a tail and an epoch": [(7, 22)],
}


SOAK = {"two epochs", "the first epoch", "the last epoch"}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.soak] * (case in SOAK)) for case in WINDOWS])
def test_an_epoch_that_is_skipped_as_a_whole_is_rehearsed_and_nothing_of_it_counts(tmp_path: Path, case: str) -> None:
    skip = [{"first": first, "last": last} for first, last in WINDOWS[case]]
    plain = Training(tmp_path / "plain", skip=skip)
    expected = plain.epochs(None)
    rehearsed = Training(tmp_path / "rehearsed", skip=skip)
    require_same(rehearsed.epochs(rehearsed.first_batch), expected, case)
    assert rehearsed.bodies == plain.bodies == [0, 1, 2, 3]
    assert len(rehearsed.losses) == 4 > len(plain.losses)
    assert facts(tmp_path / "rehearsed", Finished)


@pytest.mark.parametrize("bad", [11, *(pytest.param(bad, marks=pytest.mark.soak) for bad in (9, 10, 19, 20))])
def test_a_rollback_that_leaves_nothing_of_an_epoch_is_the_run_that_was_given_its_skips(
    tmp_path: Path, bad: int
) -> None:
    settings = {"rewind": 3, "skip_after": 12}
    training = Training(tmp_path / "run", bad=bad, **settings)
    ended = training.epochs(training.first_batch)
    assert facts(tmp_path / "run", Incident)
    given = Training(tmp_path / "given", skip=skip_list(tmp_path / "run"), **settings)
    require_same(ended, given.epochs(given.first_batch), f"bad batch {bad}")


def test_a_loop_that_has_batches_in_each_epoch_has_no_rehearsal(tmp_path: Path) -> None:
    skip = [{"first": 8, "last": 12}]
    plain = Training(tmp_path / "plain", skip=skip)
    expected = plain.epochs(None)
    training = Training(tmp_path / "run", skip=skip)

    def none() -> Iterator[Any]:
        raise AssertionError("nobody needs a batch")

    require_same(training.epochs(none), expected, "no rehearsal")
    # Not how many were committed: a disk that is slow for a moment makes the writer pass over one.
    assert training.losses == plain.losses
    assert training.bodies == plain.bodies == [0, 1, 2, 3]


_SCRIPT = """
import torch
import rollback
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, skip=[{"first": 4, "last": 7}])

def train():
    for x in guard:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss

for epoch in guard.epochs(2):
    train()
"""


def test_a_name_that_is_missing_behind_an_empty_loop_is_explained(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    done = run_warm([sys.executable, "script.py"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert "UnboundLocalError" in done.stderr
    assert "the loop over the guard had no batch in epoch 1" in done.stderr
    assert "rehearse=" in done.stderr
