"""Noticing updates: by the optimizer's hook, and by the gradient scaler's own calls where it drops one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from rollback.train.updates import gradients
from rollback.train.updates.optimizer import Updates, applies_gradients


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_update_is_noticed_and_forgotten() -> None:
    model, optimizer = model_and_optimizer()
    updates = Updates(optimizer, None, model)
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
    updates = Updates(optimizer, scaler, model)
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
    (model, optimizer), (other_model, other) = model_and_optimizer(), model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    updates = Updates(optimizer, scaler, model)
    scaler.scale(other_model(torch.ones(1, 2)).sum()).backward()
    scaler.step(other)
    assert not updates.happened
    assert not updates.dropped_by_scaler


@pytest.mark.parametrize("by_script", [True, False])
def test_of_gradients_that_the_script_has_summed_behind_the_backward_the_norm_is_that_of_the_sum(
    by_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15: `finalize_backward`. What lies there before may be half of a sum, and torch counts no write to it."""
    model, optimizer = model_and_optimizer()
    ddp = SimpleNamespace(require_manual_backward_finalization=by_script)
    monkeypatch.setattr(gradients, "ddp_inside", lambda model: ddp)
    updates = Updates(optimizer, None, model)
    model(torch.ones(1, 2)).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)
    optimizer.step()
    assert float(updates.grad_norm or 0.0) == pytest.approx(3**0.5 * (0.5 if by_script else 1.0))


@pytest.mark.parametrize("by_name", [True, False])
def test_with_a_closure_the_norm_is_of_the_gradients_that_it_made(by_name: bool) -> None:
    model, optimizer = model_and_optimizer()
    updates = Updates(optimizer, None, model)
    for factor in (1.0, 3.0):

        def closure(factor: float = factor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.full((1, 2), factor)).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert returned is not None
        assert updates.happened
        assert updates.grad_norm is not None
        assert float(updates.grad_norm) == pytest.approx((2 * factor**2 + 1) ** 0.5)
        assert updates.gradients is not None
        assert updates.gradients.clip_factor is not None
        updates.forget()


def test_of_a_closure_that_runs_several_times_the_first_gradient_counts() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    updates, norms = Updates(optimizer, None, model), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 2)) - 2.0).square().sum()
        loss.backward()
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
        return loss

    optimizer.step(closure)
    assert len(norms) > 1
    assert float(updates.grad_norm or 0.0) == pytest.approx(norms[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_update_by_which_torch_lets_an_optimizer_make_its_state_applies_nothing(kind: Any) -> None:
    """Its distributed checkpoints do so, before they load or save one that has none."""
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), 0.1)
    told: list[bool] = []
    optimizer.register_step_pre_hook(lambda optimizer, *_: told.append(applies_gradients(optimizer)))
    get_optimizer_state_dict(model, optimizer)
    assert told == [False]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert told == [False, True]
