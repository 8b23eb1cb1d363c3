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

from rollback.facts.training import Attached, Restored

JOB = Path(__file__).parent / "jobs" / "under_ray.py"
RECIPE = Path(__file__).parents[2] / "launch" / "ray"
SUPPORT = Path(__file__).parents[1] / "support"
LIMIT = 1200.0
TOY = Toy(samples=800, sampler="distributed", nan=(25,), nan_rank=1, settings={"checkpoint_every": "10"})


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed, which brings 0.6 GB")
def test_a_worker_that_is_killed_and_a_nan_cost_nothing_under_ray(tmp_path: Path) -> None:
    scenarios = Scenarios(tmp_path)
    (tmp_path / "toy.json").write_text(TOY.to_json())
    path = os.pathsep.join([str(RECIPE), str(SUPPORT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with tempfile.TemporaryDirectory(prefix="ray-") as short, open(tmp_path / "output", "w") as output:
        done = subprocess.run(  # Ray's sockets need a short path
            [sys.executable, str(JOB), str(tmp_path), short], stdout=output, stderr=output, timeout=LIMIT,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
                 "RAY_raylet_start_wait_time_s": "600",
                 "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600", "RAY_AUTH_MODE": "disabled"},
            check=False,
        )  # fmt: skip
    told = (tmp_path / "output").read_text()
    assert done.returncode == 0, told[-6000:]
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
