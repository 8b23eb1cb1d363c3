"""What a run directory tells, in the order in which a tracker should hear it. Pure.

Metrics and facts come from different files, the metrics up to a second late. A *leg* is a stretch of steps without a
way back: one attempt and one timeline in it. Within a leg steps only grow. Facts say which leg they belong to: an
incident ends its leg, so it is told after the leg's steps; passed-over batches begin theirs. The metrics of a long run
come in several pieces, and a fact waits until those before it have been told.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rollback.facts.training import Incident, JournalEntry, PassedOver, Planned, Restored
from rollback.rundir.records import Metric


class Leg(NamedTuple):
    """A stretch of steps without a way back, in order."""

    attempt: int
    timeline: int


_BEGINS, _STEPS, _ENDS = range(3)


class Story:
    """Puts what is new into order, piece by piece."""

    def __init__(self) -> None:
        self._timeline = 0
        self._waiting: list[tuple[tuple[Leg, int], JournalEntry]] = []

    def in_order(
        self, records: Iterable[JournalEntry], metrics: Iterable[Metric]
    ) -> list[tuple[Leg, Metric | JournalEntry]]:
        """New facts of the ranks and new metrics in one order; facts that no tracker shows are left out.

        Read the facts before the metrics: a leg's metrics are on disk before the incident that ends it is. A fact
        behind the last metric is told by the first call without any.
        """
        for record in records:
            match record.fact:
                case Incident() as fact:
                    self._timeline, place = fact.timeline, _ENDS
                case Planned() | Restored():
                    place = _ENDS
                case PassedOver() as fact:
                    self._timeline, place = fact.timeline, _BEGINS
                case _:
                    continue
            self._waiting.append(((Leg(record.attempt, self._timeline), place), record))
        told: list[tuple[tuple[Leg, int], Metric | JournalEntry]] = []
        told += [((Leg(metric.attempt, metric.timeline), _STEPS), metric) for metric in metrics]
        reached = max((key for key, _ in told), default=None)
        told += [pair for pair in self._waiting if reached is None or pair[0] < reached]
        self._waiting = [pair for pair in self._waiting if reached is not None and pair[0] > reached]
        return [(key[0], item) for key, item in sorted(told, key=lambda pair: pair[0])]
