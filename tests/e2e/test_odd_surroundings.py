"""Folders that are gone, limits that are low, large and oddly spelt arguments, a host that is renamed."""

import functools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import pytest
from apart import APART
from launching import WITHOUT_TORCHRUN, launching
from selection import soak
from toy import facts
from waiting import LIMIT, wait_for
from warm_server import WarmPopen, run_warm

from rollback.errors import ExitCode
from rollback.facts.training import Attached, Finished, Stopped
from rollback.rundir.journal.journal import Journal, read_journal
from rollback.rundir.paths import RunPaths

JOB = Path(__file__).parent / "jobs" / "careless.py"
DIRECT = ["-c", WITHOUT_TORCHRUN]
WITH_TORCHRUN = ["-m", "rollback"]


def start(
    folder: Path, arguments: list[Any], *flags: str, program: list[str] = DIRECT, before: list[str] | None = None,
    limit: Callable[[], None] | None = None, **environment: str,
) -> subprocess.Popen[str]:  # fmt: skip
    command = [*(before or []), sys.executable, *program, "launch", "--nproc", "1", *flags, str(JOB), *arguments]
    popen = functools.partial(subprocess.Popen[str], preexec_fn=limit) if before or limit else WarmPopen[str]
    return popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="surrogateescape",
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment},
    )  # fmt: skip


def finish(folder: Path, arguments: list[Any], *flags: str, **how: Any) -> tuple[int, str]:
    process = start(folder, arguments, *flags, **how)
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


@pytest.mark.parametrize("run", ["runs/one", *soak("../runs/one")])
def test_a_working_directory_that_is_gone_is_named_as_such(tmp_path: Path, run: str) -> None:
    (tmp_path / "gone").mkdir()
    leave = ["sh", "-c", 'rmdir ../gone; exec "$@"', "sh"]
    code, output = finish(
        tmp_path / "gone",
        [],
        "--run",
        run if run.startswith("runs") else str(tmp_path / run),
        before=leave,
        program=WITH_TORCHRUN,
    )
    assert code == ExitCode.USAGE, output
    assert "the working directory" in output
    assert "is not there any more" in output
    assert "Traceback" not in output


def test_a_working_directory_that_is_removed_in_mid_run_is_told_with_what_it_cost(tmp_path: Path) -> None:
    """The run directory was in it. What is running is told to stop, and the record is missed in words."""
    (tmp_path / "gone").mkdir()

    def removed() -> bool:
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)  # the rank may write meanwhile
        return not (tmp_path / "gone").exists()

    with launching(tmp_path / "gone", with_torchrun=False, script=JOB.with_name("tiny.py")) as job:
        process = job.start("--hold")
        wait_for(job.paths.supervisor_journal.exists)  # the guard is made, and the supervisor knows
        wait_for(removed)
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == ExitCode.IO, output
    assert "it is gone" in output
    assert "Traceback" not in output


def test_a_limit_of_open_files_under_which_nothing_could_run_is_told_at_once(tmp_path: Path) -> None:
    def low() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

    code, output = finish(tmp_path, [], limit=low, program=WITH_TORCHRUN)
    assert code == ExitCode.USAGE, output
    assert "24 files open" in output
    assert "ulimit -n" in output
    assert not (tmp_path / "runs").exists()


def test_where_no_temporary_file_can_be_made_that_is_said_and_what_to_set(tmp_path: Path) -> None:
    """As with a root file system that is read-only or full: no file may be longer than nothing here."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    code, output = finish(tmp_path, [], limit=full, program=WITH_TORCHRUN)
    assert code == ExitCode.USAGE, output
    assert "no temporary file can be made" in output
    assert f"'/tmp', '/var/tmp', '/usr/tmp', '{tmp_path}'" in output
    assert "TMPDIR" in output
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


def test_a_failure_is_one_also_where_who_started_us_ignores_the_ends_of_children(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, *DIRECT, "launch", "fails.py"], cwd=tmp_path, timeout=LIMIT, capture_output=True, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "status 3" in done.stderr


TOO_LONG = "y" * 300  # the system refuses so much as to look, as it does below a directory that is closed to this user


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["launch", "--run", TOO_LONG, str(JOB)], ExitCode.IO),
        (["launch", TOO_LONG], ExitCode.USAGE),
        (["launch", "--skips-of", TOO_LONG, str(JOB)], ExitCode.USAGE),
        (["drill", TOO_LONG], ExitCode.USAGE),
        (["doctor", TOO_LONG], ExitCode.USAGE),
        (["ring", "export", "run", "-o", TOO_LONG], ExitCode.IO),
        (["report", "run", "-o", TOO_LONG], ExitCode.IO),
    ],
)
def test_a_path_that_may_not_be_looked_at_is_named_with_the_reason(
    tmp_path: Path, command: list[str], code: ExitCode
) -> None:
    Journal(RunPaths(tmp_path / "run").train_journal, 1).close()
    done = run_warm(
        [sys.executable, "-m", "rollback", *command], cwd=tmp_path, timeout=LIMIT, env={**os.environ, "NO_COLOR": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    assert "Traceback" not in done.stdout
    assert TOO_LONG in done.stdout.replace("\n", "")
    assert "File name too long" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_arguments_and_environment_of_many_kilobytes_reach_the_script(tmp_path: Path) -> None:
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(3)}
    code, output = finish(tmp_path, ["y" * 100_000] * 3, program=WITH_TORCHRUN, **large)
    assert code == ExitCode.DONE, output[-3000:]
    told = json.loads((tmp_path / "told.json").read_text())
    assert [len(text) for text in told["arguments"]] == [200_000] * 3
    assert told["large"] == 100_000


def test_arguments_in_another_encoding_reach_the_script_and_the_record(tmp_path: Path) -> None:
    odd = [b"caf\xe9", b"\xff\xfe", "\u65e5\u672c".encode()]
    code, output = finish(tmp_path, odd, program=WITH_TORCHRUN, ODD=os.fsdecode(b"\xff"))
    assert code == ExitCode.DONE, output[-3000:]
    assert json.loads((tmp_path / "told.json").read_text())["arguments"] == [text.hex() for text in odd]
    run = tmp_path / "runs" / "careless"
    assert read_journal(RunPaths(run).supervisor_journal).records
    for command in (["audit"], ["audit", "--json"], ["status"], ["status", "--json"], ["why"]):
        asked = [sys.executable, "-m", "rollback", command[0], str(run), *command[1:]]
        done = run_warm(asked, capture_output=True, errors="surrogateescape")
        assert done.returncode == 0, (command, done.stderr[-2000:])
    assert finish(tmp_path, odd, program=WITH_TORCHRUN)[0] == ExitCode.DONE, "the same command again"


@pytest.mark.skipif(hosts.why_not() is not None, reason=str(hosts.why_not()))
def test_a_host_that_is_renamed_while_it_trains_is_the_same_host(tmp_path: Path) -> None:
    apart = [*APART[1:], "name", "true", *DIRECT]
    process = start(tmp_path, ["rename", "another"], "--grace", "20", program=apart)
    until = time.monotonic() + LIMIT
    while not (tmp_path / "renamed").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT)
    run = tmp_path / "runs" / "careless"
    assert process.returncode == ExitCode.RESUMABLE, output
    (stopped,) = facts(run, Stopped)
    assert stopped.checkpoint is not None
    again = [*APART[1:], "name", "hostname a-third-name", *DIRECT]
    code, output = finish(tmp_path, ["rename", "another"], program=again)
    assert code == ExitCode.DONE, output
    assert facts(run, Attached)[-1].checkpoint == stopped.checkpoint
    assert facts(run, Attached)[-1].host == "a-third-name" != socket.gethostname()
    assert facts(run, Finished)


def test_an_optimizer_whose_checkpoint_has_other_groups_is_refused_with_the_difference(tmp_path: Path) -> None:
    code, output = finish(tmp_path, ["groups"])
    assert code == ExitCode.UNFIT, output
    assert "parameters in its groups" in output
    assert "[2, 2]" in output
    assert "[2]" in output
    assert "Traceback" not in output
