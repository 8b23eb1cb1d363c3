"""Whether this rank has been told to leave, and goes on all the same.

A script's bare `except:` around `next(batches)`, meant for the end of an epoch or for a sample that cannot be read,
catches the SystemExit by which a guard ends its rank. It would go on with a guard that is closed: past a stop, past a
return that was given up, or for ever at the batch that cannot be read.
"""

import contextlib
import os
import sys

from rollback.train.run import supervised


class Departure:
    """Of one guard's rank."""

    def __init__(self) -> None:
        self._told: SystemExit | None = None
        self._again = False

    def require_none(self) -> None:
        """End the rank again, if it was told to leave; the second time by force, if there is a supervisor."""
        if self._told is None:
            return
        if self._again and supervised():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed it
                    stream.flush()
            os._exit(self._told.code if isinstance(self._told.code, int) else 1)
        self._again = True
        raise SystemExit(*self._told.args)

    def note(self, told: SystemExit) -> None:
        """The rank is told to leave, and its guard is closed, or about to be."""
        self._told = SystemExit(*told.args)  # without the frames that it has passed through
