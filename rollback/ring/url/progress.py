"""Whether anything gets through to a ring at a URL.

What fails there is tried again, by the file system itself as well, and that takes minutes. Who holds something
meanwhile wants to know sooner.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollback.system.threads import called_every

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
        self._last, calls = time.monotonic(), [act]

        def watch() -> None:
            if calls and time.monotonic() - self._last > STUCK:
                calls.pop()()

        with called_every("rollback-stuck", STUCK / 10, watch):
            yield
