"""The best model that a checkpoint of the run names may be gone: the Trainer deletes it for a better one."""

import json
import os
import subprocess
from pathlib import Path

from job_results import LAUNCH
from toy import facts
from trainer_job import LIMIT, MODULES
from warm_server import ENV_MODULES, run_warm

from rollback.facts.training import Attached, Finished, Restored
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths

JOB = Path(__file__).parents[1] / "jobs" / "best_model_deleted.py"


def test_a_run_whose_best_model_was_deleted_for_one_that_is_undone_ends_with_the_best_that_is_left(
    tmp_path: Path,
) -> None:
    done = run_warm(
        [*LAUNCH, "--nproc", "2", "--run", "run", "--snapshot-every", "6", "--probation", "6", str(JOB)],
        cwd=tmp_path, timeout=LIMIT, env={**os.environ, ENV_MODULES: MODULES}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    assert len(facts(tmp_path / "run", Attached)) == len(facts(tmp_path / "run", Restored)) == 1
    assert facts(tmp_path / "run", Finished)
    assert done.stdout.count("output/checkpoint-10, is gone") == 1, done.stdout
    for rank in (0, 1):
        ended = json.loads((tmp_path / f"ended-{rank}.json").read_text())
        assert ended["best"] == [4.0, 20, "output/checkpoint-20"]
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["checkpoint-20", "undone-checkpoint-20"]
    saved = json.loads((tmp_path / "output" / "checkpoint-20" / "trainer_state.json").read_text())
    identity = read_identity(RunPaths(tmp_path / "run"))
    assert identity is not None
    mark = {"run": identity.run_id}  # by which the folder is known as one of this run, wherever the run directory is
    assert saved["stateful_callbacks"]["RollbackCallback"]["attributes"] == mark
