"""What the guard refuses, with what message, and that it leaves everything as it was."""

import os
import re
import signal
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharding import one_rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader
from toy import Toy, files, train
from warm_server import run_warm

import rollback
from rollback.errors import (
    JournalDamaged,
    RollbackError,
    RunDirectoryError,
    RunDoesNotFit,
    UsageError,
)
from rollback.rundir.seal import ENV_SEAL
from rollback.train.step import scalar

TOY = Toy(samples=120)


def make(run: Path, **changes: Any) -> rollback.Guard:
    """A guard over the smallest job, with changes."""
    model = changes.pop("model", None) or nn.Linear(8, 1)
    parts = {
        "model": model,
        "optimizer": changes.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(range(20), batch_size=2),
        "run": run,
    }
    return rollback.Guard(**{**parts, **changes})


class Keeps:
    """Something that can be handed over, with a state of our choice."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"deep": {"inside": self.state}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["deep"]["inside"]


def refused(kind: type[RollbackError], run: Path, text: str, **changes: Any) -> RollbackError:
    before = files(run) if run.exists() else None
    with pytest.raises(kind) as caught:
        make(run, **changes)
    message = str(caught.value)
    assert text in message
    assert caught.value.hint
    assert (files(run) if run.exists() else None) == before, "the run directory was touched"
    return caught.value


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"probation": 5}, "probation=5"),
        ({"snapshot_every": 0}, "setting snapshot_every: 0 leaves"),
        ({"keep": 2}, "keep"),
        ({"rewind": -1}, "rewind"),
        ({"policy": "plam"}, "policy"),
        ({"skip": [{"first": 5, "last": 3}]}, "ends (3) before it begins (5)"),
        ({"patience": 5}, "patience"),
        ({"ema": object()}, "as ema= is"),
        ({"loader": 7}, "int"),
        ({"ema": Keeps({1, 2})}, "shared/objects/ema/deep/inside"),
        ({"ema": Keeps([print])}, "shared/objects/ema/deep/inside/0"),
        ({"ema": Keeps(torch.zeros(2).to_sparse())}, "shared/objects/ema/deep/inside"),
    ],
    ids=lambda value: re.sub(r" object at 0x\w+", "", str(value))[:40].replace("/", "-"),
)
def test_a_wrong_call_makes_no_run_directory(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    error = refused(UsageError, tmp_path / "run", text, **changes)
    assert error.exit_code == 2


def test_a_loss_that_is_not_one_number(tmp_path: Path) -> None:
    guard = make(tmp_path / "run")
    with pytest.raises(UsageError, match=r"shape \[3\]"):
        guard.observe(torch.zeros(3))
    guard.close()


def wider() -> nn.Module:
    return nn.Linear(9, 1)


def doubled() -> nn.Module:
    return nn.Linear(8, 1).double()


def renamed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": wider()}, "'weight' is float32[1, 8] in the run, float32[1, 9] in this job"),
        ({"model": doubled()}, "'weight' is float32[1, 8] in the run, float64[1, 8] in this job"),
        ({"model": renamed()}, "the run has no '0.weight'"),
        ({"loader": DataLoader(range(21), batch_size=2)}, "data, length: the run has 20, this job 21"),
        ({"loader": DataLoader(range(19), batch_size=2)}, "data, length: the run has 20, this job 19"),
        ({"loader": DataLoader(range(20), batch_size=4)}, "data, batch size: the run has 2, this job 4"),
        ({"loader": DataLoader(range(20), batch_size=2, shuffle=True)}, "sampler: the run has 'SequentialSampler'"),
        ({"ema": Keeps(1)}, "objects: the run has [], this job ['ema']"),
    ],
    ids=lambda value: re.sub(r" object at 0x\w+", "", str(value))[:50].replace("/", "-"),
)
def test_another_job_is_refused_with_the_difference(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    make(tmp_path / "run").close()
    error = refused(RunDoesNotFit, tmp_path / "run", text, **changes)
    assert error.exit_code == 78


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    model = nn.Linear(8, 1)
    adam = torch.optim.Adam(model.parameters())
    refused(RunDoesNotFit, tmp_path / "run", "the run has 'SGD', this job 'Adam'", model=model, optimizer=adam)


def test_another_world_size_is_refused(tmp_path: Path) -> None:
    """A run of two ranks, as far as its record says, and one process that would go on with it."""
    make(tmp_path / "run").close()
    identity = tmp_path / "run" / "run.json"
    identity.write_text(identity.read_text().replace('"world_size": 1', '"world_size": 2'))
    refused(RunDoesNotFit, tmp_path / "run", "world size: the run has 2 ranks, this job 1")


def test_ranks_that_were_not_initialised_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(UsageError, tmp_path / "run", "init_process_group")


class Feedback(Keeps):
    """A hook's state of the user's own: what compression has left out, for the next step."""


@pytest.mark.parametrize("inside", [False, True], ids=["DDP in the model", "the module inside of DDP"])
@pytest.mark.parametrize("kind", [PowerSGDState, PostLocalSGDState, Feedback])
def test_a_communication_hook_that_remembers_is_refused(tmp_path: Path, kind: type[Any], inside: bool) -> None:
    states = {
        PowerSGDState: lambda: PowerSGDState(None),
        PostLocalSGDState: lambda: PostLocalSGDState(None, None, start_localSGD_iter=10),
        Feedback: lambda: Feedback(1.0),
    }
    with one_rank():
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        model.register_comm_hook(states[kind](), allreduce_hook)
        given = model.module if inside else nn.Sequential(model)
        error = refused(UsageError, tmp_path / "run", kind.__name__, model=given)
    assert "allreduce_hook" in str(error)
    assert error.exit_code == 2


def test_a_communication_hook_that_is_registered_behind_the_guard_is_looked_at_when_its_loop_begins(
    tmp_path: Path,
) -> None:
    with one_rank():
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        guard = make(tmp_path / "run", model=model)
        model.register_comm_hook(PowerSGDState(None), allreduce_hook)
        with pytest.raises(UsageError, match="whose PowerSGDState remembers"):
            next(iter(guard))
        guard.close()
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize("state", ["none", "a group", "constants", "handed over"])
def test_a_communication_hook_that_remembers_nothing_else_is_taken(tmp_path: Path, state: str) -> None:
    with one_rank():
        given = Feedback(1.0)
        states = {"none": None, "a group": dist.group.WORLD, "constants": (torch.float16, 0.5), "handed over": given}
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
        model.register_comm_hook(states[state], allreduce_hook)
        make(tmp_path / "run", model=model, **({"feedback": given} if state == "handed over" else {})).close()


@pytest.mark.parametrize("name", ["optimizer", "other_optimizer"])
def test_an_optimizer_of_which_each_rank_has_a_part_is_refused(tmp_path: Path, name: str) -> None:
    model = nn.Linear(8, 1)
    with one_rank():
        parted = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        error = refused(UsageError, tmp_path / "run", f"as {name}= is", **{"model": model, name: parted})
    assert "fully_shard" in (error.hint or "")
    assert "its .optim has those of one rank" in (error.hint or ""), "so it is not to be handed over instead"


def test_parameters_that_are_exchanged_behind_the_guard_are_refused_when_its_loop_begins(tmp_path: Path) -> None:
    """As by fully_shard, which leaves an optimizer that was made before it with the old ones."""
    model = nn.Linear(8, 1)
    guard = make(tmp_path / "run", model=model)
    model.weight, model.bias = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match="none of the 2 parameters that the optimizer trains is the model's"):
        next(iter(guard))
    guard.close()
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_run_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(RunDirectoryError):
        make(tmp_path / "run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_damaged_identity_and_a_damaged_journal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(TOY, run)
    journal, identity = run / "journal" / "train.jsonl", run / "run.json"
    sound = journal.read_text()
    journal.write_text(sound.replace("committed", "comitted", 1))
    before = files(run)
    line = 1 + next(place for place, text in enumerate(sound.splitlines()) if "committed" in text)
    with pytest.raises(JournalDamaged, match=f"line {line}"):
        train(TOY, run)
    assert files(run) == before
    journal.write_text(sound)
    identity.write_text(identity.read_text()[:-20])
    before = files(run)
    with pytest.raises(RunDirectoryError, match="damaged"):
        train(TOY, run)
    assert files(run) == before


def test_checkpoints_without_an_identity(tmp_path: Path) -> None:
    train(TOY, tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    before = files(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"no run\.json"):
        train(TOY, tmp_path / "run")
    assert files(tmp_path / "run") == before


def test_a_refused_guard_leaves_model_signals_and_lock_alone(tmp_path: Path) -> None:
    """After a refusal a script may go on without a guard, or with another run directory."""
    handler = signal.getsignal(signal.SIGTERM)
    make(tmp_path / "run").close()
    model = wider()
    before = [parameter.clone() for parameter in model.parameters()]
    refused(RunDoesNotFit, tmp_path / "run", "weight", model=model)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert signal.getsignal(signal.SIGTERM) == handler
    make(tmp_path / "other", model=model).close()


def test_a_closed_guard_gives_sigterm_back(tmp_path: Path) -> None:
    """Behind the training, a script that is told to end must end."""
    handler = signal.getsignal(signal.SIGTERM)
    guard = make(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) != handler
    guard.close()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o500)
    with pytest.raises(RunDirectoryError, match="lock"):
        make(tmp_path / "run")


class Unhooked(torch.optim.Optimizer):
    """A wrapper that is an Optimizer by class alone, as Accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Prepared:
    """A loader of Accelerate's, as far as it can be told from outside."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Any:
        return iter(self.base_dataloader)

    def state_dict(self) -> dict[str, Any]:
        return self.dl_state_dict  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


Prepared.__module__ = "accelerate.data_loader"
ONE = nn.Linear(8, 1)
OTHER = nn.Linear(8, 1)
SGD = torch.optim.SGD(ONE.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changes", "text", "hint"),
    [
        ({"model": len, "optimizer": SGD}, "as model= is a builtin_function_or_method", "nn.Module"),
        ({"model": [ONE], "optimizer": SGD}, "as model= is a list", "nn.ModuleDict"),
        ({"model": ONE, "optimizer": 0.1}, "as optimizer= is a float", "torch.optim"),
        ({"model": ONE, "optimizer": [SGD]}, "as optimizer= is a list", "names of their own"),
        ({"model": ONE, "optimizer": Unhooked(SGD)}, "Unhooked", "optimizer.optimizer"),
        ({"loader": None}, "NoneType", "accepted are"),
        ({"skip_samples": [{"samples": [3, 4000]}]}, "samples, and no sample 4000", "--skip A:B"),
        ({"skip_samples": [{"samples": [3]}], "loader": repeat(torch.ones(2, 8))}, "no data set indices", "--skip A:B"),
        ({"loader": Prepared(DataLoader(range(8)))}, "accelerate.data_loader.Prepared", "DistributedSampler"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "as scheduler= is the class StepLR", "an instance"),
        ({"max_steps": "5"}, "max_steps='5'", "whole number"),
        ({"max_steps": -1}, "max_steps=-1", "whole number"),
        ({"max_steps": 2.5}, "max_steps=2.5", "whole number"),
        ({"model": nn.Linear(8, 1, device="meta")}, "meta", "to_empty"),
        (
            {"model": nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 1, device="meta"))},
            "shared/model/1.weight",
            "to_empty",
        ),
        ({"model": nn.LazyLinear(1)}, "shared/model/weight", "one batch through the model"),
        (
            {"model": ONE, "optimizer": torch.optim.SGD(OTHER.parameters())},
            "none of the 2 parameters",
            "this very model",
        ),
        (
            {"model": ONE, "optimizer": torch.optim.SGD([*ONE.parameters(), *OTHER.parameters()])},
            "2 of the 4 parameters",
            "criterion=criterion",
        ),
    ],
    ids=lambda value: re.sub(r" object at 0x\w+", "", str(value))[:40].replace("/", "-"),
)
def test_what_makes_no_sense_is_refused_in_words(tmp_path: Path, changes: dict[str, Any], text: str, hint: str) -> None:
    error = refused(UsageError, tmp_path / "run", text, **changes)
    assert hint in (error.hint or "")


def test_a_key_that_cannot_be_read_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_SEAL, str(tmp_path / "none"))
    run = tmp_path / "run"
    with pytest.raises(UsageError, match="reading the key of the seal"):
        make(run)
    assert not (run / "ranks").exists()


def test_a_run_directory_that_is_no_path() -> None:
    with pytest.raises(UsageError, match="run=5"):
        make(5)  # type: ignore[arg-type]


class Weighing:
    """A learnable weighting of losses that is no module."""

    def __init__(self) -> None:
        self.weights = nn.Parameter(torch.zeros(2))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.weights.data.copy_(state_dict["weights"])


@pytest.mark.parametrize("criterion", [nn.Linear(8, 1), Weighing()], ids=["module", "stateful"])
def test_parameters_of_an_object_that_is_handed_over_are_kept_and_so_may_be_trained(
    tmp_path: Path, criterion: Any
) -> None:
    model = nn.Linear(8, 1)
    more = [criterion.weights] if isinstance(criterion, Weighing) else criterion.parameters()
    optimizer = torch.optim.SGD([*model.parameters(), *more])
    make(tmp_path / "run", model=model, optimizer=optimizer, criterion=criterion).close()


@pytest.mark.parametrize("loss", [None, {"loss": 1.0}, "low", (1.0, 2.0), torch.tensor(1 + 2j)], ids=str)
def test_a_loss_that_is_no_number(tmp_path: Path, loss: Any) -> None:
    guard = make(tmp_path / "run")
    with pytest.raises(UsageError, match=r"guard\.observe got a loss") as caught:
        guard.observe(loss)
    assert caught.value.hint
    guard.close()


@pytest.mark.parametrize("count", [-1, 2.5, "3", None])
def test_a_number_of_epochs_that_is_none(tmp_path: Path, count: Any) -> None:
    guard = make(tmp_path / "run")
    with pytest.raises(UsageError, match="epochs"):
        guard.epochs(count)
    guard.close()


def test_no_epochs_are_a_number_of_epochs(tmp_path: Path) -> None:
    guard = make(tmp_path / "run")
    assert list(guard.epochs(0)) == []
    guard.close()


def test_what_is_sharded_otherwise_than_into_parts_is_refused_on_all_ranks_at_once(tmp_path: Path) -> None:
    """Its state_dict() exchanges tensors: whoever asked for it before looking would wait for ranks that do not."""
    job = Path(__file__).parent / "jobs" / "sharded.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(job)]
    done = run_warm(command, cwd=tmp_path, timeout=180, stdout=subprocess.PIPE, check=True)
    told = {line for line in done.stdout.splitlines() if line.startswith("rank ")}
    models = {
        "first": "the model is sharded by FSDP1 (its module '1'), whose flat parameters the guard does not keep",
        "engine": "the model is an engine of DeepSpeed (its module '1'), which keeps its parameters and optimizer to "
        "itself",
        "summands": "the tensor 'shared/model/1.weight' is a DTensor whose parts are summands ((Partial(sum),)), not "
        "parts of it",
        "buffer": "the tensor 'local/buffers/1.level' is a DTensor, and each rank keeps its own: parts of it would be "
        "lost",
        "stages": "model, optimizer and named objects count as the same on all ranks, and they are not: the parameter "
        "'of_0.bias' is not there on rank 1, and F32[2] on rank 0",
    }
    assert told == {f"rank {rank}, {name}: {message}" for rank in (0, 1) for name, message in models.items()}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["stages"], "ranks are compared behind the record"


def test_a_loss_that_is_a_number_is_seen_as_it_is_whatever_the_script_s_default_type() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert scalar(70000.0, "loss") == 70000.0
    finally:
        torch.set_default_dtype(before)


@pytest.mark.soak
def test_a_script_that_its_own_workers_run_again_is_refused_by_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "unprotected.py"
    script.write_text(
        "import torch\n"
        "import rollback\n"
        "workers = {'num_workers': 1, 'multiprocessing_context': 'spawn'}\n"
        "loader = torch.utils.data.DataLoader(torch.randn(8, 2), **workers)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"next(iter(rollback.Guard(model=model, optimizer=optimizer, loader=loader, run={str(tmp_path / 'run')!r})))\n"
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "UsageError: the script trains where it is imported" in done.stderr
    assert "__main__" in done.stderr
