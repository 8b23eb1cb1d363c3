"""A rank of a protected job is killed under `rollback launch`: the run ends bit for bit as the undisturbed one."""

from __future__ import annotations

from pathlib import Path

import pytest
from compared_runs import PHASES, require_undisturbed
from trainer_job import TrainerJob

TRAINER = TrainerJob(bad_at=(32,), bad_rank=1, samples=76, accumulate=2, evaluate=3, save=4)
ACCELERATE = TrainerJob(loop="accelerate", bad_at=(32,), bad_rank=1, samples=76, accumulate=2)


def test_a_rank_that_is_killed_in_a_rollback_costs_nothing(tmp_path: Path) -> None:
    require_undisturbed(tmp_path, TRAINER, ["in the middle of the rollback"])


@pytest.mark.soak
@pytest.mark.parametrize("job", [TRAINER, ACCELERATE], ids=["trainer", "accelerate"])
def test_a_rank_that_is_killed_anywhere_costs_nothing(tmp_path: Path, job: TrainerJob) -> None:
    require_undisturbed(tmp_path, job, list(PHASES))
