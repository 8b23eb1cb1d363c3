"""Sums rows of numbers over the ranks of one host, in memory that they share.

A backend adds up the same hundred bytes by threads of its own, which hand them to each other. Where all cores compute,
each of these hand-overs waits for a core and takes it from a rank. Here nothing runs besides the ranks themselves.

Each rank has two rows, used in turn, and a count of its puts. `put` writes this rank's row, then its count, and wakes
who waits for that (a futex); `rows` waits until all counts have come to its own. The counts alone say what is there: a
wait that was broken off may begin again, and a rank that dies before it has woken anybody has put its row all the same.
Two rows are enough: a rank puts a row after it has read the one before, for which all others have put theirs.
"""

import contextlib
import ctypes
import errno
import os
import platform
import secrets
import signal
import stat
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence

from rollback.system.processes import is_running, name_process
from rollback.system.region import Region
from rollback.train.comm.ranks import Ranks

# Elsewhere the processor may show another rank the count before the row.
_ABLE = (sys.platform, platform.machine()) == ("linux", "x86_64") and sys.maxsize > 1 << 32
_FUTEX, _WAIT, _WAKE, _EVERYBODY = 202, 0, 1, (1 << 31) - 1
_WAITING = ctypes.CDLL(None)  # lets other threads of Python run meanwhile
_AT_ONCE = ctypes.PyDLL(None)
for _libc in (_WAITING, _AT_ONCE):
    _libc.syscall.argtypes = (*[ctypes.c_long] * 2, *[ctypes.c_int] * 2, ctypes.c_void_p)
_TOKEN, _CELL = 16, 64  # bytes: of the head, by which the memory is known; of a count, in a cache line of its own
_COUNTS = 1 << 32
_MOMENT = 0.1  # seconds of waiting after which somebody looks whether the others live
_LOOK_EVERY = 0.5
_HELD_BACK = signal.valid_signals() - {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class HostSums:
    """`put` and `rows` are called in turn, and by all ranks alike. `close` it. Made by `share`.

    processes: of all ranks, as `name_process` names them. patience: seconds to wait for the others.
    """

    def __init__(self, rank: int, width: int, memory: Region, processes: Sequence[str], patience: float) -> None:
        self._rank, self._processes, self._patience = rank, processes, patience
        world_size = len(processes)
        self._address = memory.address + _CELL
        # No NumPy and no torch: what little is done here is in no cache where a rank has just computed, and Python is.
        self._counts = memory.view[_CELL : _rows_begin(world_size)].cast("I")[:: _CELL // 4]
        numbers = memory.view[_rows_begin(world_size) :].cast("d")
        rows = [numbers[width * place :][:width] for place in range(2 * world_size)]
        self._rows = rows[:world_size], rows[world_size:]
        self._puts = 0
        self._awaited = 0
        self._gone: list[int] = []
        self._closed = False

    def put(self, numbers: Sequence[float]) -> None:
        """This rank's row: at most `width` numbers; what is behind them says nothing. Does not wait."""
        puts = self._puts + 1
        self._rows[puts % 2][self._rank][: len(numbers)] = array("d", numbers)
        self._counts[self._rank] = puts % _COUNTS
        self._puts = puts
        self._wake(self._rank)

    def rows(self) -> "Sequence[memoryview[float]]":
        """What each rank has put last: `width` numbers, until `put` is called again. Waits for all of them.

        Raises RuntimeError where a rank has ended without it, patience is over, or this was closed.
        """
        if self._late():
            began = time.monotonic()
            if not self._wait(began + _MOMENT):
                self._wait_for_late_ones(began + self._patience)
        if self._closed:
            raise RuntimeError("a beat was waited for while the guard was closed: nothing can be read any more")
        return self._rows[self._puts % 2]

    def close(self) -> None:
        """What was put stays for those who have not read it. Not collective. The memory is given back when nobody here
        reads it or waits any more."""
        self._closed = True
        for rank in range(len(self._processes)):
            self._wake(rank)

    def _wait_for_late_ones(self, until: float) -> None:
        """The wait itself is one call without Python in it, or this rank would seem to move while the job hangs. So
        signals have their turn behind it, as behind a collective of a backend."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over,), name="rollback-late-ranks", daemon=True)
        try:
            with contextlib.suppress(RuntimeError):  # no thread can be made: then nobody looks
                watch.start()
            with _holding_signals_back():
                arrived = self._wait(until)
        finally:
            over.set()
            if watch.ident is not None:
                watch.join()
        if self._gone:
            raise RuntimeError(f"rank {self._gone[0]} has ended without its part of a beat (Connection closed by peer)")
        if not arrived and not self._closed:
            raise RuntimeError(
                f"timed out waiting {self._patience:.0f} s for the part of rank {self._awaited} in a beat"
            )

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY):
            ended = [rank for rank in self._late() if not is_running(self._processes[rank])]
            late = self._late()
            self._gone = [rank for rank in late if rank in ended]  # not one that has put it before it ended
            # Again at each look: a wake is lost on who is about to sleep, and who should have given one may be dead.
            if self._gone or self._closed or self._awaited not in late:
                self._wake(self._awaited)

    def _late(self) -> list[int]:
        own, late = self._puts, []
        for rank, count in enumerate(self._counts.tolist()):
            if (count - own) % _COUNTS >= _COUNTS // 2:
                late.append(rank)
        return late

    def _wait(self, until: float) -> bool:
        """Whether all have put their rows, at the latest at that moment. Also returns where it is of no use."""
        while late := self._late():
            self._awaited = rank = late[0]
            there, seconds = self._counts[rank], until - time.monotonic()
            if seconds <= 0 or self._gone or self._closed:
                return False
            if (there - self._puts) % _COUNTS >= _COUNTS // 2:
                at_most = _Timespec(int(seconds), int(seconds % 1 * 1e9))
                value = ctypes.c_int(there).value
                _WAITING.syscall(_FUTEX, self._address + _CELL * rank, _WAIT, value, ctypes.byref(at_most))
        return True

    def _wake(self, rank: int) -> None:
        _AT_ONCE.syscall(_FUTEX, self._address + _CELL * rank, _WAKE, _EVERYBODY, None)


@contextlib.contextmanager
def _holding_signals_back() -> Iterator[None]:
    """Other threads still take them, and Python's handlers run in the main thread behind this block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def share(ranks: Ranks, width: int) -> HostSums | None:
    """Collective: sums over all ranks. None, on all of them, where they are on several hosts, can share no memory, or
    cannot see each other's processes."""
    if ranks.host_count > 1:
        return None
    size = _rows_begin(ranks.world_size) + 2 * ranks.world_size * width * 8
    with contextlib.ExitStack() as held:
        memory: Region | None = None
        told: list[str] | None = None
        if _ABLE and ranks.is_rank_0:
            with contextlib.suppress(OSError):
                told = _make(held, size)
        told = ranks.from_first(told)
        if _ABLE and told is not None:
            with contextlib.suppress(OSError):
                memory = _open(size, *told)
        processes = ranks.from_each(_own_name() if memory is not None else None)
    seen = None not in processes and all(map(is_running, processes))
    if not ranks.all_of(memory is not None and seen):
        return None
    assert memory is not None
    return HostSums(ranks.rank, width, memory, processes, ranks.patience.total_seconds())


def _own_name() -> str | None:
    """None where others would find another process by that name: this one's number is of a namespace of its own."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") == str(os.getpid()):
            return name_process(os.getpid())
    return None


def _make(held: contextlib.ExitStack, size: int) -> list[str]:
    """Memory in no directory, which others find by this process: its path and its token. Raises OSError."""
    fd = os.memfd_create("rollback-beats")
    held.callback(os.close, fd)
    os.posix_fallocate(fd, 0, size)  # memory that is not there would end a rank with SIGBUS
    token = secrets.token_bytes(_TOKEN)
    os.pwrite(fd, token, 0)
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


def _rows_begin(world_size: int) -> int:
    return _CELL * (1 + world_size)
