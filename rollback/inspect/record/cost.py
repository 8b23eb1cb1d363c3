"""The cost of incidents and deaths, in steps and in wall-clock seconds, and why no more was left by a death. Pure.

A restore undoes the time since the run was first at the restored checkpoint. A *restore* at time `r` to a checkpoint
that was taken at time `c` undoes the interval `[c, r]`. The *death* of an attempt at time `d` undoes `[c, d]`, if the
next attempt resumes from that checkpoint. From `d` to the next `attached` the run is *down*. The events are taken in
the order of the record, and each is charged only for time that no event before it was charged for: a repeat that goes
back to an older checkpoint costs the older stretch and the second try, not the first try again. So every second of a
run is either kept, lost to one incident, lost to one death, hung, or down.

Times are those of the journals (`at`), on one clock. A checkpoint was taken at the time of its `committed` line minus
the seconds of that commit. A checkpoint without this line (because of a crash) counts from the `attached` that used it.
Where a clock was set back, an interval that ends before it begins costs nothing. Where this takes more than a
hundredth of the time on record, the length of the run is not told.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from pydantic import Field

from rollback.facts import training as facts
from rollback.inspect.document import ReportItem
from rollback.inspect.record.ending import ended_together, script_left
from rollback.inspect.record.reading import by_attempt
from rollback.rundir.journal.journal import last_fact, of_kind, of_kinds
from rollback.terminal.quantities import at_least, duration, seconds_since_epoch
from rollback.wording import counted

_PRICED = frozenset({facts.Planned, facts.Restored, facts.Attached, facts.Hung, facts.AttemptEnded})
_OF_RANKS, _OF_SUPERVISOR = (
    frozenset(kind for kind in facts.KINDS if kind.writer == writer) for writer in ("train", "supervisor")
)
_SIGNS_OF_LIFE = _OF_RANKS | {facts.Hung, facts.AttemptEnded}
"""Of an attempt. Other facts of it the next launch may write, when it is long over."""
CLOCKS_DIFFER = 10.0  # seconds: what is less may be a machine that is busy between an event and its line
_SET_BACK = 0.01  # of the time on record; beyond it the rest says nothing

TELLING: frozenset[type[facts.Fact]] = frozenset({
    facts.Attached, facts.Planned, facts.Restored, facts.Stopped, facts.AttemptEnded, facts.LastSnapshotMade,
    facts.NoLastSnapshot,
})  # fmt: skip
"""Facts by which deaths are told, where an attempt's end is on record."""


@dataclass(frozen=True)
class Price:
    """Updates and seconds that an event undid; None: not on record."""

    steps: int | None
    seconds: float | None


@dataclass
class Costs:
    """The prices of all restores (by incident) and deaths (by attempt), and other sums over the run."""

    restores: dict[int, Price] = field(default_factory=dict)
    deaths: dict[int, Price] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    """By attempt, the step in progress at its last sign of life."""
    seconds_hung: float = 0.0
    seconds_down: float = 0.0
    seconds: float | None = None
    """From the first fact to the last; None: not known."""
    notices: list[str] = field(default_factory=list)
    """What is wrong with the clocks, in words."""

    @property
    def prices(self) -> list[Price]:
        return [*self.restores.values(), *self.deaths.values()]


class Charged:
    """The intervals that are already charged to an event."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []
        """In order; none of them overlap or touch."""

    def charge(self, start: float | None, end: float | None) -> float | None:
        """Charge an interval. Returns the length of its part that was not charged before."""
        if start is None or end is None:
            return None
        if end <= start:  # a clock was set back
            return 0.0
        begin = bisect_left(self._taken, start, key=lambda taken: taken[1])
        stop = bisect_right(self._taken, end, key=lambda taken: taken[0])
        own = self._taken[begin:stop]
        free, position = 0.0, start
        for first, last in own:
            free += max(0.0, first - position)
            position = last
        free += max(0.0, end - position)
        self._taken[begin:stop] = [(min(start, own[0][0]), max(end, own[-1][1]))] if own else [(start, end)]
        return free


def reckon(
    records: Sequence[facts.JournalEntry], reached: Mapping[int, int], progress: Mapping[int, tuple[int, int]]
) -> Costs:
    """The costs of a run. The steps need no lines of commits, the seconds do.

    records: in merged order. reached: of their history. progress: by attempt, the timeline and step of its last judged
    step, from the metrics.
    """
    clock = _OneClock(records)
    costs = Costs(reached=_reached(records, reached, progress), notices=clock.notices)
    charged = Charged()
    taken = _Taken(records, clock)
    began: float | None = None
    last_seen = {record.attempt: record for record in of_kinds(records, _SIGNS_OF_LIFE)}
    trained: int | None = None  # the last attempt that trained
    pending = False
    hung: dict[int, float] = {}  # when it was called, by attempt
    for record in of_kinds(records, _PRICED):
        at = clock.time_of(record)
        match record.fact:
            case facts.Planned() as fact:
                pending = fact.goes_back
            case facts.Restored() as fact:
                pending = False
                lost = charged.charge(taken.when(fact.checkpoint), at)
                before = costs.restores.get(fact.incident, Price(0, 0.0))
                seconds = None if before.seconds is None or lost is None else before.seconds + lost
                costs.restores[fact.incident] = Price((before.steps or 0) + fact.steps_lost, seconds)
            case facts.Attached() as fact:
                began = at if began is None else began
                if trained is not None:
                    death = at if trained == record.attempt else clock.time_of(last_seen[trained])
                    costs.seconds_down += charged.charge(death, at) or 0.0
                    costs.deaths[trained] = Price(0, 0.0)
                    if not pending:  # else the restore that follows pays
                        stood = taken.when(fact.checkpoint) if fact.checkpoint else began
                        steps = max(0, costs.reached.get(trained, fact.step) - fact.step)
                        lost = (charged.charge(stood, death) if steps else 0.0) if stood is not None else None
                        costs.deaths[trained] = Price(steps, lost)
                if fact.checkpoint and at is not None:
                    taken.used.setdefault(fact.checkpoint, at)
                trained = record.attempt
            case facts.Hung() as fact if at is not None and 0 <= fact.silent < math.inf:
                costs.seconds_hung += charged.charge(at - fact.silent, at) or 0.0
                hung[record.attempt] = at
            case facts.AttemptEnded() if record.attempt in hung:
                costs.seconds_hung += charged.charge(hung[record.attempt], at) or 0.0
    costs.seconds = clock.seconds
    return costs


class _OneClock:
    """The times of a record on one clock, the supervisor's.

    Each journal has the times of its writer's host: rank 0's, and the leading supervisor's. Within an attempt it is
    known what came first: its start, what its ranks did, its end; and a commit before its copy. Where the times say
    otherwise by more than some seconds, those of the ranks are moved by as much as it takes.
    """

    def __init__(self, records: Sequence[facts.JournalEntry]) -> None:
        self._records = records
        self._moved: dict[int, float] = {}
        """Seconds, by attempt."""
        moved = 0.0
        for attempt, own in by_attempt(records).items():
            moved = self._moved[attempt] = _shift_of(own, moved)
        self._set_back = max(map(self._backwards, (_OF_RANKS, _OF_SUPERVISOR)))

    def time_of(self, record: facts.JournalEntry) -> float | None:
        """Seconds since the epoch; None: the time cannot be read."""
        at = seconds_since_epoch(record.at)
        return at + self._moved.get(record.attempt, 0.0) if at is not None and type(record.fact) in _OF_RANKS else at

    @property
    def seconds(self) -> float | None:
        """From the first fact to the last; None: not known."""
        seconds = _between([record.at for record in self._records])
        if any(self._moved.values()):
            told = [self.time_of(record) for record in of_kinds(self._records, _OF_RANKS | _OF_SUPERVISOR)]
            times = [at for at in told if at is not None]
            seconds = max(times) - min(times)
        return None if seconds is not None and self._set_back > max(CLOCKS_DIFFER, _SET_BACK * seconds) else seconds

    @property
    def notices(self) -> list[str]:
        told, apart = [], max(map(abs, self._moved.values()), default=0.0)
        if apart:
            told.append(
                f"the clocks of rank 0's host and the leading supervisor's differ by {duration(apart)}: times are as "
                "each of them wrote them, and durations as on one clock; keep the hosts' clocks alike (NTP)"
            )
        if self._set_back > CLOCKS_DIFFER:
            told.append(
                f"a clock was set back by {duration(self._set_back)} on the way, or another host with a clock that is "
                "behind wrote on: what went on over this moment counts as no time"
            )
        return told

    def _backwards(self, kinds: Collection[type]) -> float:
        """The longest way back from one line of a journal to the next."""
        own = of_kinds(self._records, kinds)
        suspicious = (  # all are spelt alike, so they sort as texts: a long run has half a million
            pair for pair in pairwise(own) if pair[1].at < pair[0].at or pair[1].attempt != pair[0].attempt
        )
        ways = [(self.time_of(before), self.time_of(after)) for before, after in suspicious]
        return max((was - at for was, at in ways if was is not None and at is not None), default=0.0)


def _shift_of(own: Sequence[facts.JournalEntry], before: float) -> float:
    """Seconds by which the times of an attempt's ranks are to be moved. before: those of the attempt before it, which
    count where nothing tells."""
    ranks = of_kinds(own, _OF_RANKS)
    started = [(record, ranks[0]) for record, _ in of_kind(own, facts.AttemptStarted) if ranks]
    hung = bool(of_kind(own, facts.Hung))  # its end comes hours behind its ranks' last line
    ended = [(record, ranks[-1]) for record, _ in of_kind(own, facts.AttemptEnded) if ranks and not hung]
    committed = {fact.checkpoint: record for record, fact in of_kind(ranks, facts.Committed)}
    copied = [(record, committed.get(fact.checkpoint)) for record, fact in of_kind(own, facts.Drained)]
    ended += [(record, commit) for record, commit in copied if commit is not None][-1:]
    if not (started or ended):
        return before
    least = max((_seconds_from(one, other) for one, other in started), default=-math.inf)
    most = min((_seconds_from(one, other) for one, other in ended), default=math.inf)
    if least > most + CLOCKS_DIFFER:  # a clock was set meanwhile
        return 0.0
    if least <= CLOCKS_DIFFER and most >= -CLOCKS_DIFFER:
        return 0.0
    return most if math.isfinite(most) else least  # an end is journalled at once, and what starts takes its time


def _seconds_from(one: facts.JournalEntry, other: facts.JournalEntry) -> float:
    """By how much the first is later than the other; 0: not known."""
    later, earlier = seconds_since_epoch(one.at), seconds_since_epoch(other.at)
    return 0.0 if later is None or earlier is None else later - earlier


class _Taken:
    """When the run stood at a checkpoint. Of a hundred thousand that were committed, few are ever gone back to."""

    def __init__(self, records: Sequence[facts.JournalEntry], clock: _OneClock) -> None:
        self._clock = clock
        commits = reversed(of_kind(records, facts.Committed))  # the first one of each counts
        self._committed = {fact.checkpoint: (record, fact.seconds) for record, fact in commits}
        self.used: dict[str, float] = {}
        """When an attempt began with it first."""

    def when(self, checkpoint: str) -> float | None:
        record, seconds = self._committed.get(checkpoint, (None, 0.0))
        committed = None if record is None else self._clock.time_of(record)
        return self.used.get(checkpoint) if committed is None else committed - seconds


def _between(moments: Sequence[str]) -> float | None:
    """Seconds from the earliest to the latest. All are spelt alike, so they sort as texts."""
    first, last = (seconds_since_epoch(find(moments, default="")) for find in (min, max))
    return None if first is None or last is None else last - first


def rounded(seconds: float | None) -> float | None:
    """Rounded to milliseconds, the unit of the times in a journal."""
    return None if seconds is None else round(seconds, 3)


def _reached(
    records: Sequence[facts.JournalEntry], told: Mapping[int, int], progress: Mapping[int, tuple[int, int]]
) -> dict[int, int]:
    """By attempt, the step in progress at its last sign of life."""
    reached = {**told}
    timelines: dict[int, int] = {}  # of attempts that planned to go back: the furthest step of such a one says nothing
    for record in of_kinds(records, {facts.AttemptEnded, facts.Planned}):
        match record.fact:
            case facts.AttemptEnded(step=int(step)):
                reached[record.attempt] = max(step, reached.get(record.attempt, 0))
            case facts.Planned() as fact:
                timelines[record.attempt] = fact.timeline
    for attempt, (timeline, step) in progress.items():
        if timeline >= timelines.get(attempt, 0):
            reached[attempt] = max(step + 1, reached.get(attempt, 0))
    return reached


class Death(ReportItem):
    """The end of an attempt that has undone steps."""

    attempt: int
    steps_lost: int
    at_least: bool = Field(description="how many more it had done is not on record")
    checkpoint: str | None = Field(description="to which the run goes back; null: it begins anew")
    step: int = Field(description="of that checkpoint")
    went_back: bool = Field(description="false: the next start does")
    why_not_kept: str | None = Field(description="null: last_snapshot tells")

    def in_words(self) -> str:
        steps = at_least(counted(self.steps_lost, "step"), self.at_least)
        went = "the run went back" if self.went_back else "the next start goes back"
        where = f"to {self.checkpoint}, step {self.step}" if self.checkpoint else "to the beginning"
        why = f"; nothing newer is left ({self.why_not_kept})" if self.why_not_kept else ""
        return f"{steps} of attempt {self.attempt}: {went} {where}{why}"


def deaths(
    records: Sequence[facts.JournalEntry],
    reached: Mapping[int, int],
    progress: Mapping[int, tuple[int, int]],
    next_start: tuple[str, int] | None,
) -> dict[int, Death]:
    """The deaths that have undone steps, by attempt.

    next_start: the checkpoint, and its step, with which the next start goes on; None: the last attempt still runs, or
    that is not known. The others: as for `reckon`.
    """
    costs, own = reckon(records, reached, progress), by_attempt(records)
    attached = reversed(of_kind(records, facts.Attached))  # the first one of each attempt counts
    trained = {record.attempt: (fact.checkpoint, fact.step) for record, fact in attached}
    kept = {fact.checkpoint for _, fact in of_kind(records, facts.LastSnapshotMade) if fact.checkpoint}
    found, order = {}, sorted(trained)
    for attempt, back in zip(order, [*(trained[later] for later in order[1:]), next_start], strict=False):
        together = ended_together(own[attempt])
        if back is None or (isinstance(together, facts.Stopped) and together.reason != "preempted"):
            continue  # given up, which is no death
        went_back = attempt != order[-1]
        lost = costs.deaths[attempt].steps or 0 if went_back else costs.reached[attempt] - back[1]
        if lost > 0:
            found[attempt] = Death(
                attempt=attempt, steps_lost=lost, at_least=not is_reach_known(own[attempt]), checkpoint=back[0],
                step=back[1], went_back=went_back,
                why_not_kept=None if back[0] in kept else _why_not_kept(own[attempt]),
            )  # fmt: skip
    return found


def is_reach_known(own: Sequence[facts.JournalEntry]) -> bool:
    """Whether it is on record, to the step, how far an attempt that died had come."""
    ended, kept = last_fact(own, facts.AttemptEnded), last_fact(own, facts.LastSnapshotMade)
    # A rank that raised has recorded its step, and its peers cannot have done another one without it. Who counts what
    # is lost at a last snapshot has the marks of all steps. An attempt that ended well has lost what it kept since,
    # unless its ranks left without a word (`os._exit`).
    raised = ended is not None and ended.fingerprint is not None
    counted = kept is not None and kept.steps_lost is not None
    told = isinstance(ended_together(own), facts.Stopped | facts.ScriptLeft)
    return raised or counted or told or (_ended_well(own) and not script_left(own))


def _ended_well(own: Sequence[facts.JournalEntry]) -> bool:
    ended = last_fact(own, facts.AttemptEnded)
    return ended is not None and ended.status == 0


def _why_not_kept(own: Sequence[facts.JournalEntry]) -> str | None:
    if _ended_well(own) or last_fact(own, facts.LastSnapshotMade) is not None:
        return None
    none = last_fact(own, facts.NoLastSnapshot)
    return none.in_words() if none is not None else "no rank was left that could keep it"
