"""The part of a run's record that the status needs, updated fact by fact. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollback.facts.history import History, fold, merge_windows
from rollback.facts.training import (
    Advice,
    Attached,
    AttemptEnded,
    AttemptStarted,
    Committed,
    Drained,
    DrainFailed,
    FinalStateLost,
    Finished,
    JournalEntry,
    LastSnapshotMade,
    PassedOver,
    RestartScheduled,
    Restored,
    RunEnded,
    ScriptLeft,
    Stopped,
    Window,
)
from rollback.inspect.audit.ending import ending_of
from rollback.inspect.audit.reading import merge
from rollback.inspect.audit.report import Ending, Point

_TURNS = (AttemptStarted, Attached, Finished, FinalStateLost, ScriptLeft, Stopped, AttemptEnded, RunEnded)


@dataclass
class RunRecord:
    """The state of a run after the facts that were taken in."""

    history: History = field(default_factory=History)
    ending: Ending | None = None
    passed_over: list[Window] = field(default_factory=list)
    advice: dict[str, str] = field(default_factory=dict)
    point: Point | None = None
    """The position of the run at the last fact."""
    begun: JournalEntry | None = None
    """The line that began the present stretch of training."""
    waiting: JournalEntry | None = None
    """The line that scheduled an attempt which has not started."""
    lost: Window | None = None
    """The steps that were undone and must be done again."""
    began: str | None = None
    """Time of the first fact."""
    drained: JournalEntry | None = None
    """The last copy to the durable ring."""
    undrained: str | None = None
    """Why nothing can be copied now."""
    last_snapshot: str | None = None
    """How the state was kept when an attempt ended last, and the steps lost, in words."""
    _reached: int | None = None
    _turns: tuple[list[JournalEntry], list[JournalEntry]] = field(default_factory=lambda: ([], []))

    def take_in(self, train: Sequence[JournalEntry], supervisor: Sequence[JournalEntry]) -> None:
        """Add the new entries of both journals. Raises JournalDamaged where facts contradict each other."""
        fold(train, self.history)
        news = merge(train, supervisor)
        for record in news:
            self._take(record)
        self.history.last_attempt = max([self.history.last_attempt, *(record.attempt for record in supervisor)])
        self.began = self.began or min((record.at for record in news), default=None)
        for turns, journal in zip(self._turns, (train, supervisor), strict=True):
            turns += [r for r in journal if isinstance(r.fact, _TURNS)]
        self.ending = ending_of(merge(*self._turns))

    def _take(self, record: JournalEntry) -> None:
        match record.fact:
            case Attached() as fact:
                self._stand_at(fact.step, fact.batch)
                self.begun = record
                self.lost = _stretch(fact.step, self._reached)
            case Restored() as fact:
                self._stand_at(fact.step, fact.batch)
                self.begun = record
                self.lost = _stretch(fact.step, fact.step + fact.steps_lost)
            case Committed() as fact:
                self._stand_at(fact.step, fact.batch)
            case PassedOver() as fact:
                self.passed_over = merge_windows([*self.passed_over, fact.window])
            case Advice() as fact:
                self.advice[fact.code] = fact.text
            case AttemptStarted() | RunEnded():
                self.waiting = None
            case AttemptEnded() as fact:
                self._reached = fact.step
            case LastSnapshotMade() as fact:
                self.last_snapshot = fact.in_words()
            case RestartScheduled():
                self.waiting = record
            case Drained():
                self.drained, self.undrained = record, None
            case DrainFailed() as fact:
                self.undrained = fact.error
            case _:
                pass

    def _stand_at(self, step: int, batch: int) -> None:
        self.point = Point(step=step, batch=batch)


def _stretch(step: int, reached: int | None) -> Window | None:
    return Window(first=step, last=reached) if reached is not None and reached > step else None
