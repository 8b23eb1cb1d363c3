"""Epochs of which a skip window takes all that is left: the loop over the guard is empty, or has a rehearsal."""

import signal
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
from rollback.facts.training import Committed, Evicted, Finished, Incident, Saving, Stopped

SETTINGS = {"snapshot_every": 5, "rewind": 5, "skip_after": 3, "probation": 8, "max_skipped": "100%"}
_EPOCH = 10  # batches


class Training:
    """Ten batches in an epoch; evaluation and the scheduler's step behind each.

    accumulate: batches of an update. stop: the epoch in whose work behind the loop it is told to stop. bodies: epochs
    whose body has run. gradients: behind the loop over batches of each.
    """

    def __init__(self, run: Path, *, bad: int = -1, accumulate: int = 1, stop: int = -1, **settings: Any) -> None:
        torch.manual_seed(1)
        self.bad, self.accumulate, self.stop = bad, accumulate, stop
        self.bodies, self.losses, self.gradients = list[int](), list[float](), list[Any]()
        x = torch.randn(4 * _EPOCH, 3)
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.9)
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=self.loader, scheduler=self.scheduler, run=run,
            **{**SETTINGS, **settings},
        )  # fmt: skip
        self.kept = self.guard.keep(batches=0)

    def epochs(self, rehearse: Callable[[], Any] | None) -> dict[str, str]:
        for epoch in self.guard.epochs(4, rehearse=rehearse):
            self.bodies.append(epoch)
            loss = self.train() if rehearse else self.train_if_any()
            if loss is not None:
                self.losses.append(loss)
            self.gradients.append([None if p.grad is None else p.grad.tolist() for p in self.model.parameters()])
            if epoch == self.stop:
                signal.raise_signal(signal.SIGTERM)
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
        self.kept.batches += 1
        if self.kept.batches % self.accumulate == 0:
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


@pytest.mark.parametrize(
    ("accumulate", "last"),
    [(3, 19), (4, 19), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((3, 29), (7, 19), (12, 19)))],
)
def test_batches_that_an_accumulation_has_left_over_are_in_the_next_update_behind_a_rehearsal(
    tmp_path: Path, accumulate: int, last: int
) -> None:
    """A checkpoint there would not have their gradients, so there is none."""
    settings: dict[str, Any] = {"accumulate": accumulate, "skip": [{"first": 10, "last": last}], "snapshot_every": 1}
    plain = Training(tmp_path / "plain", **settings)
    expected = plain.epochs(None)
    rehearsed = Training(tmp_path / "rehearsed", **settings)
    require_same(rehearsed.epochs(rehearsed.first_batch), expected, "accumulated")
    assert rehearsed.gradients == plain.gradients
    assert any(gradient is not None for gradient in rehearsed.gradients[1])
    assert len(rehearsed.losses) == 4
    committed = [fact.batch for fact in facts(tmp_path / "rehearsed", Committed)]
    assert committed.count(10) == 1, "that of the epoch's end, which is given up when training goes on"


def test_a_stop_is_not_heard_where_batches_are_left_over(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"accumulate": 3, "skip": [{"first": 10, "last": 19}], "snapshot_every": 1}
    plain = Training(tmp_path / "plain", **settings)
    expected = plain.epochs(None)
    stopped = Training(tmp_path / "run", stop=0, **settings)
    with pytest.raises(SystemExit):
        stopped.epochs(stopped.first_batch)
    (fact,) = facts(tmp_path / "run", Stopped)
    assert fact.batch > 20
    again = Training(tmp_path / "run", **settings)
    require_same(again.epochs(again.first_batch), expected, "resumed")


def test_gradients_that_the_script_has_left_are_behind_a_rehearsal_what_they_were(tmp_path: Path) -> None:
    ended = []
    for name in ("plain", "rehearsed"):
        training = Training(tmp_path / name, skip=[{"first": 10, "last": 19}])
        training.optimizer.zero_grad = lambda: None  # type: ignore[method-assign, assignment]
        rehearse = training.first_batch if name == "rehearsed" else None
        ended.append((training.epochs(rehearse), training.gradients))
    (expected, gradients), (state, others) = ended
    require_same(state, expected, "gradients of all steps")
    assert others == gradients


def test_where_no_checkpoint_can_be_taken_there_is_no_rehearsal(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"skip": [{"first": 10, "last": 19}], "snapshot_every": 0, "observe_only": True}
    training = Training(tmp_path / "run", **settings)
    with pytest.raises(UnboundLocalError):
        training.epochs(training.first_batch)
    assert training.bodies == [0, 1]
    training.guard.close()


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


def test_the_end_of_an_epoch_gives_up_that_of_the_epoch_before_where_no_batch_lies_between(tmp_path: Path) -> None:
    """Each is kept as the end of training may be. All of them together do not find room in the memory's slots."""
    (memory := tmp_path / "memory").mkdir()
    settings: dict[str, Any] = {"keep": 3, "snapshot_every": 1, "probation": 20, "fast_tier": str(memory)}
    training = Training(tmp_path / "run", skip=[{"first": 10, "last": 39}], **settings)
    training.epochs(None)
    assert {fact.slots for fact in facts(tmp_path / "run", Saving)} == {4}
    batches = {fact.checkpoint: fact.batch for fact in facts(tmp_path / "run", Committed)}
    left = [fact.checkpoint for fact in facts(tmp_path / "run", Evicted) if "the end of an epoch" in fact.reason]
    assert [batches[name] for name in left] == [10, 20, 30]
    (end,) = facts(tmp_path / "run", Finished)
    assert end.checkpoint is not None
    assert batches[end.checkpoint] == 40


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


@pytest.mark.parametrize(
    ("returned", "error"), [("loss", "UnboundLocalError"), ("{}['loss']", "KeyError"), ("0 / 0", "ZeroDivisionError")]
)
def test_what_is_missing_behind_an_empty_loop_is_explained(tmp_path: Path, returned: str, error: str) -> None:
    returns = f"return {returned} if guard.epoch else 0" if returned != "loss" else "return loss"
    (tmp_path / "script.py").write_text(_SCRIPT.replace("return loss", returns))
    done = run_warm([sys.executable, "script.py"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert error in done.stderr
    assert "the loop over the guard had no batch in epoch 1" in done.stderr
    assert "rehearse=" in done.stderr


_BY_HAND = """
import torch
import rollback
torch.manual_seed(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 2), batch_size=4)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, skip=[{"first": 4, "last": 7}])
batches = iter(guard)
for step in range(12):
    try:
        x = next(batches)
    except StopIteration:
        batches = iter(guard)
        x = next(batches)
    model(x).square().mean().backward()
    optimizer.step()
"""


def test_an_iterator_that_a_script_begins_by_hand_in_an_empty_epoch_is_explained_and_not_tried_ten_times(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(_BY_HAND)
    command = [sys.executable, "-m", "rollback", "launch", "--nproc", "1", "script.py"]
    done = run_warm(command, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1, done.stderr
    said = done.stdout + done.stderr
    assert "raised StopIteration: (the loop over the guard had no batch in epoch" in said, said
    assert "`batches = (batch for _ in guard.epochs(n) for batch in guard)`" in said
    assert "2 attempts in a row failed behind epoch 1, which had no batch" in said
