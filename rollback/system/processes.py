"""Identity of processes, and what ours hears: that a child has ended, or that it is told to end.

All comparisons of processes are made here. The kernel reuses pids, so a process is identified by its pid and its start
time. The start time is compared in the kernel's own units: ticks since the machine was booted (`/proc/PID/stat`, field
22), together with the boot. A time of day would depend on the time of boot, which the kernel computes back from the
wall clock: when that clock is corrected by a second, every process would seem to be another one.
"""

import functools
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

Alive = Literal["yes", "no", "unknown"]
_STATE, _UTIME, _STIME, _START = 0, 11, 12, 19  # behind the name, which may hold blanks and brackets
_DEAD = ("Z", "X", "x")


def be_told_of_children() -> None:
    """From now on the kernel keeps the status of each child that has ended. Main thread.

    Where whoever started this process ignores SIGCHLD, as some do against zombies, it is ignored here too: the kernel
    then keeps none, and `Popen` takes every failure for status 0.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def cleaning_up_when_told_to_end() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP raise SystemExit in the main thread, as Ctrl-C raises KeyboardInterrupt: a command may
    have a child that trains, or a file of many gigabytes under a name for the time being. Main thread.

    The exit code is a shell's for the signal, 128 and its number. Whoever ignores one (nohup) goes on doing so.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    ours = [told for told in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(told) is signal.SIG_DFL]
    for told in ours:
        signal.signal(told, leave)
    try:
        yield
    finally:
        for told in ours:
            if signal.getsignal(told) is leave:
                signal.signal(told, signal.SIG_DFL)


def start_of(pid: int) -> str | None:
    """When a process began, for `==` on one host only; None where there is no such process, or its start is unknown."""
    fields = _stat(pid)
    return None if fields is None else f"{fields[_START]}@{_boot()}"


def name_process(pid: int) -> str:
    """`pid:start`, a unique name on its host. Raises ProcessLookupError where there is no such process."""
    if (start := start_of(pid)) is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return f"{pid}:{start}"


def runs(pid: int, start: str) -> bool:
    """Whether the process that began at `start` (see `start_of`) still runs."""
    try:
        fields = _read_stat(pid)
    except OSError:
        return True  # it cannot be told (no descriptor is free, say), and nobody is ended because of that
    return fields is not None and fields[_STATE] not in _DEAD and f"{fields[_START]}@{_boot()}" == start


def is_running(name: str) -> bool:
    """Whether the process that `name_process` named still runs."""
    pid, _, start = name.partition(":")
    return pid.isdigit() and runs(int(pid), start)


def is_alive(pid: object, host: object, start: object) -> Alive:
    """Whether a process of any host, as its record says, is alive. The same pid with another start is another process.
    start: see `start_of`; empty: not on record."""
    if host != socket.gethostname() or not isinstance(pid, int) or not 0 < pid < 1 << 31:
        return "unknown"
    if start:
        return "yes" if runs(pid, str(start)) else "no"
    return "no" if start_of(pid) is None else "unknown"


def state_of(pid: int) -> str | None:
    """The letter of a process's state in /proc (`T`: stopped); None where the process is gone."""
    fields = _stat(pid)
    return None if fields is None else fields[_STATE]


def ticks_computed(pid: int) -> int | None:
    """How long a process has computed, in the kernel's ticks; None where it is gone."""
    fields = _stat(pid)
    return None if fields is None else int(fields[_UTIME]) + int(fields[_STIME])


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; None also where they cannot be read."""
    try:
        return _read_stat(pid)
    except OSError:
        return None


def _read_stat(pid: int) -> list[str] | None:
    """None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields if len(fields) > _START else None


@functools.cache
def _boot() -> str:
    """A unique name of this boot of the machine; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
