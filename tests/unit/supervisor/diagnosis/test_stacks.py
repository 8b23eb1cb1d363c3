"""What is told of the processes of a hanging job, besides their stacks."""

import subprocess
import sys
from pathlib import Path

import psutil

from rollback.rundir.paths import RunPaths
from rollback.rundir.stacks import read_processes
from rollback.supervisor.diagnosis.stacks import take_stacks

NAMED = "open('/proc/self/comm', 'w').write('rank 10'); print(flush=True); input()"


def test_a_process_is_told_of_by_its_whole_name(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert take_stacks(paths, 1, {10: psutil.Process(process.pid)}) == ()
        process.communicate(b"\n")
    (seen,) = read_processes([paths.processes(1)])
    assert (seen.command, seen.waits_in == "0") == ("rank 10", False)


def test_a_name_that_the_kernel_cuts_within_a_letter_is_told_as_far_as_it_goes(tmp_path: Path) -> None:
    """Of a program's name it keeps 15 bytes: of Cyrillic letters, seven and a half."""
    paths = RunPaths(tmp_path)
    cut = "open('/proc/self/comm', 'wb').write('обучение'.encode()[:15]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", cut], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert take_stacks(paths, 1, {0: psutil.Process(process.pid)}) == ()
        process.communicate(b"\n")
    (seen,) = read_processes([paths.processes(1)])
    assert (seen.command, seen.why_none) == (
        "обучени\ufffd", "it has no handler for the signal: no Guard yet, or not a forked loader worker"
    )  # fmt: skip
