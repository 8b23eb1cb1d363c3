"""The recovery benchmark: what it makes of the times that a job has noted, and (soak) that its jobs run at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench_recovery

FALLEN, NEXT = 11, 22  # the processes of rank 0: the one that the fault meets, and the one started after it


def mark(what: str, at: float, step: int = 0, pid: int = FALLEN) -> dict[str, object]:
    return {"what": what, "step": step, "at": at, "pid": pid}


def noted(folder: Path, monkeypatch: pytest.MonkeyPatch, marks: list[dict[str, object]], status: int = 0) -> None:
    """Let the job have ended with `status` and have noted these times."""
    (folder / "marks.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in marks))
    done = subprocess.CompletedProcess([], status, stdout="Traceback: it broke")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


STEPS = [mark("step", at) for at in (1.0, 2.0)]


@pytest.mark.parametrize("way", ["relaunch", "by hand"])
def test_a_relaunch_lasts_from_the_kill_to_the_end_of_the_next_step(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = [mark("step", at, pid=NEXT) for at in (6.0, 7.0)]
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), *after])
    assert bench_recovery.measure(way, tmp_path, 8) == 3.5


def test_a_step_from_before_the_kill_that_is_told_of_behind_it_ends_no_relaunch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = mark("step", 2.55)
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), late, mark("step", 6.0, pid=NEXT)])
    assert bench_recovery.measure("relaunch", tmp_path, 8) == 3.5


@pytest.mark.parametrize(("healthy", "expected"), [(5.25, 0.25), (4.5, 0.0)])
def test_in_process_it_lasts_from_the_step_that_detects_to_the_next_healthy_one_less_an_ordinary_step(
    healthy: float, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = bench_recovery.FAULT["nan"]
    late = mark("step", 2.15, step=met - 1)  # rank 0 was a moment behind the rank that met the fault
    after = [mark("step", at, step=met + n) for n, at in enumerate((3.0, 4.0, healthy, healthy + 1, healthy + 2))]
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.1), late, *after])
    assert bench_recovery.measure("in process", tmp_path, 8) == pytest.approx(expected)


def test_a_job_that_fails_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), mark("step", 6.0)], status=1)
    with pytest.raises(SystemExit, match="relaunch: the job failed\nTraceback: it broke"):
        bench_recovery.measure("relaunch", tmp_path, 8)


@pytest.mark.soak
def test_all_three_ways_recover() -> None:
    command = [sys.executable, bench_recovery.__file__, "--small", "--rounds", "1"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{way}: " in done.stderr for way in ("in process", "relaunch", "by hand"))
    assert "times as fast as by hand" in done.stdout
