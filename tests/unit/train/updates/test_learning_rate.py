"""A lower learning rate for a stretch of steps: the optimizer steps with it, and nobody else sees it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rollback
from recorded_run import incident, rollback_plan
from rollback.facts.history import Case
from rollback.facts.training import Planned
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.updates.learning_rate import LoweredRate

PLAN = rollback_plan(1, "c000001-s00000010", 10, None, lower_rate=(0.5, 3))
FACTORS = [1.0, 0.5, 0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]  # of steps 9 to 17


def test_the_rate_is_low_for_so_many_steps_and_back_over_as_many() -> None:
    assert [PLAN.rate_at(step) for step in range(9, 18)] == FACTORS


@pytest.mark.parametrize("as_tensor", [False, True])
def test_all_groups_step_with_it_and_schedulers_and_states_see_the_script_s_rates(as_tensor: bool) -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rates: list[Any] = [1.0, 0.25]
    if as_tensor:
        rates = [torch.tensor(rate) for rate in rates]
    optimizer = torch.optim.SGD([{"params": [w], "lr": lr} for w, lr in zip(weights, rates, strict=True)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    at = [9]
    lowered = LoweredRate(optimizer, lambda: at[0], None)
    assert not optimizer._optimizer_step_pre_hooks, "who has no such plan pays nothing"
    case = Case(incident(1, 20, 23), PLAN)
    lowered.rollback_applied(RollbackApplied(RollbackCause.PLAN, 10, 20, "c000001-s00000010", case=case))
    for place, factor in enumerate(FACTORS):
        before = [weight.detach().clone() for weight in weights]
        own = [float(group["lr"]) for group in optimizer.param_groups]
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
        assert (
            [float(group["lr"]) for group in optimizer.param_groups]
            == own
            == [rate * 0.5 ** (place // 5) for rate in (1.0, 0.25)]
        )
        for weight, then, rate in zip(weights, before, own, strict=True):
            torch.testing.assert_close(then - weight, torch.full((2,), rate * factor))
        scheduler.step()
        at[0] += 1


def test_a_later_plan_with_a_rate_of_its_own_counts() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    lowered = LoweredRate(optimizer, lambda: 0, PLAN)
    later: Planned = PLAN.model_copy(update={"step": 0, "lower_rate": (0.25, 1)})
    lowered.rollback_applied(RollbackApplied(RollbackCause.PLAN, 0, 0, "", case=Case(incident(1, 20, 23), later)))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0].item() == -0.25


def test_a_step_that_raises_leaves_no_rate_behind() -> None:
    def out_of_memory() -> float:
        raise RuntimeError("out of memory")

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    lowered = LoweredRate(optimizer, lambda: 10, PLAN)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(out_of_memory)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert (weight.item(), optimizer.param_groups[0]["lr"]) == (-0.5, 1.0)
    del lowered


def test_a_guard_that_is_closed_lowers_no_rate_beside_the_next_one(tmp_path: Path) -> None:
    """A notebook keeps the first one, and the exception that broke off the making of one."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guards = []
    for name in ("first", "second"):
        made = rollback.Guard(model=model, optimizer=optimizer, loader=[], run=tmp_path / name)
        made._loop.lowered_rate._follow(PLAN.model_copy(update={"step": 0}))
        before = model.weight.item()
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert before - model.weight.item() == pytest.approx(0.5)
        made.close()
        guards.append(made)
