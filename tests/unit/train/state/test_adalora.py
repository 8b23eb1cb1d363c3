"""AdaLoRA: what decides which ranks stay is put back with the weights. No state_dict of the model has it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from rollback.train.state.adalora import NAME, rank_allocation


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.AdaLoraConfig(
        init_r=4, target_r=1, tinit=2, tfinal=2, deltaT=1, total_step=16, target_modules=["0", "2"]
    )
    return peft.get_peft_model(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), config)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, *, scale: float = 1.0) -> None:
    for step in steps:
        batch = scale * torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        (model(batch) - batch.roll(1, 1)).square().mean().backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()


@pytest.mark.parametrize("reached", [0, 9, 15], ids=["before the first step", "on the way", "with all ranks chosen"])
def test_what_was_trained_since_leaves_no_trace(reached: int) -> None:
    model = adapted()
    optimizer = torch.optim.Adam([item for item in model.parameters() if item.requires_grad], 0.05)
    kept = {"model": model, "optimizer": optimizer, **rank_allocation(model)}
    assert NAME in kept
    train(model, optimizer, range(reached))
    states = {name: copy.deepcopy(item.state_dict()) for name, item in kept.items()}
    train(model, optimizer, range(reached, 20))
    undisturbed = copy.deepcopy(model.state_dict())
    for _ in range(2):
        for name, state in states.items():
            kept[name].load_state_dict(copy.deepcopy(state))
        train(model, optimizer, range(13), scale=9.0)  # behind which the averages are dropped
    for name, state in states.items():
        kept[name].load_state_dict(state)
    assert str(kept[NAME].state_dict()) == str(states[NAME])
    train(model, optimizer, range(reached, 20))
    assert all(torch.equal(item, undisturbed[name]) for name, item in model.state_dict().items())


def test_another_model_has_none() -> None:
    assert rank_allocation(nn.Linear(2, 2)) == {}
