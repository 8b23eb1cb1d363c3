"""How many updates the runs of a drill have, and what must be smaller than in a real run for that. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FEWEST_STEPS = 60  # the sentinel learns for about 25, a checkpoint must have become good, and life goes on afterwards
MOST_STEPS = 120
REHEARSAL_STEPS = 6
_SECONDS_OF_A_RUN = 10.0
_PARTS = 6  # checkpoints in a run
_PROBATION = 9  # longer than the most patient sentinel, shorter than from one checkpoint to the next


@dataclass(frozen=True)
class Plan:
    """steps: updates of each run. strike: the update that a fault strikes. settings: of the guard, for so short a run.

    lasts: updates for which the disk is full: long enough for a checkpoint to fail, and for one to follow.
    """

    steps: int
    strike: int
    lasts: int
    settings: Mapping[str, Any]


def steps_for(seconds_per_step: float) -> int:
    """Updates of a run that takes about ten seconds, within bounds."""
    return max(FEWEST_STEPS, min(MOST_STEPS, int(_SECONDS_OF_A_RUN / max(seconds_per_step, 1e-6))))


def plan(steps: int, given: Mapping[str, Any]) -> Plan:
    """A plan for runs of so many updates. What the user says (`given`, settings by name) stands.

    Faults strike just before the fifth checkpoint: the fourth is good by then, and the fifth meets a full disk.
    """
    every = steps // _PARTS
    settings = {"snapshot_every": every, "probation": _PROBATION, "rewind": 5, "skip_after": 3}
    chosen = {name: value for name, value in settings.items() if given.get(name) in (None, "auto")}
    every = int(given["snapshot_every"]) if "snapshot_every" not in chosen else every
    every = every or steps
    late = 4 * steps // _PARTS
    at = late // every * every or late
    return Plan(steps=steps, strike=at - 1, lasts=max(2, every // 2), settings=chosen)
