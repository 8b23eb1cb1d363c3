"""Weights that a script moves within its step, by writes that torch does not count, are noticed in any job."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding import fully_sharded, one_rank
from torch import Tensor, nn

import rollback
from rollback.train.sharded import local_of
from rollback.train.snapshots.unseen_writes import FIRST_STEPS


class ByData(torch.optim.SGD):
    """Some optimizers update like this, and may."""

    def step(self, closure: Any = None) -> None:
        for item in self.param_groups[0]["params"]:
            item.data.sub_(0.1 * item.grad)


def adversarial(model: nn.Module, backward: Callable[[], Tensor]) -> Tensor:
    """A second backward where the weights of the first layer are others."""
    backward()
    item = local_of(next(model.parameters())).data
    before = item.clone()
    item.mul_(1.01)
    loss = backward()
    item.copy_(before)
    return loss


def mode_behind(
    folder: Path,
    body: Callable[[nn.Module, Callable[[], Tensor]], Tensor],
    *,
    sharded: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    from_step: int = 0,
) -> str:
    """The mode of the copies behind a script's first steps, without last snapshots. from_step: where `body` begins."""
    with one_rank() if sharded else contextlib.nullcontext():
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if sharded:
            fully_sharded(model)
        trained = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
        loader: Iterable[Tensor] = [torch.randn(4, 4) for _ in range(FIRST_STEPS + 4)]
        guard = rollback.Guard(model=model, optimizer=trained, loader=loader, run=folder, last_snapshot="off")
        guard._loop.checkpoints.snapshots.mode = "overlapped"
        for batch in guard:

            def backward(batch: Tensor = batch) -> Tensor:
                loss: Tensor = model(batch).square().mean()
                loss.backward()
                return loss

            guard.observe(body(model, backward) if guard.step >= from_step else backward())
            trained.step()
            trained.zero_grad()
        guard.close()
        return guard._loop.checkpoints.snapshots.mode


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_such_a_script_has_no_copies_beside_its_training_also_without_last_snapshots(
    tmp_path: Path, sharded: bool
) -> None:
    assert mode_behind(tmp_path / "run", adversarial, sharded=sharded) == "held"


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
def test_a_script_that_leaves_its_weights_alone_is_copied_beside_its_training(tmp_path: Path, sharded: bool) -> None:
    assert mode_behind(tmp_path / "run", lambda model, backward: backward(), sharded=sharded) == "overlapped"


def test_an_optimizer_that_writes_so_in_its_step_is_none_of_it(tmp_path: Path) -> None:
    assert mode_behind(tmp_path / "run", lambda model, backward: backward(), optimizer=ByData) == "overlapped"


def test_behind_the_first_steps_it_is_looked_for_no_more(tmp_path: Path) -> None:
    assert mode_behind(tmp_path / "run", adversarial, from_step=FIRST_STEPS) == "overlapped"
