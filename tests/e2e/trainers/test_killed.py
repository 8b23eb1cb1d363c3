"""A protected job is killed, or told to stop, under `rollback launch`: the run ends bit for bit as the undisturbed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from job_results import LAUNCH, Scenarios
from toy import facts, require_same
from trainer_job import JOB, LIMIT, MODULES, TrainerJob

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Restored, Stopped

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
TOLD: dict[str, dict[str, Any]] = {
    "by SIGTERM": {"told": [0, 13, "SIGTERM"]},
    "by SIGTERM behind an epoch's start": {"told": [1, 41, "SIGTERM"]},
    "by rollback stop": {"told": [0, 5, "rollback stop"]},
}
"""For jobs without a bad batch: a stop saves, and where checkpoints lie decides what a rollback skips."""


def launched(job: Scenarios) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, "--nproc", "2", "--run", str(job.run("killed")), str(JOB), str(job.path)], cwd=job.folder,
        env={**job.environment, "NO_COLOR": "1"}, timeout=LIMIT, text=True, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def require_undisturbed(folder: Path, job: TrainerJob, phases: list[str]) -> None:
    undisturbed = Scenarios(folder, JOB, MODULES, LIMIT)
    undisturbed.add("undisturbed", job)
    undisturbed.torchrun(2)
    how = {**PHASES, **TOLD}
    for number, phase in enumerate(phases):
        killed = Scenarios(folder / str(number), JOB, MODULES, LIMIT)
        killed.folder.mkdir()
        killed.add("killed", job, **how[phase])
        run = killed.run("killed")
        if phase in TOLD:
            done = launched(killed)
            assert done.returncode == ExitCode.RESUMABLE, done.stdout[-8000:]
            assert facts(run, Stopped)[0].checkpoint.endswith(f"{facts(run, Stopped)[0].step:08d}")
        done = launched(killed)
        assert done.returncode == 0, done.stdout[-8000:]
        assert len(facts(run, Attached)) == 2, done.stdout[-8000:]
        assert bool(facts(run, Restored)) == bool(job.bad_at)
        assert facts(run, Finished)
        for rank in (0, 1):
            require_same(killed.portrait("killed", rank), undisturbed.portrait("undisturbed", rank), phase)


def test_a_rank_that_is_killed_in_a_rollback_costs_nothing(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, TRAINER, ["in the middle of the rollback"])


def test_a_protected_job_that_is_told_to_stop_is_saved_and_goes_on(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, TRAINER.but(bad_at=()), ["by SIGTERM"])


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_each_way_to_be_told_to_stop(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job.but(bad_at=()), list(TOLD))


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job, list(PHASES))
