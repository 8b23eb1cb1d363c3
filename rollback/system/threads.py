"""Starting a thread where the system may refuse it (`ulimit -u`, a container's limit of processes), one whose result is
waited for, one that does something again and again, several that share work, and the priority of one."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from rollback.errors import RollbackError

_NICENESS = 10
_P = ParamSpec("_P")
_T = TypeVar("_T")


def start_thread(thread: threading.Thread) -> None:
    """Raises RollbackError where none can be made; Python's own error is a RuntimeError like any other. The thread may
    be started later."""
    try:
        thread.start()
    except RuntimeError as error:
        raise _refused(thread.name, error) from error


def _refused(name: str, error: RuntimeError) -> RollbackError:
    return RollbackError(
        f"starting a thread ({name}): {error}",
        hint="raise the limit of processes, of which each thread is one (ulimit -u, or the container's pids), or that "
        "of memory (ulimit -v), where each has its stack",
    )


class Threads(ThreadPoolExecutor):
    """At most so many, whose names begin with this one. `submit` and `map` raise RollbackError as `start_thread`."""

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, thread_name_prefix=name)
        self._name = name

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> "Future[_T]":
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "new thread" not in str(error):  # it was shut down
                raise
            raise _refused(self._name, error) from error


def in_daemon(act: Callable[[], _T], name: str) -> "Future[_T]":
    """What comes of `act`, which begins at once in a thread of this name; also where no thread can be made. The thread
    cannot keep the process from ending."""
    ended: Future[_T] = Future()

    def run() -> None:
        try:
            ended.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            ended.set_exception(error)

    try:
        start_thread(threading.Thread(target=run, name=name, daemon=True))
    except RollbackError as error:
        ended.set_exception(error)
    return ended


@contextmanager
def called_every(name: str, every: float, act: Callable[[], None]) -> Iterator[None]:
    """In this block: a thread of this name calls `act` each time that so many seconds have passed. Once the block is
    left, it is not called any more. Raises RollbackError as `start_thread`."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(every):
            act()

    thread = threading.Thread(target=run, name=name, daemon=True)
    start_thread(thread)
    try:
        yield
    finally:
        over.set()
        thread.join()


def lower_priority() -> None:
    """Lower the priority of the calling thread: the cores belong to the ranks. On Linux each thread has its own
    priority."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
