"""What a real run leaves in its ring is proved, and its weights load elsewhere."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from toy import Toy, train
from typer.testing import CliRunner

from rollback.audit.verify import verify
from rollback.cli import app
from rollback.errors import ExitCode
from rollback.rundir import ring
from rollback.rundir.paths import RunPaths


def test_the_weights_of_a_checkpoint_load_into_the_module_and_are_those_of_that_step(tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "model.safetensors"
    seen: dict[str, torch.Tensor] = {}

    def hook(guard: object, position: int) -> None:
        if position == 30:
            seen.update({name: value.clone() for name, value in guard._state.model.state_dict().items()})  # type: ignore[attr-defined]

    train(Toy(samples=200), run, hook=hook)
    (name,) = [name for name in ring.names(RunPaths(run)) if name.endswith("-s00000030")]
    done = CliRunner().invoke(app, ["ring", "export", str(run), name, "-o", str(output)])
    assert done.exit_code == 0, done.output
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    module.load_state_dict(load_file(output), strict=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, seen[key]), key


def test_everything_that_a_run_commits_is_proved_intact(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for job in (Toy(samples=200, scaler=True, overflow=(20,)), Toy(samples=200, loader="stateful")):
        path = run / job.loader
        train(job, path)
        found = verify(path)
        assert found.exit_code == ExitCode.DONE, found
        assert found.intact == len(ring.names(RunPaths(path))) > 2
