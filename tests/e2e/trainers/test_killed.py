"""A rank of a protected job is killed under `rollback launch`: the run ends bit for bit as the undisturbed one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from job_results import LAUNCH, Scenarios
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.facts.training import Attached, Finished, Restored

TRAINER = TrainerJob(bad_at=(32,), bad_rank=1, samples=76, accumulate=2, evaluate=3, save=4)
ACCELERATE = TrainerJob(loop="accelerate", bad_at=(32,), bad_rank=1, samples=76, accumulate=2)
PHASES: dict[str, dict[str, Any]] = {
    "in the first step": {"kill": [1, 0]},
    "in a step": {"kill": [1, 25]},
    "behind an epoch's start": {"kill": [1, 60]},
    "while a checkpoint is committed": {"die": ["Committed", 3]},
    "before the incident is journalled": {"die": ["Incident", 1]},
    "before the plan is": {"die": ["Planned", 1]},
    "in the middle of the rollback": {"die": ["Restored", 1]},
    "before the end is": {"die": ["Finished", 1]},
}


def require_undisturbed(folder: Path, job: TrainerJob, phases: list[str]) -> None:
    undisturbed = Scenarios(folder, JOB, MODULES, LIMIT)
    undisturbed.add("undisturbed", job)
    undisturbed.torchrun(2)
    for number, phase in enumerate(phases):
        killed = Scenarios(folder / str(number), JOB, MODULES, LIMIT)
        killed.folder.mkdir()
        killed.add("killed", job, **PHASES[phase])
        command = [*LAUNCH, "--nproc", "2", "--run", str(killed.run("killed")), str(JOB), str(killed.path)]
        done = subprocess.run(
            command, env={**killed.environment, "NO_COLOR": "1"}, timeout=LIMIT, text=True, cwd=folder, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        run = killed.run("killed")
        assert len(facts(run, Attached)) == 2, done.stdout[-8000:]
        assert facts(run, Restored)
        assert facts(run, Finished)
        for rank in (0, 1):
            require_same(killed.portrait("killed", rank), undisturbed.portrait("undisturbed", rank), phase)


def test_a_rank_that_is_killed_in_a_rollback_costs_nothing(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, TRAINER, ["in the middle of the rollback"])


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job, list(PHASES))
