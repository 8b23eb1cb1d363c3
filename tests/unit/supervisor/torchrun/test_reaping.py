"""The processes below a supervisor."""

import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from open_files import no_descriptor_free

from rollback.errors import RollbackError
from rollback.rundir.heartbeats import LEAVING, Heartbeat, write_heartbeat
from rollback.rundir.paths import RunPaths
from rollback.supervisor import patience
from rollback.supervisor.torchrun import processes
from rollback.supervisor.torchrun.host import Running
from rollback.supervisor.torchrun.processes import (
    dead_ranks,
    descendants,
    end_all,
    leftovers,
    living_ranks,
    ranks_of,
    reap,
    send,
    until_ended,
)
from rollback.system.processes import start_of


def ended(status: int) -> "subprocess.Popen[bytes]":
    """A child that has ended, and that nobody has waited for."""
    child = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({status})"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


def test_a_child_whose_end_somebody_waits_for_keeps_its_status() -> None:
    """A tracker beside the supervisor that fails in an attempt is told of, with what it ended with."""
    before = psutil.Process().children()
    tracker, orphan = ended(3), ended(4)
    reap(apart_from=[*before, psutil.Process(tracker.pid)])
    assert tracker.wait() == 3
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan.pid, 0)
    orphan.wait()


def test_what_a_tracker_starts_later_is_not_of_an_attempt() -> None:
    """W&B has a process of its own that sends, and starts it when there is something to send."""
    starts = (
        "import subprocess, sys; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); child.wait()"
    )
    tracker, rank = (
        subprocess.Popen([sys.executable, "-S", "-c", starts], stdout=subprocess.PIPE, text=True) for _ in range(2)
    )
    try:
        sends, worker = (int(process.stdout.readline()) for process in (tracker, rank) if process.stdout)
        found = {process.pid for process in descendants(apart_from=[psutil.Process(tracker.pid)])}
        assert found & {tracker.pid, sends, rank.pid, worker} == {rank.pid, worker}
    finally:
        for process in psutil.Process().children(recursive=True):
            if process.pid in (tracker.pid, sends, rank.pid, worker):
                process.kill()
        tracker.communicate()
        rank.communicate()


def test_a_child_of_torchrun_that_ends_meanwhile_hides_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a script without a guard would be ended at once when it is told to stop: no rank seems to be there."""
    gone, rank = ended(0), subprocess.Popen(["sleep", "60"])
    listed = [psutil.Process(gone.pid), psutil.Process(rank.pid)]
    gone.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self: listed)
    try:
        assert ranks_of(os.getpid()) == listed[1:]
    finally:
        rank.kill()
        rank.wait()


def test_a_shortage_that_passes_ends_no_run_between_two_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, popen = [errno.EAGAIN, errno.ENOMEM], subprocess.Popen

    def refused(*given: Any, **more: Any) -> "subprocess.Popen[bytes]":
        if refusals:
            raise OSError(refusals[-1], os.strerror(refusals.pop()))
        return popen(*given, **more)

    said: list[str] = []
    monkeypatch.setattr(patience, "_POLL", 0.0)
    monkeypatch.setattr(subprocess, "Popen", refused)
    assert processes.start(["true"], {**os.environ}, said.append).wait() == 0
    assert said == ["starting torchrun: Cannot allocate memory; it is tried again for 10 s"], "once"
    for lasting, seconds in ((errno.E2BIG, 10.0), (errno.EAGAIN, -1.0)):
        monkeypatch.setattr(patience, "_REFUSED_FOR", seconds)
        refusals[:] = [lasting]
        with pytest.raises(RollbackError, match=f"starting torchrun: {os.strerror(lasting)}"):
            processes.start(["true"], {**os.environ}, print)


def test_processes_are_ended_though_no_descriptor_is_free_to_look_at_them_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the launch would end, and what it has started might not."""
    before, said, shortage = descendants(), list[str](), ExitStack()
    orphan = subprocess.Popen(["sleep", "60"])

    def say(text: str) -> None:
        said.append(text)
        shortage.close()

    monkeypatch.setattr(patience, "_POLL", 0.0)
    with shortage:
        shortage.enter_context(no_descriptor_free())
        until_ended(lambda: end_all(lambda: descendants(apart_from=before), patience=0), say)
    assert said == ["ending the processes of the last attempt: Too many open files; it is tried again for 10 s"]
    assert not descendants(apart_from=before)
    orphan.wait()  # for 0 where it was collected as it was ended
    monkeypatch.setattr(patience, "_REFUSED_FOR", -1.0)
    with no_descriptor_free(), pytest.raises(RollbackError, match="Too many open files") as refused:
        until_ended(lambda: end_all(lambda: descendants(apart_from=before), patience=0), print)
    assert "no other attempt was started" in str(refused.value)


def test_a_rank_that_cannot_be_looked_at_for_a_moment_is_neither_dead_nor_overlooked(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    rank = subprocess.Popen(["sleep", "60"])
    beat = Heartbeat(
        pid=rank.pid, start=start_of(rank.pid) or "", host=socket.gethostname(), attempt=1, step=9, batch=9,
        doing="training", monotonic=0.0,
    )  # fmt: skip
    running = Running(paths, 1, (), rank, None, None)
    try:
        with no_descriptor_free():
            assert dead_ranks({0: beat}) == []
            assert living_ranks({0: beat}, paths) == {}
            assert running.look() == {}
            assert running.tell_ranks_to_stop([signal.SIGTERM], guarded=False), "it is told later, not ended now"
            with pytest.raises(OSError, match="Too many open files"):
                leftovers(paths)
    finally:
        rank.kill()
        rank.wait()


def test_a_process_of_another_user_does_not_keep_others_from_being_signalled() -> None:
    """As sudo starts one. It is named where it cannot be ended."""

    class Foreign(psutil.Process):
        def send_signal(self, sig: int) -> None:
            raise psutil.AccessDenied(self.pid)

    rank = subprocess.Popen(["sleep", "60"])
    send([Foreign(), psutil.Process(rank.pid)], signal.SIGKILL)
    assert rank.wait() == -signal.SIGKILL


def test_the_end_of_torchrun_is_waited_for_and_no_longer_than_was_said(tmp_path: Path) -> None:
    torchrun = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    running = Running(RunPaths(tmp_path), 2, (), torchrun, None, None)
    running.await_end(0.001)
    assert running.poll() is None
    assert torchrun.stdin is not None
    torchrun.stdin.close()
    running.await_end(600)
    assert running.poll() == 0
    running.await_end(0.001)  # nothing is there any more that could end


def test_ranks_that_left_before_they_could_be_told_to_stop_are_not_taken_for_ranks_still_to_come(
    tmp_path: Path,
) -> None:
    """They knew it from a request, or from ranks of another host. Their torchrun is not killed then: it ends by
    itself, and by its status the ranks have stopped together."""
    paths, torchrun = RunPaths(tmp_path), ended(0)
    paths.ranks.mkdir()
    running = Running(paths, 2, (), torchrun, None, None)
    assert not running.tell_ranks_to_stop([signal.SIGTERM], guarded=True)
    for attempt in (1, 2):
        beat = Heartbeat(
            pid=torchrun.pid, host=socket.gethostname(), attempt=attempt, step=9, batch=9, doing=LEAVING, monotonic=0.0
        )
        write_heartbeat(paths.heartbeat(0), beat)
        assert running.tell_ranks_to_stop([signal.SIGTERM], guarded=True) == (attempt == 2)
    torchrun.wait()
