"""Starts torchrun, finds every process of an attempt, and ends all of them.

Two attempts must never write one run directory, so the next attempt starts only after every process of the last one is
gone. Ranks have sessions of their own, and loader workers may outlive them, so neither a process group nor torchrun's
own list has all processes. A subreaper has: an orphan below this process becomes its child.
"""

import contextlib
import ctypes
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import psutil

from rollback.environment import ENV_RUN, ENV_SUPERVISOR
from rollback.errors import RollbackError, reporting
from rollback.instructions import FORK_SERVER
from rollback.rundir.heartbeats import LEAVING, Heartbeat
from rollback.rundir.paths import RunPaths
from rollback.supervisor.patience import patiently
from rollback.system.processes import is_running, runs

THIS_HOST = socket.gethostname()
"""The name of this host when this process started. The ranks get it by `ENV_HOST`."""

_PR_SET_CHILD_SUBREAPER = 36
_UNKILLABLE_AFTER = 30.0
_ENDING = "ending the processes of the last attempt"
_NOT_ANOTHER = "no other attempt was started, because two would write one run directory"
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of processes, memory, descriptors

_T = TypeVar("_T")


def become_subreaper() -> None:
    """From now on orphans among our descendants become our children, where `descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own, so that a Ctrl-C in the terminal reaches only this process.

    stdout, stderr: descriptors for its output (default: ours). Raises RollbackError where the system refuses; where it
    is short of something, as behind an OOM kill, that is said, and tried again for some seconds.
    """
    return _through_shortage(
        "starting torchrun",
        lambda: subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout, stderr=stderr),
        say,
        "see the limits of this system (ulimit -a), and how long the arguments and the skip list are",
    )


def _through_shortage(doing: str, act: Callable[[], _T], say: Callable[[str], None], hint: str) -> _T:
    """What `act` gives, which is called again for some seconds where the system is short of something."""

    def reported() -> _T:
        with reporting(RollbackError, doing, hint):
            return act()

    return patiently(reported, say, passes=_is_shortage)


def _is_shortage(error: RollbackError) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in _SHORTAGES


def descendants(apart_from: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """All living descendants. apart_from: processes that are no attempt's, as those that existed before this program
    (`exec` keeps children), with all that they have started since: a tracker's has a process of its own that sends."""
    known = set(apart_from)
    for process in [*known]:
        with contextlib.suppress(psutil.Error):  # it has ended
            known.update(process.children(recursive=True))
    return [
        process for process in psutil.Process().children(recursive=True) if process not in known and _is_alive(process)
    ]


def living_ranks(beats: Mapping[int, Heartbeat], paths: RunPaths) -> dict[int, psutil.Process]:
    """The processes of the ranks with these heartbeats that this process started, by rank.

    Somebody else may have written a heartbeat file, so only our own descendants count. One that cannot be looked at for
    a moment, as no descriptor is free, is left out: whoever asks comes back.
    """
    found = {rank: _process_of(beat) for rank, beat in beats.items()}
    return {
        rank: process for rank, process in found.items() if process is not None and _is_of_this_launch(process, paths)
    }


def ranks_of(torchrun: int) -> list[psutil.Process]:
    """The living ranks of the torchrun with this pid: its children without the fork server."""
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(torchrun).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile, and the others have not
                if child.name() != FORK_SERVER and _is_alive(child):
                    found.append(child)
    return found


def dead_ranks(beats: Mapping[int, Heartbeat]) -> list[int]:
    """The ranks with these heartbeats that ran here and are gone without a word about their end."""
    return [
        rank
        for rank, beat in beats.items()
        if beat.host == THIS_HOST and beat.doing not in ("ended", LEAVING) and not runs(beat.pid, beat.start)
    ]


def leftovers(paths: RunPaths) -> list[psutil.Process]:
    """Living processes of earlier attempts, whose supervisor was killed. Call it while holding the run directory.

    The environment of such a process says that a supervisor which is gone started it for this run directory. Only the
    process's starter can write its environment. Files in the run directory do not count. Raises OSError where the
    system is too short of something to look.
    """
    own = {process.pid for process in [psutil.Process(), *psutil.Process().parents()]}
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue  # another user's, a kernel thread, or gone
        except OSError as error:
            if error.errno in _SHORTAGES:  # it may be one of them
                raise
            continue
        supervisor = environment.get(ENV_SUPERVISOR)
        if environment.get(ENV_RUN) == paths.address and supervisor and not is_running(supervisor):
            found.append(process)
    return [process for process in found if process.pid not in own and _is_alive(process)]


def _is_of_this_launch(process: psutil.Process, paths: RunPaths) -> bool:
    """Whether a process is our descendant and was started for this run directory.

    A program that sets its title overwrites its environment in /proc, so any process between the two may have the mark.
    """
    try:
        line = [process, *process.parents()]
    except (psutil.Error, OSError):
        return False
    pids = [ancestor.pid for ancestor in line]
    if os.getpid() not in pids:
        return False
    mark = paths.address, str(os.getpid())
    return any(_mark_of(ancestor) == mark for ancestor in line[: pids.index(os.getpid())])


def _mark_of(process: psutil.Process) -> tuple[str | None, str]:
    """The run directory that a process was started for, and the pid of the supervisor that started it."""
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
    except (psutil.Error, OSError, ValueError, OverflowError):  # also a number that is no pid
        return None
    return process if runs(heartbeat.pid, heartbeat.start) else None


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send(processes: Iterable[psutil.Process], signum: signal.Signals) -> None:
    """Signal processes. Those that have ended are ignored, and those of another user: a rank may start one by sudo."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(signum)


def until_ended(end: Callable[[], None], say: Callable[[str], None]) -> None:
    """Call `end`, which ends the processes of an attempt, and call it again for some seconds where the system is short
    of something, as of descriptors to look at processes. Raises RollbackError where that lasts."""
    hint = f"{_NOT_ANOTHER}; see the limits of this system (ulimit -a), then run the same command again: it ends them"
    _through_shortage(_ENDING, end, say, hint)


def end_all(find: Callable[[], list[psutil.Process]], *, patience: float) -> None:
    """End all processes that `find` finds: SIGTERM, `patience` seconds, then SIGKILL until none is left.

    Raises RollbackError with the processes that cannot be killed. They are in an uninterruptible system call, mostly
    because a device or a network file system does not answer.
    """
    processes = find()
    send(processes, signal.SIGTERM)
    psutil.wait_procs(processes, timeout=patience)
    deadline = time.monotonic() + _UNKILLABLE_AFTER
    while processes := find():
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in processes)
            raise RollbackError(
                f"{_ENDING}: {pids} cannot be killed after {_UNKILLABLE_AFTER:.0f} s",
                hint=f"{_NOT_ANOTHER}; see what these processes wait for (cat /proc/PID/stack, dmesg), then run the "
                "same command again",
            )
        send(processes, signal.SIGKILL)
        psutil.wait_procs(processes, timeout=1.0)


def reap(apart_from: Iterable[psutil.Process]) -> None:
    """Collect ended orphans that became our children. apart_from: children whose status somebody here waits for (a
    `Popen` would take one that it cannot get for 0)."""
    waited_for = {process.pid for process in apart_from}
    for child in psutil.Process().children():
        if child.pid not in waited_for:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
