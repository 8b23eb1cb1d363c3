"""The part of a run's record that the status needs, updated fact by fact. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollback.facts import training as facts
from rollback.facts.history import History, fold
from rollback.inspect.document import Point
from rollback.inspect.record.cost import TELLING
from rollback.inspect.record.ending import TURNS, RunEnding, ending_of, lacks_its_end
from rollback.inspect.record.reading import merge
from rollback.rundir.journal.journal import of_kind, of_kinds
from rollback.rundir.paths import CheckpointName

_SHOWN: frozenset[type[facts.Fact]] = frozenset({
    facts.Attached, facts.Restored, facts.Advice, facts.AttemptStarted, facts.RunEnded, facts.AttemptEnded,
    facts.SpareNodes, facts.LastSnapshotMade, facts.RestartScheduled, facts.Drained, facts.DrainFailed,
    facts.LeftDurableRing,
})  # fmt: skip


@dataclass
class RunRecord:
    """The state of a run after the facts that were taken in."""

    history: History = field(default_factory=History)
    ending: RunEnding | None = None
    lacks_its_end: bool = False
    """Whether a supervisor began the last attempt, and none has recorded its end."""
    passed_over: list[facts.Window] = field(default_factory=list)
    advice: dict[str, str] = field(default_factory=dict)
    begun: facts.JournalEntry | None = None
    """The line that began the present stretch of training."""
    waiting: tuple[str, facts.RestartScheduled] | None = None
    """What scheduled an attempt that has not started, and when."""
    cause: str | None = None
    """Why the last attempt has ended, in words."""
    lost: facts.Window | None = None
    """The steps that were undone and must be done again."""
    began: str | None = None
    """Time of the first fact."""
    copied: dict[str, tuple[str, facts.Drained]] = field(default_factory=dict)
    """The copies that are in the durable ring, by checkpoint, and when each was made."""
    undrained: str | None = None
    """Why nothing can be copied now."""
    last_snapshot: str | None = None
    """How the state was kept when an attempt ended last, and the steps lost, in words."""
    spares: facts.SpareNodes | None = None
    """The spare nodes that wait."""
    told: list[facts.JournalEntry] = field(default_factory=list)
    """How attempts began and ended, in one order."""
    _reached: int | None = None
    _kept_of: int | None = None
    _turns: tuple[list[facts.JournalEntry], list[facts.JournalEntry]] = field(default_factory=lambda: ([], []))

    def take_in(
        self, train: Sequence[facts.JournalEntry], supervisor: Sequence[facts.JournalEntry]
    ) -> list[facts.JournalEntry]:
        """Add the new entries of both journals, and return them in one order. Raises JournalDamaged where facts
        contradict each other."""
        fold(train, self.history)
        return self.begin(train, supervisor)

    def begin(
        self, train: Sequence[facts.JournalEntry], supervisor: Sequence[facts.JournalEntry]
    ) -> list[facts.JournalEntry]:
        """As `take_in`, where the history has the ranks' facts already. Of these, only the entries of `RARE_KINDS` are
        needed."""
        news = merge(train, supervisor)
        for record in of_kinds(news, _SHOWN):
            self._take(record)
        passed = [fact.window for _, fact in of_kind(news, facts.PassedOver)]
        if passed:
            self.passed_over = facts.Window.merged([*self.passed_over, *passed])
        self.history.last_attempt = max([self.history.last_attempt, *(record.attempt for record in supervisor)])
        self.began = self.began or min((record.at for record in news), default=None)
        for turns, journal in zip(self._turns, (train, supervisor), strict=True):
            turns.extend(of_kinds(journal, TURNS | TELLING))
        self.told = merge(*self._turns)
        self.ending, self.lacks_its_end = ending_of(self.told), lacks_its_end(self.told)
        return news

    @property
    def point(self) -> Point | None:
        """The position of the run at the last fact."""
        return Point(step=self.history.stood[0], batch=self.history.stood[1]) if self.history.stood else None

    @property
    def drained(self) -> tuple[str, facts.Drained] | None:
        """The copy of the newest checkpoint in the durable ring, and when it was made. An older one may be copied
        behind it: where a run stops, the newest good one, and a pin at any time."""
        counting = self.copied.keys() - self.history.discarded or self.copied
        return self.copied[CheckpointName.sorted(counting)[-1]] if counting else None

    def _take(self, record: facts.JournalEntry) -> None:
        match record.fact:
            case facts.Attached() as fact:
                self.begun = record
                self.lost = _stretch(fact.step, self._reached)
            case facts.Restored() as fact:
                self.begun = record
                self.lost = _stretch(fact.step, fact.step + fact.steps_lost)
            case facts.Advice() as fact:
                self.advice[fact.code] = fact.text
            case facts.AttemptStarted() | facts.RunEnded():
                self.waiting = None
            case facts.AttemptEnded() as fact:
                self._reached, self.cause = fact.step, fact.cause
                if fact.why is not None and self._kept_of != record.attempt:
                    self.last_snapshot = None  # that of an attempt before it
            case facts.SpareNodes() as fact:
                self.spares = fact
            case facts.LastSnapshotMade() as fact:
                self.last_snapshot, self._kept_of = fact.in_words(), record.attempt
            case facts.RestartScheduled() as fact:
                self.waiting = (record.at, fact)
            case facts.Drained() | facts.LeftDurableRing() as fact:
                self._take_copy(record.at, fact)
            case facts.DrainFailed() as fact:
                self.undrained = fact.error

    def _take_copy(self, at: str, fact: facts.Drained | facts.LeftDurableRing) -> None:
        if isinstance(fact, facts.Drained):
            if any(copy[1].place != fact.place for copy in self.copied.values()):
                self.copied.clear()  # the run has another ring now
            self.copied[fact.checkpoint], self.undrained = (at, fact), None
        elif (copy := self.copied.get(fact.checkpoint)) is not None and copy[1].place == fact.place:
            del self.copied[fact.checkpoint]


def _stretch(step: int, reached: int | None) -> facts.Window | None:
    return facts.Window(first=step, last=reached) if reached is not None and reached > step else None
