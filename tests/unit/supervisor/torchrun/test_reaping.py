"""The processes below a supervisor."""

import os
import subprocess
import sys

import psutil
import pytest

from rollback.supervisor.torchrun.processes import reap


def ended(status: int) -> "subprocess.Popen[bytes]":
    """A child that has ended, and that nobody has waited for."""
    child = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({status})"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def test_a_child_whose_end_somebody_waits_for_keeps_its_status() -> None:
    """A tracker beside the supervisor that fails in an attempt is told of when the launch is over."""
    before = psutil.Process().children()
    tracker, orphan = ended(3), ended(4)
    reap(apart_from=[*before, psutil.Process(tracker.pid)])
    assert tracker.wait() == 3
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, 0)
    orphan.wait()
