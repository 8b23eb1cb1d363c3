"""Sums rows of numbers over the ranks of one host, in memory that they share.

A backend adds up the same hundred bytes by threads of its own, which hand them to each other. Where all cores compute,
each of these hand-overs waits for a core and takes it from a rank. Here nothing runs besides the ranks themselves.

Each rank has two rows, used in turn, and a semaphore. `put` writes this rank's row and posts the semaphores of all
others; `rows` waits for as many posts as there are others. The posts are of the right rows, and two rows are enough: a
rank puts a row after it has read the one before, for which all others have put theirs.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rollback.system.processes import is_running, name_process
from rollback.system.region import Region
from rollback.train.comm.ranks import Ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_ABLE = hasattr(_LIBC, "sem_clockwait") and hasattr(os, "memfd_create")
_TOKEN, _CELL = 16, 64  # bytes: of the head, by which the memory is known; of a semaphore, in a cache line of its own
_MOMENT = 0.1  # seconds of waiting after which somebody looks whether the others live
_LOOK_EVERY = 0.5


Rows = np.ndarray[Any, np.dtype[np.float64]]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class HostSums:
    """`put` and `rows` are called in turn, and by all ranks alike. `close` it. Made by `share`.

    processes: of all ranks, as `name_process` names them. patience: seconds to wait for the others.
    """

    def __init__(self, rank: int, width: int, memory: Region, processes: Sequence[str], patience: float) -> None:
        self._rank, self._memory, self._processes, self._patience = rank, memory, processes, patience
        world_size = len(processes)
        semaphores = _semaphores(memory, world_size)
        self._semaphore = semaphores.pop(rank)
        self._others = semaphores
        numbers = np.frombuffer(memory.view, np.float64, 2 * world_size * (width + 1), _rows_begin(world_size))
        self._numbers = numbers.reshape(2, world_size, width + 1)  # the last one of a row counts the puts
        self._puts = 0
        self._gone: list[int] = []

    def put(self, numbers: Sequence[float], more: Sequence[float] = ()) -> None:
        """This rank's row: at most `width` numbers; what is behind them says nothing. Does not wait."""
        self._puts += 1
        mine = self._present[self._rank]
        mine[: len(numbers)] = numbers
        if more:
            mine[len(numbers) : len(numbers) + len(more)] = more
        mine[-1] = self._puts
        for semaphore in self._others:
            _LIBC.sem_post(semaphore)

    def rows(self) -> Rows:
        """[ranks, width]: what the ranks have put last, until `put` is called again. Waits for all of them.

        Raises RuntimeError where a rank has ended without it, or patience is over.
        """
        for _ in self._others:
            if _LIBC.sem_trywait(self._semaphore) != 0 and not self._acquired(_MOMENT):
                self._wait_for_late_ones()
        return self._present[:, :-1]

    def close(self) -> None:
        """What was put stays for those who have not read it. Not collective."""
        if hasattr(self, "_numbers"):
            del self._numbers
            self._memory.close()

    @property
    def _present(self) -> Rows:
        rows: Rows = self._numbers[self._puts % 2]
        return rows

    def _wait_for_late_ones(self) -> None:
        """The wait itself is one call without Python in it, or this rank would seem to move while the job hangs."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name="rollback-late-ranks", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be made: then nobody looks
            watch.start()
        try:
            arrived = self._acquired(self._patience)
        finally:
            over.set()
            if watch.ident is not None:
                watch.join()
        if self._gone:
            raise RuntimeError(f"rank {self._gone[0]} has ended without its part of a beat (Connection closed by peer)")
        if not arrived:
            raise RuntimeError(
                f"timed out waiting {self._patience:.0f} s for the part of rank {self._late()[0]} in a beat"
            )

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY):
            ended = [rank for rank in self._late() if not is_running(self._processes[rank])]
            if gone := [rank for rank in self._late() if rank in ended]:  # not one that has put it before it ended
                self._gone = gone
                _LIBC.sem_post(self._semaphore)
                return

    def _late(self) -> list[int]:
        return np.flatnonzero(self._present[:, -1] != self._puts).tolist()

    def _acquired(self, seconds: float) -> bool:
        until = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(seconds * 1e9)
        at = _Timespec(*divmod(until, 10**9))
        while _LIBC.sem_clockwait(self._semaphore, time.CLOCK_MONOTONIC, ctypes.byref(at)) != 0:
            if (number := ctypes.get_errno()) == errno.ETIMEDOUT:
                return False
            if number != errno.EINTR:  # a signal, whose handler has its turn now
                raise OSError(number, os.strerror(number))
        return True


def share(ranks: Ranks, width: int) -> HostSums | None:
    """Collective: sums over all ranks. None, on all of them, where they are on several hosts or can share no memory."""
    if ranks.host_count > 1:
        return None
    size = _rows_begin(ranks.world_size) + 2 * ranks.world_size * (width + 1) * 8
    with contextlib.ExitStack() as held:
        memory: Region | None = None
        told: list[str] | None = None
        if _ABLE and ranks.first:
            with contextlib.suppress(OSError):
                told = _make(held, size, ranks.world_size)
        told = ranks.from_first(told)
        if _ABLE and told is not None:
            with contextlib.suppress(OSError):
                memory = _open(size, *told)
        processes = ranks.from_each(name_process(os.getpid()) if memory is not None else None)
    if memory is not None and None not in processes:
        return HostSums(ranks.rank, width, memory, processes, ranks.patience.total_seconds())
    if memory is not None:
        memory.close()
    return None


def _make(held: contextlib.ExitStack, size: int, world_size: int) -> list[str]:
    """Memory in no directory, which others find by this process: its path and its token."""
    fd = os.memfd_create("rollback-beats")
    held.callback(os.close, fd)
    os.ftruncate(fd, size)
    memory = Region(size, fd)
    memory.view[:_TOKEN] = token = secrets.token_bytes(_TOKEN)
    for semaphore in _semaphores(memory, world_size):
        if _LIBC.sem_init(semaphore, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")
    memory.close()
    return [f"/proc/{os.getpid()}/fd/{fd}", token.hex()]


def _open(size: int, path: str, token: str) -> Region:
    """Raises OSError, also for another file: ranks with process numbers of their own may find anything there."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise OSError(errno.ENOENT, "another file", path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.pread(fd, _TOKEN, 0) != bytes.fromhex(token):
            raise OSError(errno.ENOENT, "another file", path)
        return Region(size, fd)
    finally:
        os.close(fd)


def _semaphores(memory: Region, world_size: int) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(memory.address + _CELL * (1 + rank)) for rank in range(world_size)]


def _rows_begin(world_size: int) -> int:
    return _CELL * (1 + world_size)
