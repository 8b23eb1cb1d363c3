"""Objects that do not load what a checkpoint has of them."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from toy import SETTINGS, files

import rollback
from rollback.errors import CheckpointDamaged, RunDoesNotFit, StateRefused
from rollback.train.state.stateful import load_into


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise self.error


def guard_with(kind: str, run: Path) -> rollback.Guard:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler: Any = ReduceLROnPlateau(optimizer) if kind == "plateau" else LambdaLR(optimizer, lambda step: 1.0)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=[*torch.randn(6, 2, 4)], run=run, scheduler=scheduler, **SETTINGS
    )
    for x in guard:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return guard


def test_a_scheduler_of_another_kind_is_refused_in_words_and_nothing_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    guard_with("plateau", run)
    before = files(run)
    with pytest.raises(RunDoesNotFit, match=r"the LambdaLR 'scheduler' did not load the state") as caught:
        guard_with("lambda", run)
    assert "KeyError: 'lr_lambdas'" in caught.value.message
    assert "That state has 'factor', " in caught.value.message
    assert "nothing was written to" in caught.value.message
    assert "make 'scheduler' as the run made it" in (caught.value.hint or "")
    assert files(run) == before
    assert guard_with("plateau", run).step == 6


@pytest.mark.parametrize("error", [KeyError("a"), ValueError("b"), RuntimeError("size mismatch"), AssertionError()])
def test_whatever_an_object_raises_is_told_with_its_name(error: Exception) -> None:
    with pytest.raises(StateRefused, match=f"the Raises 'ema' .* raised {type(error).__name__}"):
        load_into("ema", Raises(error), {"x": 1})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CheckpointDamaged("its own words")]
)
def test_what_is_not_the_state_s_fault_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        load_into("ema", Raises(error), {"x": 1})
    assert caught.value is error


class Sharpness(torch.optim.Optimizer):
    """Shares its groups with the optimizer inside, as SAM does. A scheduler has this one, and the guard that one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.5, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups


def test_whoever_holds_groups_or_state_of_an_optimizer_still_does_when_one_is_loaded() -> None:
    model = nn.Linear(2, 1)
    sharpness = Sharpness(model.parameters())
    inner = sharpness.inner
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    (group,), state, stored = inner.param_groups, inner.state, copy.deepcopy(inner.state_dict())
    whole = copy.deepcopy(sharpness.state_dict())
    group["lr"] = 0.1
    load_into("optimizer", inner, stored)
    assert group["lr"] == 0.5
    load_into("sharpness", sharpness, whole)
    sharpness.param_groups[0]["lr"] = 0.2
    assert inner.param_groups[0] is group
    assert group["lr"] == 0.2
    assert inner.state is state
    assert len(state) == 2
    assert torch.equal(state[model.bias]["momentum_buffer"], torch.ones(1))


def test_whoever_is_handed_the_loaded_groups_by_a_hook_of_its_own_gets_those_that_stay() -> None:
    optimizer, mirror = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1), SimpleNamespace()
    optimizer.register_load_state_dict_post_hook(lambda loaded: vars(mirror).update(groups=loaded.param_groups))
    load_into("optimizer", optimizer, copy.deepcopy(optimizer.state_dict()))
    assert mirror.groups is optimizer.param_groups


class AsManyGroups(torch.optim.SGD):
    """Makes as many groups as the state has when that is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del self.param_groups[len(state_dict["param_groups"]) :]
        while len(self.param_groups) < len(state_dict["param_groups"]):
            self.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("before", [1, 3])
def test_an_optimizer_may_make_its_groups_when_a_state_is_loaded(before: int) -> None:
    had, optimizer = (
        AsManyGroups([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for _ in range(number)])
        for number, rate in ((2, 0.5), (before, 0.1))
    )
    groups, (first, *_) = optimizer.param_groups, optimizer.param_groups
    load_into("optimizer", optimizer, had.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert optimizer.param_groups is groups
    assert groups[0] is first
