"""A script that loads a snapshot of its own beside the run's checkpoints is told so, and one that does not is not."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from toy import facts

import rollback
from rollback.facts.training import Advice, Attached

EPOCHS, BATCHES = 4, 6


def layers() -> tuple[nn.Module, ...]:
    return nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)


@dataclass
class Script:
    """One training script, as each start of it would run. `snapshot` is its own file, where it has one."""

    folder: Path
    optimizer: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=1e-3)
    loads: tuple[str, ...] = ()
    """What it loads from its snapshot, of `model`, `optimizer`, `epoch`."""
    own_loop: bool = True
    first_epoch: int = 0
    sets_epoch: bool = True
    behind: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda *_: None
    """What it does between the guard and its loop."""
    wrap: Callable[[nn.Module], Any] = lambda model: model
    kept: dict[str, Any] = field(default_factory=dict)
    trained: list[torch.Tensor] = field(default_factory=list)

    def start(self, leave_in: int | None = None, run: str = "run") -> list[str]:
        """Train to the end, or until the middle of an epoch: the codes of advice that the run has got so far."""
        torch.manual_seed(0)
        model: Any = nn.Sequential(*layers())
        model = self.wrap(model)
        optimizer = self.optimizer(model.parameters())
        data = TensorDataset(torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(1)))
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        begin = 0
        for name, part in (("model", model), ("optimizer", optimizer)):
            if name in self.loads and name in self.kept:
                part.load_state_dict(self.kept[name])
        if "epoch" in self.loads:
            begin = self.kept.get("epoch", 0)
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=DataLoader(data, 4, sampler=sampler), run=self.folder / run,
            snapshot_every=2, probation=8, observe_only=True,
        )  # fmt: skip
        self.behind(model, optimizer)
        epochs = range(begin, EPOCHS) if self.own_loop else guard.epochs(EPOCHS)
        for epoch in epochs:
            if self.sets_epoch:
                sampler.set_epoch(epoch + self.first_epoch)
            for number, (x,) in enumerate(guard):
                guard._loop.checkpoints.snapshots.wait()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                guard.observe(loss)
                if epoch == leave_in and number == 4:
                    break
            if epoch == leave_in:
                break
            self.kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        guard.close()
        self.trained = [item.clone() for item in model.state_dict().values()]
        codes = ("own-snapshot", "written-behind-guard")
        return [fact.code for fact in facts(self.folder / run, Advice) if fact.code in codes]

    def text(self, run: str = "run") -> str:
        (text,) = (fact.text for fact in facts(self.folder / run, Advice) if fact.code == "own-snapshot")
        return str(text)


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-3)


@pytest.mark.parametrize("loads", [("model", "epoch"), ("model",), ("optimizer",)])
def test_a_resumed_script_that_loads_its_own_snapshot_is_told_so_once(tmp_path: Path, loads: tuple[str, ...]) -> None:
    script = Script(tmp_path, adam, loads)
    assert script.start(leave_in=2) == [], "there was no snapshot yet"
    assert script.start(leave_in=3) == ["own-snapshot"]
    assert "step" in script.text()
    assert script.start() == ["own-snapshot"]


def test_a_script_that_only_skips_the_epochs_of_its_own_snapshot_is_told_so(tmp_path: Path) -> None:
    script = Script(tmp_path, loads=("epoch",))
    assert script.start(leave_in=3) == []
    script.kept["epoch"] = 2
    assert script.start(run="anew") == ["own-snapshot"]
    assert "begins with epoch 2 by its own count" in script.text("anew")
    assert "guard.epochs(" in script.text("anew")


def test_a_new_run_that_begins_with_a_used_optimizer_is_told_what_that_means(tmp_path: Path) -> None:
    script = Script(tmp_path, adam, ("model", "optimizer"))
    script.start(run="before")
    assert script.start(run="new") == ["own-snapshot"]
    assert "first start only" in script.text("new")


@pytest.mark.parametrize("optimizer", [
    adam, torch.optim.Adagrad, lambda parameters: torch.optim.SGD(parameters, 1e-3, 0.9),
])  # fmt: skip
@pytest.mark.parametrize("own_loop", [True, False])
def test_a_script_that_leaves_it_to_the_guard_is_told_nothing(tmp_path: Path, optimizer: Any, own_loop: bool) -> None:
    script = Script(tmp_path, optimizer, own_loop=own_loop)
    for leave_in in (1, 2, None):
        assert script.start(leave_in) == []


def test_a_model_that_is_wrapped_otherwise_than_at_the_first_start_is_no_sign_of_a_snapshot(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        script = Script(tmp_path)
        plain = script.wrap
        for leave_in, wrap in enumerate((fully_shard, plain, DistributedDataParallel, fully_shard)):
            script.wrap = wrap
            assert script.start(leave_in) == []
        script.wrap, script.loads, script.kept["model"] = plain, ("model",), nn.Sequential(*layers()).state_dict()
        assert script.start() == ["own-snapshot"], "the first start with such a model is the measure"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("first_epoch", "sets_epoch"), [(1, True), (0, False)])
def test_a_count_from_1_and_a_sampler_that_is_told_nothing_are_innocent(
    tmp_path: Path, first_epoch: int, sets_epoch: bool
) -> None:
    script = Script(tmp_path, first_epoch=first_epoch, sets_epoch=sets_epoch)
    assert script.start(leave_in=3) == []
    assert script.start() == []
    assert len(facts(tmp_path / "run", Attached)) == 2


def initialize(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.1, generator=torch.Generator().manual_seed(2))


def forget_moments(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:  # as of a snapshot of the run's first step
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


def warm_up(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 4))  # in training mode, so that BatchNorm's averages move


@pytest.mark.parametrize("behind", [initialize, forget_moments, warm_up])
def test_what_a_script_writes_behind_its_guard_does_not_stand_in_the_checkpoints_place(
    tmp_path: Path, behind: Any
) -> None:
    undisturbed = Script(tmp_path / "undisturbed", adam, behind=behind, own_loop=False)
    assert undisturbed.start() == [], "the first start has nothing to put back"
    script = Script(tmp_path, adam, behind=behind, own_loop=False)
    assert script.start(leave_in=2) == []
    assert script.start() == ["written-behind-guard"]
    assert all(map(torch.equal, script.trained, undisturbed.trained))
