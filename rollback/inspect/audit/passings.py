"""Under which conditions batches were passed over, each time that they were. Pure.

A batch that is passed over again holds the same samples on each rank, unless there is another number of ranks since, or
other data, or samples are left out that were not. Then the records of ranks differ, and those of ranks that are no more
are of the time before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from rollback.facts.training import Accepted, Attached, JournalEntry, PassedOver, SampleQuarantine, Window
from rollback.rundir.journal.journal import of_kinds

CONDITIONS = frozenset({Attached, Accepted, SampleQuarantine, PassedOver})
"""The kinds of facts that tell. Who asks for each of many ranks leaves others out once."""


class Passing(NamedTuple):
    """The last time that a batch was passed over. ranks: that there were; changes: that there had been of what batches
    hold; alike: whether that was so each time before, too."""

    ranks: int
    changes: int
    alike: bool


def passings(records: Sequence[JournalEntry], batches: Sequence[int]) -> dict[int, Passing]:
    """Of those of the batches, in order, that the journal calls passed over."""
    found: dict[int, Passing] = {}
    ranks = changes = 0
    for record in of_kinds(records, CONDITIONS):
        match record.fact:
            case Attached() as fact:
                ranks = fact.world_size
            case Accepted() | SampleQuarantine():
                changes += 1
            case PassedOver() as fact if ranks:
                for batch in batches[bisect_left(batches, fact.first) : bisect_right(batches, fact.last)]:
                    *before, alike = found.get(batch, (ranks, changes, True))
                    found[batch] = Passing(ranks, changes, alike and before == [ranks, changes])
    return found


class WindowIndex:
    """Which of many windows have a batch. They may overlap."""

    def __init__(self, windows: Iterable[Window]) -> None:
        self._windows = sorted(enumerate(windows), key=lambda item: item[1].first)
        self._firsts = [window.first for _, window in self._windows]
        self._reached = list(accumulate((window.last for _, window in self._windows), max))
        """By each window and those before it."""

    def holding(self, batch: int) -> list[int]:
        """The places of the windows that have it, in the order in which they were given."""
        place, found = bisect_right(self._firsts, batch), []
        while place and self._reached[place - 1] >= batch:
            place -= 1
            given, window = self._windows[place]
            if window.last >= batch:
                found.append(given)
        return sorted(found)


def counts(passed: Mapping[int, Passing], batch: int, rank: int) -> bool:
    """Whether a rank's record of a batch is of the last time. Where no journal tells, it is taken for that."""
    return batch not in passed or rank < passed[batch].ranks
