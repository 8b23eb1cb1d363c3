"""A disk that becomes read-only, and a wall clock that jumps, while a run trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jumping
import mounted
import pytest
from apart import APART
from disks import may_mount
from job_results import JOB, LAUNCH, LIMIT, Scenarios
from toy import Toy, facts, require_same, train
from warm_server import run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Committed, Drained
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.verify import verify
from rollback.ring.url.fetch import fetch
from rollback.ring.url.store import Store
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths

SUPPORT = Path(__file__).parents[1] / "support"
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


@pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")
def test_a_run_directory_that_becomes_read_only_stops_no_training(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=64m rollback-test {disk}"
    job = [mounted.__file__, str(disk), "18", str(tmp_path / "portrait.json")]
    done = run_warm([*APART, "mounts", mount, *job], capture_output=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    undisturbed = train(mounted.TOY, tmp_path / "undisturbed")
    require_same(json.loads((tmp_path / "portrait.json").read_text()), undisturbed, "the run on a read-only disk")
    assert "could not be written" in done.stderr
    assert "training goes on" in done.stderr
    held = done.stdout.split(":")[1].split()
    assert "c000002-s00000010" in held
    assert max(held) <= "c000003-s00000015"


@pytest.mark.soak
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (`apt-get install libfaketime`)")
def test_a_clock_that_jumps_by_years_changes_nothing(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0d")
    environment = {
        **os.environ, "LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "jumping.py"), str(tmp_path)], env=environment, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    undisturbed = train(jumping.TOY, tmp_path / "undisturbed")
    require_same(json.loads((tmp_path / "portrait.json").read_text()), undisturbed, "the run whose clock jumped")
    run = tmp_path / "run"
    assert [fact.checkpoint for fact in facts(run, Committed)] == sorted(
        fact.checkpoint for fact in facts(run, Committed)
    )
    times = [record.at[:4] for record in read_journal(RunPaths(run).train_journal).records]
    assert times != sorted(times), "the lines' times do jump"
    assert facts(run, Drained)
    assert verify(ReadableRun.at(run)).exit_code == ExitCode.DONE
    elsewhere = RunPaths(tmp_path / "elsewhere")
    elsewhere.root.mkdir()
    fetch(Store(f"file://{tmp_path}/ring"), elsewhere, print)
    assert verify(ReadableRun.at(elsewhere.root)).exit_code == ExitCode.DONE


def in_its_own_proc(stat: Path, command: list[str]) -> list[str]:
    """A command for which `stat` is /proc/stat, which has the time of boot: the wall clock less the time since then."""
    stat.write_bytes(Path("/proc/stat").read_bytes())
    return [*APART, "mounts", f"mount --bind {stat} /proc/stat", *command]


def put_right(stat: Path, seconds: int) -> str:
    """A shell command that steps the clock that `in_its_own_proc` shows."""
    step = f"awk '$1 == \"btime\" {{ $2 += {seconds} }} 1' {stat} > {stat}.new"
    return f"{step} && cat {stat}.new > {stat}"


@pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")
@pytest.mark.parametrize("seconds", [-3600, pytest.param(3, marks=pytest.mark.soak)])
def test_a_wall_clock_that_is_put_right_ends_no_rank(tmp_path: Path, seconds: int) -> None:
    """In mid-run: ranks look once a second whether their supervisor is there."""
    scenarios, run, stat = Scenarios(tmp_path), tmp_path / "job", tmp_path / "stat"
    scenarios.add("job", Toy(samples=200), shell=[0, 30, f"{put_right(stat, seconds)}; sleep 2.5"])
    command = [*LAUNCH[1:], "--nproc", "1", "--run", str(run), str(JOB), str(scenarios.path)]
    done = run_warm(
        in_its_own_proc(stat, command), env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "is gone" not in done.stdout
    assert len(facts(run, Attached)) == 1, "a rank was ended"
