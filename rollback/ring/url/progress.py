"""Whether anything gets through to a ring at a URL.

What fails there is tried again, by the file system itself as well, and that takes minutes. Who holds something
meanwhile wants to know sooner.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK = 5.0
"""Seconds."""


class StoreProgress:
    """One thread notes it."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def note(self) -> None:
        """An operation, or a part of a file, is through."""
        self._last = time.monotonic()

    @contextmanager
    def if_stuck(self, act: Callable[[], None]) -> Iterator[None]:
        """In this block: call it once, in a thread, when nothing has got through for `STUCK` seconds."""
        self._last, over = time.monotonic(), threading.Event()

        def watch() -> None:
            while not over.wait(STUCK / 10):
                if time.monotonic() - self._last > STUCK:
                    act()
                    break

        watching = threading.Thread(target=watch, name="rollback-stuck", daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
