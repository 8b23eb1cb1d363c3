"""The guard on a CUDA device: the pulse over NCCL, snapshots from device memory, oracle A. Skipped without a GPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from toy import facts

import rollback
from rollback.facts.history import fold
from rollback.facts.training import Incident, Window
from rollback.rundir.evidence import read_evidence
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.comm.beat import Signs
from rollback.train.comm.pulse import Pulse
from rollback.train.comm.ranks import Ranks
from rollback.train.updates.gradients import Gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SETTINGS: dict[str, Any] = {"snapshot_every": 10, "rewind": 5, "skip_after": 3, "probation": 12}


@pytest.fixture
def nccl(tmp_path: Path) -> Any:
    """A process group of one rank over NCCL."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_beat_over_nccl_carries_what_was_sent_and_names_what_is_not_finite(nccl: None) -> None:
    pulse = Pulse(Ranks(), torch.device("cuda"))
    pulse.send(torch.tensor(2.5, device="cuda"), torch.tensor(math.inf, device="cuda"), Signs(stop=True))
    beat = pulse.read()
    assert (beat.loss, beat.grad_norm, beat.nonfinite_ranks, beat.stop) == (2.5, math.inf, (0,), True)
    pulse.send(torch.tensor(math.nan, device="cuda"), None, Signs())
    beat = pulse.read()
    assert beat.loss is not None
    assert math.isnan(beat.loss)
    assert beat.grad_norm is None


def test_parts_of_a_sharded_gradient_are_measured_without_a_wait_for_the_device(nccl: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, x = Gradients(optimizer, None, model), torch.randn(8, 64, device="cuda")
    for _ in range(3):
        gradients.expect(True)
        model(x).square().sum().backward()
        gradients.forget()  # so that they are measured here
        try:
            torch.cuda.set_sync_debug_mode("error")
            norms = gradients.before_step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert norms is not None
        assert norms.squares is not None
        assert math.sqrt(norms.squares.item()) == pytest.approx(norms.total.item())
        optimizer.step()
        optimizer.zero_grad()


def train(run: Path, bad: set[int], **settings: Any) -> dict[str, Tensor]:
    """60 steps with dropout on the device; the batches `bad` have NaN targets. The final state, on the CPU."""
    torch.manual_seed(0)
    torch.cuda.manual_seed(0)
    x = torch.randn(240, 8)
    y = x.sum(1, keepdim=True)
    for batch in bad:
        y[4 * batch] = math.nan
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, run=run, **{**SETTINGS, **settings})
    for inputs, targets in guard:
        loss = ((model(inputs.cuda()) - targets.cuda()) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    moments = {
        f"{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    return {name: value.cpu() for name, value in {**model.state_dict(), **moments}.items()}


def test_as_if_the_bad_batches_had_never_been_there(tmp_path: Path) -> None:
    protected = train(tmp_path / "protected", bad={41})
    history = fold(read_journal(RunPaths(tmp_path / "protected").train_journal).records)
    windows: list[Window] = history.skip_list
    assert any(41 in window for window in windows)
    fresh = train(tmp_path / "fresh", bad={41}, skip=windows)
    assert protected.keys() == fresh.keys()
    for name, value in protected.items():
        assert torch.equal(value, fresh[name]), name


def test_resuming_on_the_device_is_exact(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "undisturbed", bad=set())
    train(tmp_path / "resumed", bad=set(), max_steps=34)
    resumed = train(tmp_path / "resumed", bad=set())
    for name, value in undisturbed.items():
        assert torch.equal(value, resumed[name]), name


def test_losses_of_one_cuda_graph_are_each_what_was_observed(tmp_path: Path) -> None:
    """The model gives out its own loss, as those of transformers do, and each replay writes it to the same place."""
    torch.manual_seed(0)
    x, batches = torch.randn(4, 8, device="cuda"), 80
    scale = torch.ones(batches, 1)
    scale[61] = math.nan
    model = nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loss_of = torch.compile(lambda factor: (factor * model(x)).square().mean(), mode="reduce-overhead")
    loader = DataLoader(TensorDataset(scale), batch_size=1)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, run=tmp_path / "run", **SETTINGS)
    for number, (factor,) in enumerate(guard):
        loss = loss_of(factor.cuda())
        loss.backward()
        guard.observe(loss)
        if number % 2:  # the first one's loss is overwritten by now
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    paths = RunPaths(tmp_path / "run")
    (incident,) = facts(paths.root, Incident)
    seen = next(step for step in read_evidence(paths.evidence(incident.incident, 0)).steps if step.step == 30)
    assert [math.isnan(loss) for loss in seen.losses] == [False, True]


class Average:
    """Of a model's weights: an object that keeps what it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [item.detach().clone() for item in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for mine, its in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state["weights"]


@pytest.mark.parametrize("policy", ["balanced", "screen"])
def test_what_objects_and_groups_keep_on_the_device_goes_back_there(tmp_path: Path, policy: str) -> None:
    x = torch.randn(80, 8)
    x[41] = math.nan
    for max_steps in (30, 80):
        model = nn.Linear(8, 1).cuda()
        average = Average(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=DataLoader(TensorDataset(x)), run=tmp_path / "run",
            average=average, policy=policy, max_steps=max_steps, **SETTINGS,
        )  # fmt: skip
        for (inputs,) in guard:
            loss = model(inputs.cuda()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            guard.observe(loss)
        guard.close()
        assert all(item.is_cuda for item in average.weights)
        assert optimizer.param_groups[0]["lr"].is_cuda
    assert facts(tmp_path / "run", Incident)
