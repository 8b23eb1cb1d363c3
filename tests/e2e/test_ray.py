"""The guard under the real Ray Train, by the recipe in launch/ray. It is skipped where Ray is not installed."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from job_results import Scenarios
from toy import Toy, facts, require_same

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Restored

JOB = Path(__file__).parent / "jobs" / "under_ray.py"
RECIPE = Path(__file__).parents[2] / "launch" / "ray"
SUPPORT = Path(__file__).parents[1] / "support"
LIMIT = 1200.0
TOY = Toy(samples=800, sampler="distributed", nan=(25,), nan_rank=1, settings={"checkpoint_every": "10"})


pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed, which brings 0.6 GB"),
]


def train_under_ray(toy: Toy, folder: Path) -> tuple[int, str]:
    """The exit code of the recipe, and what was printed."""
    (folder / "toy.json").write_text(toy.to_json())
    path = os.pathsep.join([str(RECIPE), str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with tempfile.TemporaryDirectory(prefix="ray-") as short, open(folder / "output", "w") as output:
        done = subprocess.run(  # Ray's sockets need a short path
            [sys.executable, str(JOB), str(folder), short], stdout=output, stderr=output, timeout=LIMIT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                 "RAY_raylet_start_wait_time_s": "600",
                 "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "RAY_AUTH_MODE": "disabled"},
            check=False,
        )  # fmt: skip
    return done.returncode, (folder / "output").read_text()


def test_a_worker_that_is_killed_and_a_nan_cost_nothing_under_ray(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path)
    code, told = train_under_ray(TOY, tmp_path)
    assert code == 0, told[-6000:]
    assert (tmp_path / "killed").exists()
    first, second = facts(scenarios.run("job"), Attached)
    assert first.checkpoint is None
    assert second.step > 0, told[-6000:]
    assert [fact.route for fact in facts(scenarios.run("job"), Restored)] == ["in_process"]
    undisturbed = Scenarios(tmp_path / "undisturbed")
    undisturbed.folder.mkdir()
    undisturbed.add("fresh", TOY, skips_of=str(scenarios.run("job")))
    undisturbed.torchrun(2)
    for rank in range(2):
        require_same(scenarios.portrait("job", rank), undisturbed.portrait("fresh", rank), f"rank {rank}")


def test_what_a_guard_refuses_ray_does_not_try_again(tmp_path: Path) -> None:
    code, told = train_under_ray(TOY.but(settings={"policy": "none such"}), tmp_path)
    assert code == ExitCode.USAGE, told[-6000:]
    assert "rollback: error: setting policy: " in told, told[-6000:]
    assert told.count("Attempting to start training worker group") == 1, told[-6000:]
