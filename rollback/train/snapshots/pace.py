"""The number of steps between two snapshots, chosen so that they cost no more than a given share of the time.

Pure: every rank gets the same numbers from the pulse and computes the same answer.
"""

from math import ceil

from rollback.config import FIRST_PACE

CEILING = 500  # a crash, or a rollback, may cost so many steps; no snapshot is so dear that more should be at stake
_SLACK = 1.1
_TOO_RARE = 1.5  # measurements vary; a pace that is kept is easier to reason about than one that is just right


class SnapshotPace:
    """every: steps between two snapshots.

    overhead: the share of the time for which snapshots may block the loop. floor: the least number of steps.
    """

    def __init__(self, overhead: float, floor: int) -> None:
        self._overhead = overhead
        self._floor = min(floor, CEILING)
        self.every = max(FIRST_PACE, self._floor)

    def measure(self, stall: float, step_seconds: float) -> bool:
        """Note what the last snapshot and a step cost, in seconds. Returns whether the pace has changed."""
        if stall <= 0 or step_seconds <= 0:
            return False
        needed = ceil(min(stall / (self._overhead * step_seconds), CEILING))
        before = self.every
        if needed > self.every or needed * _TOO_RARE < self.every:
            self.every = max(self._floor, min(ceil(needed * _SLACK), CEILING))
        return self.every != before
