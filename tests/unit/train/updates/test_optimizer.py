"""Noticing updates: by the optimizer's hook, and by the gradient scaler's own calls where it drops one."""

from __future__ import annotations

import torch
from torch import nn

from rollback.train.updates.optimizer import Updates


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_update_is_noticed_and_forgotten() -> None:
    model, optimizer = model_and_optimizer()
    updates = Updates(optimizer, None)
    model(torch.ones(1, 2)).sum().backward()
    assert not updates.happened
    optimizer.step()
    assert updates.happened
    assert not updates.dropped_by_scaler
    updates.forget()
    assert not updates.happened


def test_what_the_scaler_drops_is_no_update() -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    updates = Updates(optimizer, scaler)
    scaler.scale(model(torch.full((1, 2), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert updates.dropped_by_scaler
    assert not updates.happened
    updates.forget()
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    assert updates.happened
    assert not updates.dropped_by_scaler


def test_another_optimizer_of_the_same_scaler_does_not_count() -> None:
    (_, optimizer), (other_model, other) = model_and_optimizer(), model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    updates = Updates(optimizer, scaler)
    scaler.scale(other_model(torch.ones(1, 2)).sum()).backward()
    scaler.step(other)
    assert not updates.happened
    assert not updates.dropped_by_scaler
