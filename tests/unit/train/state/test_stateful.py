"""Objects that do not load what a checkpoint has of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from toy import SETTINGS, files

import rollback
from rollback.errors import CheckpointDamaged, RunDoesNotFit
from rollback.train.state.stateful import StateRefused, load_into, load_optimizer


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


class InSinglePrecision(torch.optim.Optimizer):
    """Keeps momentum and a master copy in single precision, and further tensors in a list, as Shampoo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["factors"] = [torch.rand(3), torch.rand(3).double()]
                state["master"] = parameter.float().clone()
            state["master"] -= state["factors"][0].sum() * parameter.grad.float() / 3
            parameter.copy_(state["master"])


class RoundsByItself(InSinglePrecision):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [InSinglePrecision, RoundsByItself])
def test_an_optimizer_s_state_comes_back_in_its_own_precision_unless_it_loads_by_itself(kind: Any) -> None:
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.ones(5).bfloat16()), nn.Parameter(torch.ones(5).bfloat16())
    one, two = kind([weight]), kind([other])
    weight.grad = torch.rand(5).bfloat16()
    one.step()
    load_optimizer(two, one.state_dict())
    (then,), (now,) = one.state.values(), two.state.values()
    exact = kind is InSinglePrecision
    assert torch.equal(now["master"], then["master"]) is exact
    assert [item.dtype == stored.dtype for item, stored in zip(now["factors"], then["factors"], strict=True)] == (
        [exact, exact]
    )
