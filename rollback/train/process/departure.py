"""Whether this rank has been told to leave, and goes on all the same.

A script's bare `except:` around `next(batches)`, meant for the end of an epoch or for a sample that cannot be read,
catches the SystemExit by which a guard ends its rank. It would go on with a guard that is closed: past a stop, past a
return that was given up, or for ever at the batch that cannot be read.
"""

import os
import sys
from types import TracebackType

from rollback.train.run import supervised


class Departure:
    """Of one guard's rank. As a context: around what may end it, and what is not to be done behind that."""

    def __init__(self) -> None:
        self._told: SystemExit | None = None
        self._again = False

    def require_none(self) -> None:
        """End the rank again, if it was told to leave; the second time by force, if there is a supervisor."""
        if self._told is None:
            return
        if self._again and supervised():
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(self._told.code if isinstance(self._told.code, int) else 1)
        self._again = True
        raise SystemExit(*self._told.args)

    def __enter__(self) -> None:
        self.require_none()

    def __exit__(self, kind: object, raised: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(raised, SystemExit):
            self._told = SystemExit(*raised.args)  # without the frames that it has passed through
