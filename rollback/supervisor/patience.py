"""What the system refuses for a moment ends no run where no rank runs: a disk that is away, a shortage of memory."""

import time
from collections.abc import Callable
from typing import TypeVar

from rollback.errors import RollbackError, may_pass

_REFUSED_FOR = 10.0  # seconds after which it is not waited for any longer
_POLL = 0.1
_T = TypeVar("_T")


def patiently(
    act: Callable[[], _T],
    say: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
    passes: Callable[[RollbackError], bool] = may_pass,
) -> _T:
    """What `act` gives, which is called again where the system refuses. interrupted: whether nobody is to wait any
    longer. passes: whether another try may succeed.

    Raises the RollbackError of `act` where that lasts, and at once where it does not pass: as of a damaged record.
    """
    until, told = time.monotonic() + _REFUSED_FOR, False
    while True:
        try:
            return act()
        except RollbackError as error:
            if not passes(error) or interrupted() or time.monotonic() > until:
                raise
            if not told:
                say(f"{error.message}; it is tried again for {_REFUSED_FOR:.0f} s")
        told = True
        time.sleep(_POLL)
