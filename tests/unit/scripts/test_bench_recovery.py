"""The recovery benchmark: what it makes of the times that a job has noted, and (soak) that its jobs run at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench_recovery

FALLEN, NEXT = 11, 22  # the processes of rank 0: the one that the fault meets, and the one started after it
Mark = dict[str, object]


def mark(what: str, at: float, step: int = 0, pid: int = FALLEN, rank: int = 0) -> Mark:
    return {"what": what, "step": step, "at": at, "pid": pid, "rank": rank}


def noted(folder: Path, monkeypatch: pytest.MonkeyPatch, marks: list[Mark], status: int = 0) -> None:
    """Let the job have ended with `status` and have noted these times."""
    (folder / "marks.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in marks))
    done = subprocess.CompletedProcess([], status, stdout="Traceback: it broke")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)


STEPS = [mark("end", at) for at in (1.0, 2.0)]


@pytest.mark.parametrize("way", ["relaunch", "by hand"])
def test_a_relaunch_lasts_from_the_kill_to_the_end_of_the_next_step(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = [mark("end", at, pid=NEXT) for at in (6.0, 7.0)]
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), *after])
    assert bench_recovery.measure(way, tmp_path, 8) == [bench_recovery.Standstill(3.5)]


def test_a_step_from_before_the_kill_that_is_told_of_behind_it_ends_no_relaunch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = mark("end", 2.55)
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), late, mark("end", 6.0, pid=NEXT)])
    assert bench_recovery.measure("relaunch", tmp_path, 8) == [bench_recovery.Standstill(3.5)]


def steps(rank: int, *told: tuple[int, float, float]) -> list[Mark]:
    """What a rank tells of steps: batch, begin and end of each."""
    return [
        mark(what, at, step, rank=rank)
        for step, begin, end in told
        for what, at in (("begin", begin), ("end", end))
    ]  # fmt: skip


def test_a_rollback_lasts_from_when_all_ranks_have_detected_the_fault_to_when_all_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_recovery, "FAULTS", {"nan": [7, 9]})
    # The first is detected by the next step's end, the second at once, as it is before a snapshot.
    first = steps(0, (6, 0, 1), (7, 1, 2), (8, 2, 3), (5, 3.5, 5), (6, 5, 6), (8, 6, 7), (9, 7, 8), (7, 9, 9.5))
    second = steps(1, (6, 0, 1), (7, 1, 2), (8, 2, 3.25), (5, 3.625, 5), (6, 5, 6), (8, 6, 7), (9, 7, 8), (7, 8.5, 9))
    noted(tmp_path, monkeypatch, [mark("fault", 1.5, rank=1), *second, *first])
    expected = [bench_recovery.Standstill(0.375, 1.5), bench_recovery.Standstill(1.0, 0.5)]
    assert bench_recovery.measure("in process", tmp_path, 8) == expected


def test_a_fault_without_a_rollback_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_recovery, "FAULTS", {"nan": [7]})
    noted(tmp_path, monkeypatch, [each for rank in range(2) for each in steps(rank, (6, 0, 1), (7, 1, 2), (8, 2, 3))])
    with pytest.raises(SystemExit, match="in process: no rollback followed on the NaN of batch 7"):
        bench_recovery.measure("in process", tmp_path, 8)


def test_a_job_that_fails_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted(tmp_path, monkeypatch, [*STEPS, mark("fault", 2.5), mark("end", 6.0)], status=1)
    with pytest.raises(SystemExit, match="relaunch: the job failed\nTraceback: it broke"):
        bench_recovery.measure("relaunch", tmp_path, 8)


@pytest.mark.soak
def test_all_three_ways_recover() -> None:
    command = [sys.executable, bench_recovery.__file__, "--small", "--rounds", "1"]
    done = subprocess.run(command, text=True, capture_output=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{way}: " in done.stderr for way in ("in process", "relaunch", "by hand"))
    assert "times as fast as by hand" in done.stdout
