"""What a script registers for Accelerate's checkpoints is kept by the guard, too. So is an adopted one's average."""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rollback
from rollback.errors import UsageError
from rollback.trainers.adopt.made_objects import guard_parts


class Average:
    """Of the weights, with a state that is no module's."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(1, 4), 0

    def update(self, weight: Tensor) -> None:
        self.total, self.count = 0.9 * self.total + weight.detach(), self.count + 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"].clone(), state["count"]


@pytest.fixture
def accelerator() -> Iterator[Any]:
    pytest.importorskip("accelerate")  # seconds, which only the worker that runs these tests should spend
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    torch.manual_seed(0)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_what_is_registered_for_checkpoints_goes_back_with_the_weights(accelerator: Any, tmp_path: Path) -> None:
    inputs, average = torch.randn(320, 4), Average()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scheduler = StepLR(optimizer, 10)
    accelerator.register_for_checkpointing(average, scheduler)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = rollback.protect(accelerator, *prepared, run=tmp_path / "run")
    accelerator.register_for_checkpointing(average)  # it is kept already
    after: list[Tensor] = []
    for place, (given, wanted) in enumerate(loader):
        loss = (model(given) - wanted).square().mean()
        accelerator.backward(loss * math.nan if place == 30 else loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update(model.weight)
        del after[loader.guard.step :]
        after.append(model.weight.detach().clone())
    assert len(after) == average.count == loader.guard.step == 39
    expected = Average()
    for weight in after:
        expected.update(weight)
    assert torch.equal(average.total, expected.total)
    loader.guard.close()


def test_what_is_prepared_and_not_handed_over_goes_back_with_the_weights(accelerator: Any, tmp_path: Path) -> None:
    """As a critic with an optimizer of its own, a second model of the first optimizer, and the scheduler."""
    inputs = torch.randn(320, 4)

    def made() -> tuple[Any, ...]:
        torch.manual_seed(1)
        model, encoder, critic = nn.Linear(4, 1), nn.Linear(4, 4), nn.Linear(1, 1)
        optimizer = torch.optim.Adam([*model.parameters(), *encoder.parameters()], 0.01)
        second = torch.optim.Adam(critic.parameters(), 0.01)
        return model, encoder, critic, optimizer, second, StepLR(optimizer, 3), DataLoader(inputs, batch_size=8)

    def train(parts: tuple[Any, ...], backward: Any, *, bad: int, left_out: int) -> list[Any]:
        model, encoder, critic, optimizer, second, scheduler, loader = parts
        for place, given in enumerate(loader):
            if place == left_out:
                continue
            score = model(encoder(given)) * (math.nan if place == bad else 1)
            second.zero_grad()
            backward((critic(score.detach()) - 1).square().mean())
            second.step()
            optimizer.zero_grad()
            backward(critic(score).square().mean())
            optimizer.step()
            scheduler.step()
        return [each.state_dict() for each in parts[:-1]]

    model, encoder, critic, optimizer, *others, loader = accelerator.prepare(*made())
    model, optimizer, loader = rollback.protect(accelerator, model, optimizer, loader, run=tmp_path / "run")
    found = train((model, encoder, critic, optimizer, *others, loader), accelerator.backward, bad=12, left_out=-1)
    assert loader.guard.step == 39
    loader.guard.close()
    expected = train(made(), torch.Tensor.backward, bad=-1, left_out=12)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_how_many_batches_an_update_has_goes_back_where_the_script_changes_that(
    accelerator: Any, tmp_path: Path
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    prepared = accelerator.prepare(model, optimizer, DataLoader(torch.randn(160, 4), batch_size=8))
    how: Any = {"run": tmp_path / "run", "snapshot_every": 4, "probation": 6}
    model, optimizer, loader = rollback.protect(accelerator, *prepared, **how)
    accumulated: dict[int, int] = {}
    again = []
    for epoch in loader.guard.epochs(2):
        if epoch == 1:
            accelerator.gradient_accumulation_steps = 2
        for given in loader:
            place = loader.guard.batch
            again += [place] if place in accumulated else []
            accumulated[place] = accelerator.gradient_accumulation_steps
            with accelerator.accumulate(model):
                loss = model(given).square().mean()
                accelerator.backward(loss * math.nan if place == 22 else loss)
                optimizer.step()
                optimizer.zero_grad()
    assert again[0] < 20, "the rollback goes back into the first epoch"
    assert all(count == 1 + (place >= 20) for place, count in accumulated.items()), accumulated
    loader.guard.close()


def test_batches_that_are_read_past_the_guard_are_refused_before_the_weights_change(
    accelerator: Any, tmp_path: Path
) -> None:
    from accelerate import skip_first_batches

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    prepared = accelerator.prepare(model, optimizer, DataLoader(torch.randn(32, 4), batch_size=8))
    model, optimizer, loader = rollback.protect(accelerator, *prepared, run=tmp_path / "run")
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, optimizer.optimizer)  # torch makes a state by an update of zeros
    accelerator.backward(model(next(iter(skip_first_batches(loader, 2)))).square().mean())
    with pytest.raises(UsageError, match="batches that are not the guard's"):
        optimizer.step()
    assert torch.equal(model.weight, before)
    loader.guard.close()


def test_strict_refuses_a_loader_whose_order_would_be_another_one() -> None:
    class Prepared:
        __module__ = "accelerate.data_loader"
        use_stateful_dataloader = True

    with pytest.raises(UsageError, match="use_stateful_dataloader=True"):
        guard_parts(Prepared(), [], strict=True)


def test_an_adopted_script_s_average_and_scheduler_go_back_though_they_were_not_prepared(
    accelerator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gc.collect()  # of accelerators there is to be one
    inputs, weights = torch.randn(320, 4), nn.Linear(4, 1)
    average, registered = AveragedModel(weights), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(weights.parameters(), 0.01)
    scheduler = StepLR(optimizer, 10)
    accelerator.register_for_checkpointing(registered)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, prepared, loader = accelerator.prepare(weights, optimizer, data)
    made = [weights, *average.modules(), registered, optimizer, scheduler]
    parts = guard_parts(loader, made)
    assert [name for name in parts.objects if name in ("AveragedModel", "StepLR", "Linear")] == [
        "Linear", "StepLR", "AveragedModel",
    ]  # fmt: skip
    guard, batches = parts.make()
    after: list[Tensor] = []
    for place, (given, wanted) in enumerate(batches):
        loss = (model(given) - wanted).square().mean()
        accelerator.backward(loss * math.nan if place == 30 else loss)
        prepared.step()
        scheduler.step()
        prepared.zero_grad()
        average.update_parameters(weights)
        del after[guard.step :]
        after.append(weights.weight.detach().clone())
    guard.close()
    assert len(after) == int(average.n_averaged) == scheduler.last_epoch == guard.step == 39
    assert torch.allclose(average.module.weight, torch.stack(after).mean(0))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(24.0)[:, None])


@pytest.mark.parametrize("data", [TensorDataset(torch.randn(24, 1)), Stream()], ids=lambda data: type(data).__name__)
def test_the_rest_of_an_epoch_is_refused_whatever_loader_has_it(accelerator: Any, data: Any) -> None:
    """A guard would read a stream from its beginning."""
    from accelerate import skip_first_batches

    from rollback.trainers.prepared_loader import require_known_loader

    accelerator.dataloader_config.dispatch_batches = False
    whole = accelerator.prepare(DataLoader(data, 4))
    require_known_loader(whole)
    with pytest.raises(UsageError, match="what skip_first_batches leaves of an epoch"):
        require_known_loader(skip_first_batches(whole, 2))
