"""What a run directory tells, in the order in which a tracker should hear it. Pure.

Metrics and facts come from different files, the metrics up to a second late. A *leg* is a stretch of steps without a
way back: one attempt and one timeline in it. Within a leg steps only grow, and so they must for W&B, which would put a
step that comes late into one that was logged already. Each fact has its place among the steps of its leg: batches are
passed over before a step, and an incident is called behind one. A fact waits until the steps before it have been told.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rollback.facts.training import Incident, JournalEntry, PassedOver, Planned, Restored
from rollback.rundir.metrics.metric_lines import Metric


class Leg(NamedTuple):
    """A stretch of steps without a way back, in order."""

    attempt: int
    timeline: int


_BEFORE, _STEP, _BEHIND = range(3)


class StoryPlace(NamedTuple):
    """Where something belongs in the story: in order."""

    leg: Leg
    step: int
    side: int
    """Before a step, the step, or behind it."""


_Told = tuple[Leg, Metric | JournalEntry]


class Story:
    """Puts what is new into order, piece by piece."""

    def __init__(self) -> None:
        self._timeline = self._step = 0  # of the last incident: what is done about it is told with it
        self._waiting: list[tuple[StoryPlace, JournalEntry]] = []
        self._reached: StoryPlace | None = None

    def in_order(self, records: Iterable[JournalEntry], metrics: Iterable[Metric]) -> list[_Told]:
        """New facts of the ranks and new metrics in one order; facts that no tracker shows are left out.

        Read the facts before the metrics: those up to an incident's step are on disk before the incident is, so it is
        told by the first call without any. Those of the steps before a skip need not be.
        """
        for record in records:
            match record.fact:
                case Incident() as fact:
                    self._timeline, self._step = fact.timeline, fact.detection_step
                    place = StoryPlace(Leg(record.attempt, fact.timeline), fact.detection_step, _BEHIND)
                case Planned() | Restored():
                    place = StoryPlace(Leg(record.attempt, self._timeline), self._step, _BEHIND)
                case PassedOver() as fact:
                    place = StoryPlace(Leg(record.attempt, fact.timeline), fact.step, _BEFORE)
                case _:
                    continue
            self._waiting.append((place, record))
        steps = [(StoryPlace(Leg(metric.attempt, metric.timeline), metric.step, _STEP), metric) for metric in metrics]
        known = [place for place, _ in steps] or [place for place, _ in self._waiting if place.side == _BEHIND]
        self._reached = max(known, default=self._reached)
        return self._tell(steps, self._reached)

    def rest(self) -> list[_Told]:
        """The facts that still wait, where no more steps will come."""
        return self._tell([], max((place for place, _ in self._waiting), default=None))

    def _tell(self, steps: list[tuple[StoryPlace, Metric]], reached: StoryPlace | None) -> list[_Told]:
        told: list[tuple[StoryPlace, Metric | JournalEntry]] = [*steps]
        waiting, self._waiting = self._waiting, []
        for pair in waiting:
            (told if reached is not None and pair[0] <= reached else self._waiting).append(pair)
        return [(place.leg, item) for place, item in sorted(told, key=lambda pair: pair[0])]
