"""What this rank is doing, and where. Heartbeats and failure records tell it."""

from collections.abc import Callable
from typing import NamedTuple


class Activity(NamedTuple):
    """What a rank is doing, and where."""

    doing: str
    step: int
    batch: int
    first: int
    last: int
    """The batches of its update, as far as known."""
    in_hand: bool = False
    """Whether this batch is read or trained on."""


class RankActivity:
    """The present activity of one guard's rank. The guard's parts set it; threads and hooks read it.

    step, batch: where the rank stands when it begins. A relaunch begins where it resumes: a rank that seemed to come
    there from 0 would be taken for one that trains.
    """

    def __init__(self, step: int, batch: int) -> None:
        self.now = Activity("attaching", step, batch, first=batch, last=batch)
        """Replaced as a whole, so that a thread never reads half of it."""
        self.empty_pass: int | None = None
        """The epoch of a pass over the guard that had no batch, until the next batch."""
        self.loop: Callable[[], object | None] = lambda: None
        """The script's loop over the guard; None where it is over or broken off."""
        self.evaluates: Callable[[], bool] = lambda: False
        """Whether the script evaluates, behind the update of the batch in hand: that batch is not what it works with
        then."""
        self.script_failed = False
        """Whether an exception that nobody caught, or an exit in the loop's body, has ended the script."""
