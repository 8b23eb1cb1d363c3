"""The demo's training script, its bad data, and the demo's judgement of the runs. The demo itself is run by hand."""

import difflib
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from selection import soak
from warm_server import run_warm

from demo import DemoFailed, Job, checks, compare_with_planted, run_to_end
from demo_view import Progress, View, chart
from stdlib_text import GARBAGE, NON_FINITE_WEIGHTS, StdlibText

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALL = ["--steps=4", "--width=16", "--depth=1", "--batch-size=4"]


def test_adopting_the_guard_changes_at_most_six_lines() -> None:
    plain, guarded = ((SCRIPTS / name).read_text().splitlines() for name in ("train_gpt_plain.py", "train_gpt.py"))
    changes = [line for line in difflib.ndiff(plain, guarded) if line[0] in "+-"]
    assert 0 < len(changes) <= 6
    assert len(guarded) < 150


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize("launcher", [TORCHRUN, *soak([])], ids=["two ranks", "one process"])
def test_the_guarded_script_trains_exactly_as_the_plain_one(launcher: list[str], tmp_path: Path) -> None:
    printed = []
    for name in ("train_gpt_plain.py", "train_gpt.py"):
        command = [sys.executable, *launcher, str(SCRIPTS / name), *SMALL]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = run_warm(command, cwd=tmp_path, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.10 writes to stdout, too
        printed.append([json.loads(line) for line in lines])
    assert len(printed[0]) == 5
    assert printed[0] == printed[1]
    assert (tmp_path / "runs" / "train_gpt" / "run.json").exists()


def test_the_bad_stretches_are_bad_and_nothing_else_is() -> None:
    clean, bad = StdlibText(), StdlibText(corrupt=True)
    differ = np.flatnonzero((clean.windows != bad.windows).any(axis=1))
    assert set(differ) == {*GARBAGE}
    non_finite = np.flatnonzero(~np.isfinite(bad.weights))
    assert {*non_finite} <= {*NON_FINITE_WEIGHTS}
    per_batch = np.bincount(non_finite // 32)[NON_FINITE_WEIGHTS[0] // 32 :]
    assert len(per_batch) == 4
    assert (per_batch > 0).all()
    assert np.isnan(bad.weights).any()
    assert np.isinf(bad.weights).any()


def test_validation_text_is_none_of_the_training_text() -> None:
    training = {window.tobytes() for window in StdlibText().windows}
    held_out = StdlibText(held_out=True).windows
    assert sum(window.tobytes() in training for window in held_out) <= 1  # a run of blanks, say


def made_audit(skipped_indices: set[int], incident_batches: list[int]) -> dict[str, Any]:
    """What `rollback audit --json` would say: batches of 32 samples for two ranks, incidents of one batch each."""
    batches = sorted({index // 32 for index in skipped_indices})
    return {
        "skipped": [
            {
                "batch": batch,
                "indices": {str(rank): [*range(batch * 32 + rank, batch * 32 + 32, 2)] for rank in range(2)},
            }
            for batch in batches
        ],
        "incidents": [
            {"incident": number, "onset": {"batch": batch}, "detection": {"batch": batch}, "escalation": number % 2}
            for number, batch in enumerate(incident_batches)
        ],
        "totals": {"attempts": 2},
    }


def finished(name: str, validation: float) -> Progress:
    return Progress(name, "", 300, validation=validation)


def failed_checks(audit: dict[str, Any], protected: float = 2.01, unprotected: float = math.nan) -> list[str]:
    validation = {"undisturbed": 2.0, "unprotected": unprotected, "protected": protected}
    progress = {name: finished(name, value) for name, value in validation.items()}
    return [what for holds, what in checks(progress, audit, compare_with_planted(audit)) if not holds]


PLANTED = {*GARBAGE, *NON_FINITE_WEIGHTS}
AS_PLANNED = made_audit(PLANTED | {GARBAGE[-1] + 1}, [GARBAGE[0] // 32, GARBAGE[40 * 32] // 32, 461])


def test_a_demo_as_planned_passes_all_checks() -> None:
    assert failed_checks(AS_PLANNED) == []
    assert compare_with_planted(AS_PLANNED)["good_batches_skipped"] == [GARBAGE[-1] // 32 + 1]


@pytest.mark.parametrize(
    ("audit", "losses", "word"),
    [
        (made_audit(PLANTED - {*range(14_720, 14_752)}, [260, 300, 461]), {}, "32 of 1,792"),
        (made_audit(PLANTED | {*range(320)}, [260, 300, 5]), {}, "nothing planted"),
        (made_audit(PLANTED | {*range(64 * 32)}, [260, 300, 461]), {}, "good batches skipped"),
        (made_audit(PLANTED, [260, 461]), {}, "widened"),
        (AS_PLANNED, {"protected": 2.05}, "+2.50%"),
        (AS_PLANNED, {"unprotected": 2.01}, "visibly worse"),
    ],
)
def test_whatever_is_not_as_planned_fails_its_check(audit: dict[str, Any], losses: dict[str, float], word: str) -> None:
    [failed] = failed_checks(audit, **losses)
    assert word in failed


def made_job(code: str, folder: Path) -> Job:
    return Job(Progress("undisturbed", "", 2), [sys.executable, "-c", code], folder / "out", folder / "err")


def test_a_run_is_followed_by_what_it_prints(tmp_path: Path) -> None:
    code = """print('{"step": 0, "loss": 5.5}\\nnot JSON\\n{"step": 1, "loss": NaN}\\n{"validation_loss": 5.0}')"""
    job = made_job(code, tmp_path)
    run_to_end(job, View(Console(file=io.StringIO())))
    assert job.progress.step == 2
    assert job.progress.losses[0] == 5.5
    assert job.progress.validation == 5.0


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit('out of luck')", "import sys; print('out of luck', file=sys.stderr)"]
)
def test_a_run_that_fails_or_ends_without_a_result_fails_the_demo(code: str, tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match="out of luck"):
        run_to_end(made_job(code, tmp_path), View(Console(file=io.StringIO())))


def test_a_rewind_takes_back_the_chart_and_nan_is_shown() -> None:
    progress = Progress("protected", "", 10)
    for step, loss in enumerate([4.0, 4.0, 4.0, math.nan]):
        progress.update(step, loss)
    assert "×" in "".join(row.plain for row in chart(progress, 10))
    progress.update(2, 4.0)
    assert progress.step == 3
    assert "×" not in "".join(row.plain for row in chart(progress, 10))


def test_without_a_terminal_the_view_is_plain_lines() -> None:
    out = io.StringIO()
    progress = Progress("unprotected", "bad data", 4)
    with View(Console(file=out, width=200)) as view:
        view.show(progress)
        progress.update(0, 5.5)
        progress.tell("step 0: [something] happened", "red")
        view.show(progress)
        progress.validation = 2.5
        progress.end()
        view.show(progress)
    lines = out.getvalue().splitlines()
    assert any(line.endswith("step 0: [something] happened") for line in lines)
    assert "validation loss 2.5000" in lines[-1]
    assert not set("╭│▁×") & set(out.getvalue())
