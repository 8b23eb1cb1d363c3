"""A process or a thread that the system refuses is told from what a script raises in the same words."""

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollback.agent.shortage import RankNotForked, is_of_shortage

REFUSED = """
import multiprocessing, os, resource, subprocess, threading
import multiprocessing.popen_fork, multiprocessing.popen_spawn_posix, multiprocessing.resource_tracker
from rollback.agent.shortage import is_of_shortage
from rollback.system.threads import start_thread

def tidied():
    thread = threading.Thread(target=int)
    try:
        thread.start()
    finally:
        thread.join()

if os.getuid() == 0:  # which no limit holds for
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
for act in (
    lambda: subprocess.Popen(["true"]),
    lambda: multiprocessing.get_context("fork").Process(target=int).start(),
    lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
    lambda: threading.Thread(target=int).start(),
    lambda: start_thread(threading.Thread(target=int)),
    tidied,
):
    try:
        act()
    except Exception as error:
        print(is_of_shortage(error), repr(error))
"""


def test_what_the_system_refuses_for_want_of_a_process_or_a_thread_is_a_shortage() -> None:
    """What torchrun raises as it tidies up hides the reason."""
    told = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in told.splitlines()] == ["True"] * 6, told
    assert "cannot join thread before it is started" in told.splitlines()[-1]
    assert is_of_shortage(RankNotForked())


def lock_twice(folder: Path) -> None:
    with (folder / "lock").open("w") as one, (folder / "lock").open("w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_nothing(folder: Path) -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(reader, False)
        os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def start_twice(folder: Path) -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.start()


def say_so(folder: Path) -> None:
    raise ValueError("can't start new thread")


@pytest.mark.parametrize("act", [lock_twice, read_nothing, start_twice, say_so])
def test_what_is_not_ready_for_the_script_is_none(act: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises((OSError, RuntimeError, ValueError)) as raised:
        act(tmp_path)
    assert not is_of_shortage(raised.value)
