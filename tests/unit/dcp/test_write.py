"""Checkpoints of runs in DCP's form: what torch.distributed.checkpoint loads from them."""

import errno
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.utils.data import DataLoader
from toy import Toy, train
from typer.testing import CliRunner
from warm_server import run_warm

import rollback
from rollback.cli import app
from rollback.dcp import write
from rollback.errors import ExitCode, OutputNotWritten, UsageError
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.export import export


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("dcp") / "run"
    train(Toy(40), run)
    return run


def command(*words: object) -> Any:
    return CliRunner().invoke(app, ["ring", "export", *map(str, words)])


def objects() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def test_dcp_loads_model_and_optimizer_by_the_names_that_it_gives_them(run: Path, tmp_path: Path) -> None:
    said = command(run, "--dcp", tmp_path / "out")
    assert said.exit_code == 0, said.output
    model, optimizer = objects()
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    export(ReadableRun.at(run), None, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    assert state["model"].keys() == weights.keys()
    assert all(torch.equal(state["model"][name], weights[name]) for name in weights)
    assert {*state["optim"]["state"]} == {name for name, _ in model.named_parameters()}
    assert all(item["step"] == 10 and item["exp_avg_sq"].any() for item in state["optim"]["state"].values())
    (group,) = state["optim"]["param_groups"]
    assert group["lr"] == pytest.approx(1e-2 * 0.998**10)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_second_optimizer_and_other_weights_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer, second = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, critic))
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(range(8)), max_steps=3, run=tmp_path / "run",
        critic=critic, critic_optimizer=second, scheduler=scheduler,
    )  # fmt: skip
    for batch in guard:
        loss = model(batch.float().expand(2)).sum()
        loss.backward()
        optimizer.step()
        guard.observe(loss)
    guard.close()
    said = command(tmp_path / "run", "--dcp", tmp_path / "out")
    assert said.exit_code == 0, said.output
    told = "one model and one optimizer: what the guard keeps as 'critic', 'critic_optimizer'\n"
    assert said.stderr.count(told) == 1, "of a scheduler nobody expects it"


class CountsItsSteps(torch.optim.SGD):
    """It keeps something that is no parameter's."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = {"count": self.state.get("calls", {"count": 0})["count"] + 1}  # type: ignore[index]
        return super().step(closure)


def trained_with(optimizer: torch.optim.Optimizer, model: nn.Module, run: Path) -> Path:
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=DataLoader(range(8)), max_steps=2, run=run)
    for batch in guard:
        loss = model(batch.float().expand(2)).sum()
        loss.backward()
        optimizer.step()
        guard.observe(loss)
    guard.close()
    return run


def test_tensors_in_tuples_are_tensors_for_dcp(tmp_path: Path) -> None:
    """It pickles a tuple: of tensors, and not of what reads a checkpoint here."""
    model = nn.Linear(2, 1)
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    optimizer = torch.optim.Adam(model.parameters(), betas=betas, foreach=False)  # type: ignore[arg-type]
    run = trained_with(optimizer, model, tmp_path / "run")
    assert command(run, "--dcp", tmp_path / "out").exit_code == 0
    state = {"optim": get_optimizer_state_dict(model, optimizer)}
    state["optim"]["param_groups"][0]["betas"] = None  # type: ignore[index]
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert state["optim"]["param_groups"][0]["betas"] == betas  # type: ignore[index]


def test_an_optimizer_with_state_that_is_no_parameter_s_is_refused_in_words(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    run = trained_with(CountsItsSteps(model.parameters(), lr=0.1), model, tmp_path / "run")
    refused = command(run, "--dcp", tmp_path / "out").exception
    assert isinstance(refused, UsageError)
    assert "keeps 'calls', which is no parameter's" in refused.message
    assert not (tmp_path / "out").exists()


def test_memory_does_not_grow_with_the_model(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a tensor that has been written is let go of before the next one is read."""
    alive: list[int] = []
    references: list[weakref.ref[np.ndarray[Any, Any]]] = []
    read = write._read

    def watched(stored: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in references))
        memory = read(stored).numpy().copy()
        references.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    monkeypatch.setattr(write, "_read", watched)
    write.export_dcp(ReadableRun.at(run), None, tmp_path / "out")
    assert len(alive) > 10
    assert max(alive) <= 1


def test_a_directory_below_a_link_is_written_and_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "scratch").symlink_to("disk")
    for more in ((), ("--force",)):
        said = command(run, "--dcp", tmp_path / "scratch" / "out", *more)
        assert said.exit_code == 0, said.exception
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]


def test_what_is_there_is_replaced_with_force_and_only_if_it_is_a_dcp_checkpoint(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert command(run, "--dcp", out).exit_code == 0, "an empty directory"
    assert "--force replaces it" in str(command(run, "--dcp", out).exception)
    assert command(run, "--dcp", out, "--force").exit_code == 0
    (out / "thesis.txt").write_text("mine")
    refused = command(run, "--dcp", out, "--force").exception
    assert isinstance(refused, UsageError)
    assert "thesis.txt" in refused.message
    assert (out / "thesis.txt").read_text() == "mine"
    for place in (run / "out", run, tmp_path / "gone" / "out", out / "thesis.txt"):
        assert isinstance(command(run, "--dcp", place, "--force").exception, UsageError)
    assert isinstance(command(run, "--dcp", tmp_path / "new", "-o", tmp_path / "x").exception, UsageError)


def test_a_place_that_may_not_be_looked_into_is_said_in_words(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", closed)
    refused = command(run, "--dcp", tmp_path).exception
    assert isinstance(refused, OutputNotWritten)
    assert refused.message.endswith("Permission denied")


@pytest.mark.parametrize("place", [1, 4, 9])
def test_a_disk_that_fails_leaves_nothing_behind(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    read = write._read
    calls = iter(range(100))

    def failing(stored: Any) -> torch.Tensor:
        if next(calls) == place:
            raise OSError(28, "No space left on device")
        return read(stored)

    monkeypatch.setattr(write, "_read", failing)
    refused = command(run, "--dcp", tmp_path / "out").exception
    assert refused.exit_code == ExitCode.IO
    assert "No space left on device" in refused.message
    assert list(tmp_path.iterdir()) == []


def test_an_error_without_words_is_told_by_its_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(stored: Any) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(write, "_read", failing)
    assert "MemoryError" in command(run, "--dcp", tmp_path / "out").exception.message


def test_what_was_there_stays_where_what_is_new_cannot_take_its_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(run, "--dcp", tmp_path / "out").exit_code == 0
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    rename = os.rename

    def failing(source: Any, target: Any, **folders: Any) -> None:
        if target == tmp_path / "out" and source.suffix == ".tmp":
            raise OSError(5, "Input/output error")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", failing)
    assert command(run, "--dcp", tmp_path / "out", "--force").exception.exit_code == ExitCode.IO
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


def test_what_a_killed_process_of_the_same_number_has_left_aside_takes_no_place(tmp_path: Path) -> None:
    """In containers the number is always the same. What it had written has its place already."""
    output, aside = tmp_path / "out", tmp_path / f".out.{os.getpid()}.old"
    for place in (output, aside):
        place.mkdir()
        (place / place.name).touch()
    with pytest.raises(OutputNotWritten, match=os.strerror(errno.ENOSPC)), write._replacing_directory(output):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/out"]


def test_a_full_disk_is_said_in_one_sentence(run: Path, tmp_path: Path) -> None:
    """A real one: no file may grow beyond some bytes."""
    code = (
        "import resource, sys, torch\nresource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))\n"
        "from rollback.cli import main\nsys.argv[0] = 'rollback'\nmain()"
    )
    words = ["ring", "export", str(run), "--dcp", str(tmp_path / "out")]
    done = run_warm([sys.executable, "-c", code, *words], capture_output=True)
    assert done.returncode == ExitCode.IO, done.stderr
    assert "Traceback" not in done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_imports_torch_for_this_alone(run: Path, tmp_path: Path) -> None:
    code = """
import sys

class Torch:
    def find_spec(name, *_):
        if name == "torch":
            sys.exit("it imports torch")

sys.meta_path.insert(0, Torch)
from rollback.cli import app
app(sys.argv[1:], standalone_mode=False)
"""
    for words, imported in ((["-o", str(tmp_path / "x")], False), (["--dcp", str(tmp_path / "y")], True)):
        command = [sys.executable, "-c", code, "ring", "export", str(run), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr == "it imports torch\n") == (int(imported), imported), done.stderr
