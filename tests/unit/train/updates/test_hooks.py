"""What a guard leaves behind in a process that goes on, and in what the script makes of its model."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rollback
from rollback.train.updates.hooks import before_update


def _trained_and_closed(run: Path) -> weakref.ref[nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, max_steps=6, snapshot_every=2, run=run)
    for (x,) in guard:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        guard.observe(loss)
        optimizer.step()
    guard.close()
    return weakref.ref(model)


def test_a_closed_guard_keeps_neither_the_model_nor_the_memory_of_its_copies(tmp_path: Path) -> None:
    model = _trained_and_closed(tmp_path / "run")
    gc.collect()
    assert model() is None
    assert "slot-" not in Path("/proc/self/maps").read_text()


def test_a_model_that_is_saved_as_a_whole_in_the_first_updates_loads_where_there_is_no_guard(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[*torch.randn(4, 2, 4)], run=tmp_path / "run")
    for x in guard:
        assert model._forward_pre_hooks, "the guard watches the script's first updates"
        torch.save(model, tmp_path / "model.pt")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    read = (
        "import sys, torch; sys.modules['rollback'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False); print(model(torch.zeros(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([1, 1])\n"


class Counter:
    """Part of a guard. Its method returns something: torch would take that for other arguments of the step."""

    def __init__(self) -> None:
        self.updates = 0

    def count(self, optimizer: torch.optim.Optimizer) -> int:
        self.updates += 1
        return self.updates


class Keeping(torch.optim.Optimizer):
    """Keeps its closure, and is copied and saved with all else that it has."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.ones(1))], {})

    def step(self, closure: Any = None) -> Any:
        self.closure = closure
        return None if closure is None else closure()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "closure": None}


def _loss() -> float:
    return 1.0


@pytest.mark.parametrize("closure", [(), (None,), (_loss,)], ids=["without", "none", "with"])
def test_an_update_is_told_once_and_of_the_hooked_optimizer_alone(closure: tuple[Any, ...]) -> None:
    optimizer, counter = Keeping(), Counter()
    before_update(optimizer, counter.count)
    for _ in range(2):
        optimizer.step(*closure)
    assert counter.updates == 2
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301 - made here
        other.step(*closure)
    assert counter.updates == 2


def test_an_optimizer_that_keeps_its_closure_keeps_no_guard() -> None:
    optimizer, counter = Keeping(), Counter()
    before_update(optimizer, counter.count)
    optimizer.step(_loss)
    assert counter.updates == 1
    gone, counter = weakref.ref(counter), Counter()
    assert gone() is None
    assert optimizer.closure() == optimizer.step(_loss) == 1.0
