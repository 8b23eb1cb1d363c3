"""Starting torchrun, finding every process of an attempt, and seeing to it that none is left.

Two attempts must never write one run directory, so the next one starts only after every process of the last is gone.
Ranks have sessions of their own, and their loader workers may outlive them, so neither a process group nor torchrun's
own bookkeeping covers them all. A subreaper does: what loses its parent below us becomes our child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import psutil

from rollback.config import ENV_RUN, ENV_SUPERVISOR
from rollback.errors import RollbackError
from rollback.instructions import FORK_SERVER
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import LEAVING, Heartbeat
from rollback.system.processes import is_running, runs

THIS_HOST = socket.gethostname()
"""As it was called when this process started; its ranks are told (`ENV_HOST`)."""

_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_AFTER = 30.0


def become_subreaper() -> None:
    """Orphans among our descendants become our children, where `descendants` finds them, instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str], environment: Mapping[str, str], stdout: int | None = None, stderr: int | None = None
) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own: a Ctrl-C in the terminal is ours to pass on.

    stdout, stderr: descriptors that it writes to; by default ours.
    """
    return subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout, stderr=stderr)


def descendants(apart_from: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """All living processes below this one. `apart_from`: those that were there before us (`exec` keeps children)."""
    known = set(apart_from)
    return [
        process for process in psutil.Process().children(recursive=True) if process not in known and _is_alive(process)
    ]


def living_ranks(beats: Mapping[int, Heartbeat], paths: RunPaths) -> dict[int, psutil.Process]:
    """The ranks with these heartbeats that were started by this process, by rank.

    A heartbeat may be a file that others have written: which process it names is believed of our own descendants only.
    """
    found = {rank: _process_of(beat) for rank, beat in beats.items()}
    return {
        rank: process for rank, process in found.items() if process is not None and _is_of_this_launch(process, paths)
    }


def ranks_of(torchrun: int) -> list[psutil.Process]:
    """The living ranks that the process with this pid has started: its children, but for the one that forks them."""
    try:
        return [
            child for child in psutil.Process(torchrun).children() if child.name() != FORK_SERVER and _is_alive(child)
        ]
    except psutil.NoSuchProcess:
        return []


def dead_ranks(beats: Mapping[int, Heartbeat]) -> list[int]:
    """Of the ranks with these heartbeats, those that ran here and are gone without having said that they end."""
    return [
        rank
        for rank, beat in beats.items()
        if beat.host == THIS_HOST and beat.doing not in ("ended", LEAVING) and _process_of(beat) is None
    ]


def leftovers(paths: RunPaths) -> list[psutil.Process]:
    """Living processes of earlier attempts, whose supervisor was killed. Call it while holding the run directory.

    A process is one if its environment, which only those who start it write, says that a supervisor that is gone
    started it for this run directory. What files in the run directory say of processes does not count.
    """
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue  # another user's, a kernel thread, or gone
        supervisor = environment.get(ENV_SUPERVISOR)
        if environment.get(ENV_RUN) == str(paths.root.absolute()) and supervisor and not is_running(supervisor):
            found.append(process)
    return [process for process in found if process.pid not in own and _is_alive(process)]


def _is_of_this_launch(process: psutil.Process, paths: RunPaths) -> bool:
    """Whether a process descends from this one by way of one that was started for this run directory.

    A program that gives itself a title overwrites its environment in /proc, so that of any between the two will do.
    """
    try:
        line = [process, *process.parents()]
    except psutil.Error:
        return False
    pids = [ancestor.pid for ancestor in line]
    if os.getpid() not in pids:
        return False
    mark = str(paths.root.absolute()), str(os.getpid())
    return any(_mark_of(ancestor) == mark for ancestor in line[: pids.index(os.getpid())])


def _mark_of(process: psutil.Process) -> tuple[str | None, str]:
    """For which run directory a process was started, and the pid of the supervisor that did."""
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return None, ""
    return environment.get(ENV_RUN), environment.get(ENV_SUPERVISOR, "").partition(":")[0]


def _process_of(heartbeat: Heartbeat) -> psutil.Process | None:
    if heartbeat.host != THIS_HOST:
        return None
    try:
        process = psutil.Process(heartbeat.pid)
    except (psutil.Error, ValueError, OverflowError):  # also a number that is no pid
        return None
    return process if runs(heartbeat.pid, heartbeat.start) else None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], signum: signal.Signals) -> None:
    """Signal processes; those that have just ended are passed over."""
    for process in processes:
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            continue


def end_all(find: Callable[[], list[psutil.Process]], *, patience: float) -> None:
    """Return once `find` finds no process any more: SIGTERM, `patience` seconds, SIGKILL until none is left.

    Raises RollbackError naming a process that cannot be killed (in an uninterruptible system call, mostly because a
    device or a network file system does not answer).
    """
    processes = find()
    send(processes, signal.SIGTERM)
    psutil.wait_procs(processes, timeout=patience)
    deadline = time.monotonic() + _UNKILLABLE_AFTER
    while processes := find():
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in processes)
            raise RollbackError(
                f"ending the processes of the last attempt: {pids} cannot be killed after {_UNKILLABLE_AFTER:.0f} s",
                hint="no other attempt was started, because two would write one run directory; see what these "
                "processes wait for (cat /proc/PID/stack, dmesg), then run the same command again",
            )
        send(processes, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1.0)


def reap() -> None:
    """Collect orphans that became our children and have ended. Call it when no `Popen` of ours is still to be waited
    for: it would lose its status."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return
