"""The best model may be gone, as the Trainer deletes it for a better one, or have found no room on the disk."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from job_results import LAUNCH
from toy import facts
from trainer_job import LIMIT, MODULES
from warm_server import ENV_MODULES, run_warm

from rollback.facts.training import Attached, Finished, Restored

JOB = Path(__file__).parents[1] / "jobs" / "best_model_deleted.py"


def train(folder: Path, *words: str) -> str:
    """In one attempt, to its end."""
    done = run_warm(
        [*LAUNCH, "--nproc", "2", "--run", "run", "--snapshot-every", "6", "--probation", "6", str(JOB), *words],
        cwd=folder, timeout=LIMIT, env={**os.environ, ENV_MODULES: MODULES}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    assert len(facts(folder / "run", Attached)) == len(facts(folder / "run", Finished)) == 1
    return str(done.stdout)


def best(folder: Path) -> list[list[Any]]:
    """What each rank ended with."""
    return [json.loads((folder / f"ended-{rank}.json").read_text())["best"] for rank in (0, 1)]


def test_a_run_whose_best_model_was_deleted_for_one_that_is_undone_ends_with_the_best_that_is_left(
    tmp_path: Path,
) -> None:
    said = train(tmp_path)
    assert len(facts(tmp_path / "run", Restored)) == 1
    assert said.count("output/checkpoint-10, is gone") == 1, said
    assert best(tmp_path) == [[4.0, 20, "output/checkpoint-20"]] * 2
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["checkpoint-20", "undone-checkpoint-20"]
    saved = json.loads((tmp_path / "output" / "checkpoint-20" / "trainer_state.json").read_text())
    assert {*saved["stateful_callbacks"]} == {"TrainerControl"}, "nothing of ours, which a Trainer alone would not know"


def test_a_folder_that_the_disk_has_no_room_for_is_left_out_and_training_goes_on(tmp_path: Path) -> None:
    """What was written of it is gone, and the best model is one that there is a folder of."""
    said = train(tmp_path, "full")
    assert "output/checkpoint-20 could not be saved ([Errno 28] No space left on device): it is left out" in said
    assert best(tmp_path) == [[3.0, 10, "output/checkpoint-10"]] * 2
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["checkpoint-10"]
