"""Gradients that an earlier step has left are looked for in the first updates."""

import pytest
import torch
from torch import nn

from rollback.train.advice.carried_gradients import CarriedGradients


@pytest.mark.parametrize("carries", [True, False])
def test_nothing_is_looked_at_once_enough_updates_have_been(carries: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer, hooked = torch.optim.SGD(model.parameters(), lr=0.1), []
    carried = CarriedGradients(optimizer, model.bias)
    optimizer.register_step_pre_hook(lambda *_: None)  # torch goes on to this one
    for _ in range(20):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if not carries:
            optimizer.zero_grad()
        carried.end_step()
        hooked.append(len(optimizer._optimizer_step_pre_hooks))
    assert carried.updates == 16 * carries, "each behind a step's end used what was there"
    assert hooked == [2] * 16 + [1] * 4


def test_what_is_used_without_another_backward_is_carried_and_what_has_been_set_to_zero_is_not() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    carried = CarriedGradients(optimizer, model.bias)
    model(torch.ones(1, 2)).sum().backward()
    carried.end_step()
    optimizer.step()
    assert carried.updates == 1
    optimizer.zero_grad(set_to_none=False)
    carried.end_step()
    optimizer.step()
    assert carried.updates == 1


def test_of_several_updates_in_a_step_the_first_one_counts() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    carried = CarriedGradients(optimizer, model.bias)
    for _ in range(5):
        for _ in range(5):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        carried.end_step()
    assert carried.updates == 4
