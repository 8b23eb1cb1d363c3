"""What a guard is told of what a script calls backward() on."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rollback.trainers.adopt.losses import UntoldLosses


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple[float, float | None]] = []

    def observe(self, loss: Tensor, *, grad_norm: Tensor | None = None) -> None:
        self.told.append((float(loss), None if grad_norm is None else float(grad_norm)))


def backward(losses: UntoldLosses, value: Any) -> None:
    losses.backward(lambda tensors: None, value)


def told(losses: UntoldLosses, grad_norm: Tensor | None = None) -> list[tuple[float, float | None]]:
    listener = Listener()
    losses.tell(listener, grad_norm)  # type: ignore[arg-type]
    return listener.told


def test_each_loss_is_told_once_and_the_norm_with_the_last_one() -> None:
    losses = UntoldLosses()
    for value in (1.0, 2.0):
        backward(losses, torch.tensor(value))
    assert told(losses, torch.tensor(5.0)) == [(1.0, None), (2.0, 5.0)]
    assert told(losses) == []


def test_what_is_no_number_is_no_loss() -> None:
    losses = UntoldLosses()
    backward(losses, torch.ones(2))
    backward(losses, [torch.tensor(1.0)])
    assert told(losses) == []


def test_a_backward_inside_a_backward_is_no_loss() -> None:
    losses = UntoldLosses()
    losses.backward(lambda tensors: backward(losses, torch.tensor(2.0)), torch.tensor(1.0))
    assert told(losses) == [(1.0, None)]


def test_a_loss_that_raises_is_none() -> None:
    losses = UntoldLosses()

    def fails(_: Tensor) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        losses.backward(fails, torch.tensor(1.0))
    backward(losses, torch.tensor(2.0))
    assert told(losses) == [(2.0, None)]


def test_of_a_scaled_loss_the_loss_is_told() -> None:
    losses = UntoldLosses()
    scaled = losses.scale(lambda scaler, outputs: outputs * 1024, None, torch.tensor(3.0))
    backward(losses, scaled)
    backward(losses, torch.tensor(4.0))
    assert told(losses) == [(3.0, None), (4.0, None)]


@pytest.mark.parametrize(("clipped", "kind", "is_it"), [("all", 2, True), ("all", 1, False), ("one", 2, False)])
def test_a_norm_counts_where_it_is_that_of_all_gradients(clipped: str, kind: float, is_it: bool) -> None:
    losses, model = UntoldLosses(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    given: list[Tensor] = list(model.parameters()) if clipped == "all" else [model.weight]
    assert not losses.is_norm_of_all(optimizer, given, kind), "nothing is to be told"
    backward(losses, torch.tensor(1.0))
    assert losses.is_norm_of_all(optimizer, given, kind) is is_it
    model.bias.grad = None
    assert losses.is_norm_of_all(optimizer, [model.weight], 2)
