"""Starting a thread where the system may refuse it (`ulimit -u`, a container's limit of processes), one whose result is
waited for, one that does something again and again, and the priority of one."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

from rollback.errors import RollbackError

_NICENESS = 10
_T = TypeVar("_T")


def start_thread(thread: threading.Thread) -> None:
    """Raises RollbackError where none can be made; Python's own error is a RuntimeError like any other. The thread may
    be started later."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RollbackError(
            f"starting a thread ({thread.name}): {error}",
            hint="raise the limit of processes, of which each thread is one: ulimit -u, or the container's (pids)",
        ) from error


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
