"""Starting a thread where the system may refuse it (`ulimit -u`, a container's limit of processes), a thread that does
something again and again, and the priority of one."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollback.errors import RollbackError

_NICENESS = 10


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
