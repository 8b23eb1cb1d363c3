"""`rollback drill` on a real job: the faults really strike, and the rows say what really became of them."""

import io
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import WITHOUT_TORCHRUN
from rich.console import Console
from typer.testing import CliRunner
from warm_server import WarmPopen

from rollback.cli import app
from rollback.drill import trials
from rollback.drill.drill import Drill, DrillReport
from rollback.drill.faults import choose
from rollback.drill.text import print_report
from rollback.drill.trials import DrillStage
from rollback.errors import ExitCode, RollbackError, UsageError

JOBS = Path(__file__).parent / "jobs"
WITH_TORCHRUN = ("-m", "rollback")


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are forked from a process that has torch imported."""
    monkeypatch.setattr(trials, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": WarmPopen}))


def drilled(
    folder: Path,
    faults: Sequence[str],
    *,
    job: Sequence[str] = ("drilled.py",),
    flags: Sequence[str] = (),
    program: Sequence[str] = ("-c", WITHOUT_TORCHRUN),
    steps: int | None = 60,
) -> DrillReport:
    scratch = folder / "drill"
    scratch.mkdir()
    stage = DrillStage(scratch, flags, [str(JOBS / job[0]), *job[1:]], program)
    return Drill(job[0], stage, choose(faults), steps, {}, print).run()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_a_drill_says_of_a_guarded_job_is_what_happened(one_rank: Path) -> None:
    report = drilled(one_rank, ["nan-loss", "weight-bit", "full-disk"])
    nan, bit, disk = report.rows
    assert report.passed, report.to_json()
    assert (nan.bitwise, nan.caught_after_steps, disk.bitwise) == ("yes", 0, "yes")
    assert nan.steps_replayed
    assert nan.batches_skipped
    assert bit.skipped
    assert "No space left on device" in (disk.caught or "")
    assert not (one_rank / "reached-the-end").exists()  # what stands behind the loop may overwrite what the user has
    assert not (one_rank / "runs").exists()
    assert not list((one_rank / "drill").rglob("ring")), "a dozen runs of checkpoints were left behind"
    stream = io.StringIO()
    print_report(Console(file=stream, width=100), report)
    assert "all passed" in stream.getvalue()


@pytest.mark.soak
def test_every_row_that_one_rank_can_have_passes(one_rank: Path) -> None:
    report = drilled(one_rank, [])
    assert report.passed, report.to_json()
    exact = {row.fault for row in report.rows if row.bitwise == "yes"}
    assert exact >= {"nan-loss", "killed-rank", "hung-rank", "sigterm", "full-disk"}


def test_a_script_that_never_tells_a_loss_fails_and_is_told_why(one_rank: Path) -> None:
    report = drilled(one_rank, ["nan-loss"], job=("drilled.py", "--silent"))
    assert not report.passed
    assert report.rows[0].why == "the guard was never told a loss: does the script call guard.observe(loss)?"


def test_two_ranks_under_torchrun_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["drill", "--nproc", "2", "--steps", "60", "--json", "--only", "killed-rank", "--scratch", "here"]
    result = CliRunner().invoke(app, [*command, str(JOBS / "drilled.py")])
    report = json.loads(result.stdout)
    assert result.exit_code == 0, report
    [row] = report["rows"]
    assert (report["ranks"], row["passed"], row["bitwise"]) == (2, True, "yes")
    assert row["recovered"].startswith("went on from step ")
    assert row["caught"].startswith("rank 1")


def drilled_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, *faults: str) -> list[Any]:
    """The rows of a drill on two ranks with as many replicas of a sharded model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    only = [word for fault in faults for word in ("--only", fault)]
    command = ["drill", "--nproc", "2", "--steps", "60", "--json", "--scratch", "here", *only]
    result = CliRunner().invoke(app, [*command, str(JOBS / "drilled.py"), "--sharded", str(replicas)])
    assert result.exit_code == 0, (result.stdout, result.stderr)
    return list(json.loads(result.stdout)["rows"])


def test_a_flipped_bit_in_a_replica_of_a_sharded_model_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = drilled_sharded(tmp_path, monkeypatch, 2, "weight-bit")
    assert (row["passed"], row["skipped"]) == (True, False)
    assert "is flipped" in row["struck"]
    assert "ranks 0, 1" in row["caught"]
    assert "no checkpoint has it" in row["recovered"]


@pytest.mark.soak
def test_every_row_passes_on_a_sharded_job_and_a_bit_that_nobody_else_has_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {row["fault"]: row for row in drilled_sharded(tmp_path, monkeypatch, 1)}
    assert {name for name, row in rows.items() if row["skipped"]} == {"weight-bit"}
    assert "no other rank has" in rows["weight-bit"]["why"]
    exact = {name for name, row in rows.items() if row["bitwise"] == "yes"}
    assert exact >= {"nan-loss", "killed-rank", "hung-rank", "sigterm", "full-disk"}


def test_a_job_that_does_not_run_is_not_drilled(one_rank: Path) -> None:
    broken = one_rank / "broken.py"
    broken.write_text("raise SystemExit('out of luck')")
    with pytest.raises(RollbackError, match="out of luck"):
        drilled(one_rank, ["nan-loss"], job=(str(broken),), flags=["--restart-budget=0"])


def test_a_script_without_a_guard_is_not_drilled(one_rank: Path) -> None:
    plain = one_rank / "plain.py"
    plain.write_text("print('no guard')")
    with pytest.raises(UsageError, match=r"no rank made a rollback\.Guard") as refused:
        drilled(one_rank, ["nan-loss"], job=(str(plain),))
    assert "`rollback adopt`" in str(refused.value.hint)


def test_a_launch_that_is_wrong_is_wrong_as_a_drill_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    result: Any = CliRunner().invoke(app, ["drill", "--nproc", "0", "x.py"])
    assert "0 ranks cannot be started" in result.exception.message
    assert result.exception.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to drill"),
        (["--only", "earthquake", "x.py"], "no fault 'earthquake'"),
        (["missing.py"], "no training script"),
        (["--nnodes", "2", "x.py"], "one node"),
        (["--probation", "none", "x.py"], "--probation"),
        (["--scratch", ".", "x.py"], "not empty"),
    ],
)
def test_what_cannot_be_drilled_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    result: Any = CliRunner().invoke(app, ["drill", *arguments])
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["x.py"]


def test_the_faults_are_listed() -> None:
    result = CliRunner().invoke(app, ["drill", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [fault.name for fault in choose(None)]
