"""One process at a time runs a run directory.

The kernel's lock on RUN/lock decides: it is released the moment its holder dies, however that happens. holder.json
beside it only tells people who the holder is.
"""

import contextlib
import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path

import filelock

from rollback.errors import RunDirectoryError, RunInUse
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.processes import Alive, is_alive, start_of
from rollback.system.small_json import read_json

HOLDER_LIMIT = 1 << 16
_WITHOUT_LOCKS = "; the file system has no locks (flock), so this is told by a file: where nobody is there, rm {}"


class RunLock:
    """Holds a run directory from construction until `release` or the process's death.

    Makes the directory if it does not exist. Raises RunInUse naming the holder, or RunDirectoryError.
    """

    def __init__(self, paths: RunPaths, role: str) -> None:
        pid, since = os.getpid(), datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._paths = paths
        self._holder: dict[str, object] = {
            "pid": pid, "start": start_of(pid), "host": socket.gethostname(), "since": since, "role": role,
        }  # fmt: skip
        self._lock, self._file = self._take()

    def _take(self) -> tuple[filelock.BaseFileLock, tuple[int, int]]:
        """The lock, and which file it is at this moment. Raises RunInUse, RunDirectoryError."""
        paths = self._paths
        try:
            was_there = paths.lock.exists()
            files.make_directory(paths.root)
            for path in (paths.lock, paths.holder):
                files.require_ours(path)
            lock = filelock.FileLock(paths.lock, timeout=0, mode=files.file_mode(), thread_local=False)
            lock.acquire()
            file = _file_at(paths.lock)
        except filelock.Timeout as error:
            by_file = isinstance(lock, filelock.SoftFileLock)  # which stays where a host has died
            raise RunInUse(
                f"the run directory {paths.root} is in use by {_describe_holder(paths)}",
                hint=_way_out(read_holder(paths) or {}) + (_WITHOUT_LOCKS.format(paths.lock) if by_file else ""),
            ) from error
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks, and an old filelock
            name, why = getattr(error, "filename", None), getattr(error, "strerror", None)
            raise RunDirectoryError(
                f"taking the lock {paths.lock} ({name or paths.lock.name}): {why or error}",
                hint="the run directory must be a directory that this user can write to",
            ) from error
        try:
            write_file(paths.holder, json.dumps(self._holder).encode(), durable=False)
        except OSError as error:
            if not was_there:
                paths.lock.unlink(missing_ok=True)
            lock.release()
            raise RunDirectoryError(
                f"writing {paths.holder}: {error.strerror or error}",
                hint="the run directory must be writable and its disk not full",
            ) from error
        return lock, file

    @property
    def in_place(self) -> bool:
        """Whether the file at the lock's name is the one that is locked."""
        with contextlib.suppress(OSError):
            return _file_at(self._paths.lock) == self._file
        return False

    def keep(self) -> None:
        """Take the lock anew where the run directory was moved with it, or somebody has removed it, and the directory
        has been made again since: else a second launch would find it free.

        Raises RunInUse where another launch has it by now. A disk that refuses ends nothing.
        """
        if self.in_place or not os.path.isdir(self._paths.root):
            return
        try:
            taken = self._take()
        except RunDirectoryError:
            return
        except RunInUse:
            if read_holder(self._paths) == self._holder:  # a file system that numbers its files anew
                return
            raise
        self._lock.release()
        self._lock, self._file = taken

    def release(self) -> None:
        with contextlib.suppress(OSError):  # a disk that has become read-only: the lock itself is what counts
            if read_holder(self._paths) == self._holder:  # else a host that was cut off from it has lost the lock
                files.unlink(self._paths.holder)
        self._lock.release()


def _file_at(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def read_holder(paths: RunPaths) -> dict[str, object] | None:
    """Content of holder.json, or None. It may be out of date: only the lock itself tells whether the holder lives."""
    try:
        body = read_json(paths.holder, HOLDER_LIMIT)
    except (OSError, ValueError):
        return None
    return body if isinstance(body, dict) else None


def is_holder_alive(paths: RunPaths) -> Alive | None:
    """Whether who says in holder.json that it holds the run directory is alive; None: nobody says so."""
    holder = read_holder(paths)
    return None if holder is None else is_alive(holder.get("pid"), holder.get("host"), holder.get("start"))


def launch_of(paths: RunPaths) -> str | None:
    """A text that names the launch that holds the run directory, from holder.json, and no other launch."""
    holder = read_holder(paths)
    return f"{holder.get('host')}:{holder.get('pid')}:{holder.get('since')}"[:200] if holder else None


def _way_out(holder: dict[str, object]) -> str:
    pid = os.getpid()
    if [holder.get(name) for name in ("pid", "start", "host")] == [pid, start_of(pid), socket.gethostname()]:
        return (
            "it is a guard of this very process: make one guard, in front of all loops; for another training call its "
            "close() first, and give the other guard a directory of its own (run=...)"
        )
    return "wait for it, stop it, or give this job another run directory (--run DIR)"


def _describe_holder(paths: RunPaths) -> str:
    holder = read_holder(paths)
    if holder is None:
        return "another process (which has not said yet who it is)"
    try:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(str(holder.get("since")))
        minutes, seconds = divmod(max(0, int(age.total_seconds())), 60)
        since = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
    except (ValueError, TypeError):
        since = "an unknown time"
    return f"{holder.get('role')} with pid {holder.get('pid')} on host {holder.get('host')}, since {since}"
