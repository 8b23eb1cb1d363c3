"""What a guard is told of what a script calls backward() on."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rollback.trainers.adopt.script_losses import ScriptLosses


class Told(ScriptLosses):
    """And what was told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[float] = []

    def of(self, value: Any, original: Callable[..., Any] = lambda tensors: None) -> list[float]:
        self.backward(original, lambda loss: self.told.append(float(loss)), value)
        return self.told


def test_each_loss_is_told_once() -> None:
    losses = Told()
    losses.of(torch.tensor(1.0))
    assert losses.of(torch.tensor(2.0)) == [1.0, 2.0]


def test_what_is_no_number_is_no_loss() -> None:
    losses = Told()
    losses.of(torch.ones(2))
    assert losses.of([torch.tensor(1.0)]) == []


def test_a_backward_inside_a_backward_is_no_loss() -> None:
    losses = Told()
    assert losses.of(torch.tensor(1.0), lambda tensors: losses.of(torch.tensor(2.0))) == [1.0]


def test_a_loss_that_raises_is_none() -> None:
    losses = Told()

    def fails(_: Tensor) -> None:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        losses.of(torch.tensor(1.0), fails)
    assert losses.of(torch.tensor(2.0)) == [2.0]


def test_of_what_is_made_of_scaled_losses_the_loss_is_told() -> None:
    """Not 65536 times that, with a jump at each change of the scale."""
    losses = Told()

    def scale(value: Any) -> Any:
        return losses.scale(by_1024, None, value)

    losses.of(scale(torch.tensor(3.0)) + scale(torch.tensor(4.0)))
    losses.of(scale(torch.tensor(6.0)) / 2)
    first, second = scale(torch.tensor(1.0)), scale(torch.tensor(2.0))
    losses.of(second)
    losses.of(first)
    for part in scale([torch.tensor(8.0), torch.tensor(9.0)]):
        losses.of(part)
    losses.of(torch.tensor(5.0))
    assert losses.told == [7.0, 3.0, 2.0, 1.0, 8.0, 9.0, 5.0]


def by_1024(scaler: Any, outputs: Any) -> Any:
    return [item * 1024 for item in outputs] if isinstance(outputs, list) else outputs * 1024


def test_of_a_scaled_loss_the_loss_is_told() -> None:
    losses = Told()
    scaled = losses.scale(lambda scaler, outputs: outputs * 1024, None, torch.tensor(3.0))
    losses.of(scaled)
    assert losses.of(torch.tensor(4.0)) == [3.0, 4.0]


def test_of_losses_that_are_scaled_and_never_told_none_stays() -> None:
    """As under the Trainer of a library, whose own guard is told of them."""
    losses, gone = ScriptLosses(), list[weakref.ref[Tensor]]()
    for _ in range(5):
        loss = torch.tensor(3.0)
        scaled = losses.scale(by_1024, None, loss)
        gone.append(weakref.ref(losses._scaled[-1].loss))
        del loss, scaled
    assert [reference() for reference in gone[:-1]] == [None] * 4
