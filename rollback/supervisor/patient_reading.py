"""Reads the record where no rank runs: what a disk refuses for a moment ends no run."""

import time
from collections.abc import Callable
from typing import TypeVar

from rollback.errors import RunDirectoryError, may_pass

_DISK_RETURNS = 10.0  # seconds in which a disk that refuses the record may be there again
_POLL = 0.1
_T = TypeVar("_T")


def read_patiently(
    read: Callable[[], _T], say: Callable[[str], None], insistent: Callable[[], bool] = lambda: False
) -> _T:
    """What `read` gives, which is called again where the disk refuses. insistent: whether nobody is to wait any longer.

    Raises RunDirectoryError where that lasts, and at once where the record is damaged.
    """
    until, told = time.monotonic() + _DISK_RETURNS, False
    while True:
        try:
            return read()
        except RunDirectoryError as error:
            if not may_pass(error) or insistent() or time.monotonic() > until:
                raise
            if not told:
                say(f"{error.message}; it is tried again for {_DISK_RETURNS:.0f} s")
        told = True
        time.sleep(_POLL)
