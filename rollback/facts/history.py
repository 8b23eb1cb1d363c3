"""The state of a run as a fold over the facts in its journals.

Pure: journal entries in, a `History` out. Ranks fold the train journal to find out what to resume. The audit folds both
journals.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, cast, get_args

from pydantic import TypeAdapter

from rollback.errors import RESTORE_THE_JOURNAL, JournalDamaged
from rollback.facts.ending import EndedTogether
from rollback.facts.fact import InitialState
from rollback.facts.training import (
    Accepted,
    Advice,
    Answered,
    Attached,
    BecameGood,
    CheckpointLost,
    Committed,
    Concluded,
    Drained,
    Evicted,
    Fetched,
    Finished,
    Incident,
    JournalEntry,
    LastSnapshotMade,
    LeftDurableRing,
    PhaseAnnounced,
    Planned,
    Quarantined,
    Requested,
    Restored,
    SampleQuarantine,
    ScreenedOut,
    ScriptLeft,
    SkipAdded,
    Stopped,
    Window,
    Wrapping,
)


@dataclass
class Case:
    """An incident with its plan and its outcome."""

    incident: Incident
    plan: Planned | None = None
    """With its screen as far as that reaches by now."""
    restored: Restored | None = None
    outcome: Concluded | None = None
    screened_out: list[ScreenedOut] = field(default_factory=list)

    @property
    def skips(self) -> list[Window]:
        """The batches that are skipped because of it."""
        planned = self.plan.skip if self.plan and self.plan.action == "rollback" else None
        return [*([planned] if planned else []), *(fact.window for fact in self.screened_out)]

    @property
    def asked_for(self) -> bool:
        """It is an operator's rewind: no trouble, and recorded as one."""
        return self.incident.request is not None

    @property
    def carried_out(self) -> bool:
        return self.restored is not None

    @property
    def pending(self) -> bool:
        """There is a plan, and no rank has carried it out: a crash came in between."""
        return self.plan is not None and self.plan.goes_back and self.restored is None

    @property
    def awaits_outcome(self) -> bool:
        """The plan is meant to cure the trouble, and the outcome is still unknown. An operator's request has no
        outcome."""
        planned = self.plan is not None and self.plan.goes_back
        return planned and self.outcome is None and not self.asked_for


@dataclass
class History:
    """State of a run after a number of facts."""

    cases: list[Case] = field(default_factory=list)
    added: list[SkipAdded] = field(default_factory=list)
    quarantine: list[SampleQuarantine] = field(default_factory=list)
    committed: dict[str, Committed] = field(default_factory=dict)
    good: set[str] = field(default_factory=set)
    discarded: set[str] = field(default_factory=set)
    left_run_directory: set[str] = field(default_factory=set)
    left_memory: set[str] = field(default_factory=set)
    """Checkpoints that the run itself has let go of in memory. A copy of such a one may lie in a ring."""
    advised: set[str] = field(default_factory=set)
    phases: set[int] = field(default_factory=set)
    """Batches with which announced phases begin."""
    other_data: bool = False
    """Whether the run has ever accepted a data set of another length."""
    requests: dict[str, Requested] = field(default_factory=dict)
    answers: dict[str, Answered] = field(default_factory=dict)
    init: InitialState | None = None
    """What the run began with; None: with what the script made."""
    first_writes: dict[Wrapping, int] = field(default_factory=dict)
    """`Attached.writes` of the first attempt with a model wrapped so."""
    finished: Finished | None = None
    """The last `finished` fact, until a later checkpoint exists or the run goes back."""
    timeline: int = 0
    last_attempt: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the last attempt that attached, without those that had the default value."""
    given_up: Stopped | None = None
    """The stop for an incident that ended the run; None where the run has gone on since, or did not end so."""
    script_left: ScriptLeft | None = None
    """The last time that the script left its loop before the end of the training."""
    attached: bool = False
    """Whether the ranks of any attempt have attached."""
    furthest: int | None = None
    """The furthest step that a fact of the ranks names as reached."""
    reached: dict[int, int] = field(default_factory=dict)
    """By attempt that attached, the furthest step that a fact names since it began or went back."""
    stood: tuple[int, int] | None = None
    """The step and batch of the last checkpoint, start or restore."""
    drained: dict[str, set[str]] = field(default_factory=dict)
    """By place of a durable ring, the checkpoints that were copied there."""
    left_ring: dict[str, set[str]] = field(default_factory=dict)
    """Likewise, those that have left it."""
    spoiled: set[str] = field(default_factory=set)
    """Checkpoints that were good and were found damaged; a copy elsewhere may be sound."""

    @property
    def pending(self) -> Planned | None:
        """The plan that a crash interrupted, if any. Only the latest plan can be pending: earlier ones are carried out
        or superseded."""
        return self.cases[-1].plan if self.cases and self.cases[-1].pending else None

    @property
    def restorable(self) -> list[str]:
        """Checkpoints that lie somewhere, by the record, in the order of their commits. What left memory may lie in a
        ring, but is never the newest, unless it was meant to be none: see `Schedule.go_on`."""
        left = self.left_run_directory | self.discarded | self.left_memory
        return [name for name in self.committed if name not in left]

    @property
    def final(self) -> str | None:
        """The checkpoint with the final state of a complete run."""
        return self.finished.checkpoint if self.finished is not None else None

    @property
    def last_plan(self) -> Planned | None:
        """The last plan that answered a trouble and was not `observe`."""
        plans = [case.plan for case in self.cases if case.plan and not case.asked_for]
        return next((plan for plan in reversed(plans) if plan.action != "observe"), None)

    @property
    def lowered(self) -> Planned | None:
        """The last plan that lowers the learning rate."""
        plans = [case.plan for case in self.cases if case.plan and case.plan.goes_back and case.plan.lower_rate]
        return plans[-1] if plans else None

    @property
    def skipped_by_incidents(self) -> list[Window]:
        """The skip windows of all rollbacks that answered a trouble."""
        return [window for case in self.cases if not case.asked_for for window in case.skips]

    def case_of(self, request: str) -> Case | None:
        """The incident, plan and outcome of a request to rewind."""
        return next((case for case in reversed(self.cases) if case.incident.request == request), None)

    @property
    def skip_list(self) -> list[Window]:
        """All windows in force: the user's windows and those of plans, a pending plan included."""
        return [fact.window for fact in self.added] + [window for case in self.cases for window in case.skips]


class _Contradiction(Exception):
    """A fact does not fit the history before it."""


_Reaching = Attached | Committed | EndedTogether
_REACHING = frozenset(get_args(_Reaching))  # to look a type up is several times as fast as `isinstance`
_SETTING_OUT = frozenset({Attached, Restored})
_POSITIONS = _SETTING_OUT | {Committed, Incident, LastSnapshotMade, Finished, Stopped}
history_as_json: TypeAdapter[History] = TypeAdapter(History)


def fold(records: Iterable[JournalEntry], history: History | None = None) -> History:
    """Add journal entries to a history (default: a new one) and return it. Raises JournalDamaged if they contradict
    each other."""
    history = history or History()
    for record in records:
        fact, kind = record.fact, type(record.fact)
        history.last_attempt = max(history.last_attempt, record.attempt)
        if kind in _REACHING:
            history.furthest = max(cast(_Reaching, fact).step, history.furthest or 0)
        if kind in _POSITIONS and (step := cast(_Reaching | LastSnapshotMade, fact).step) is not None:
            before = 0 if kind in _SETTING_OUT else history.reached.get(record.attempt, 0)
            history.reached[record.attempt] = max(step, before)
        try:
            if kind in _NOTED:
                _NOTED[kind](history, fact)
        except _Contradiction as error:
            line = f"journal/{fact.writer}.jsonl, line {record.seq + 1} ({fact.kind})"
            raise JournalDamaged(f"{line} contradicts what is before it: {error}", hint=RESTORE_THE_JOURNAL) from error
    return history


def copy_of(history: History) -> History:
    """Another history of the same facts. `fold` changes one, and not the other."""
    return replace(history, **{each.name: _copy(getattr(history, each.name)) for each in fields(history)})


def _copy(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copy(item) for key, item in value.items()}
        case list():
            return [_copy(item) for item in value]
        case set():
            return {*value}
        case Case():
            return replace(value, screened_out=[*value.screened_out])
        case _:  # a fact, or a number: they never change
            return value


def _note_committed(history: History, fact: Committed) -> None:
    history.committed[fact.checkpoint] = fact
    history.stood = (fact.step, fact.batch)
    history.finished = None
    if fact.step == 0:
        history.good.add(fact.checkpoint)


def _note_left(history: History, fact: Evicted | CheckpointLost) -> None:
    if fact.tier == "durable":  # what was good stays so: it may lie in a ring further out
        history.left_run_directory.add(fact.checkpoint)
    elif isinstance(fact, Evicted):
        history.left_memory.add(fact.checkpoint)


def _note_quarantined(history: History, fact: Quarantined) -> None:
    history.left_run_directory.add(fact.checkpoint)
    history.spoiled |= {fact.checkpoint} & history.good
    history.good.discard(fact.checkpoint)


def _note_fetched(history: History, fact: Fetched) -> None:
    history.left_run_directory.discard(fact.checkpoint)
    history.good.add(fact.checkpoint)


def _note_drained(history: History, fact: Drained) -> None:
    history.drained.setdefault(fact.place, set()).add(fact.checkpoint)
    history.left_ring.get(fact.place, set()).discard(fact.checkpoint)


def _note_plan(history: History, fact: Planned) -> None:
    _case(history, fact.incident).plan = fact
    if fact.action != "observe":  # a stop discards too: the next start must not go on behind the onset
        history.discarded.update(fact.discards)
        history.good.difference_update(fact.discards)
        history.timeline = fact.timeline
        history.finished = None


def _note_screened_out(history: History, fact: ScreenedOut) -> None:
    case = _case(history, fact.incident)
    if case.plan is None or case.plan.screen is None:
        raise _Contradiction(f"incident: an update of {fact.incident} without a screen")
    case.screened_out.append(fact)
    case.plan = case.plan.screened_through(fact.through)


def _note_restored(history: History, fact: Restored) -> None:
    _case(history, fact.incident).restored = fact
    history.stood = (fact.step, fact.batch)


def _note_outcome(history: History, fact: Concluded) -> None:
    _case(history, fact.incident).outcome = fact


def _note_attached(history: History, fact: Attached) -> None:
    history.settings, history.given_up, history.attached = fact.settings, None, True
    history.stood = (fact.step, fact.batch)
    history.init = fact.init or history.init
    if fact.writes is not None and fact.wrapped is not None:
        history.first_writes.setdefault(fact.wrapped, fact.writes)


def _note_stopped(history: History, fact: Stopped) -> None:
    history.given_up = fact if fact.reason != "preempted" else None


def _note_finished(history: History, fact: Finished) -> None:
    history.finished = fact


def _note_accepted(history: History, fact: Accepted) -> None:
    history.other_data |= fact.what == "data"


_NOTED: dict[type, Callable[[History, Any], None]] = {
    Committed: _note_committed,
    BecameGood: lambda history, fact: history.good.add(fact.checkpoint),
    Evicted: _note_left,
    CheckpointLost: _note_left,
    Quarantined: _note_quarantined,
    Fetched: _note_fetched,
    Incident: lambda history, fact: history.cases.append(Case(fact)),
    Planned: _note_plan,
    ScreenedOut: _note_screened_out,
    Restored: _note_restored,
    Concluded: _note_outcome,
    Attached: _note_attached,
    Stopped: _note_stopped,
    Finished: _note_finished,
    ScriptLeft: lambda history, fact: setattr(history, "script_left", fact),
    SampleQuarantine: lambda history, fact: history.quarantine.append(fact),
    Drained: _note_drained,
    LeftDurableRing: lambda history, fact: history.left_ring.setdefault(fact.place, set()).add(fact.checkpoint),
    SkipAdded: lambda history, fact: history.added.append(fact),
    PhaseAnnounced: lambda history, fact: history.phases.add(fact.batch),
    Advice: lambda history, fact: history.advised.add(fact.code),
    Requested: lambda history, fact: history.requests.update({fact.request: fact}),
    Answered: lambda history, fact: history.answers.update({fact.request: fact}),
    Accepted: _note_accepted,
}
"""What each kind of fact adds; others add nothing. A long run has half a million facts, and `isinstance` of each kind
in turn, which pydantic answers in Python, takes longer than all the rest."""


def _case(history: History, incident: int) -> Case:
    for case in reversed(history.cases):
        if case.incident.incident == incident:
            return case
    raise _Contradiction(f"incident: {incident} is not reported")


def furthest_of(records: Iterable[JournalEntry]) -> int | None:
    """As `History.furthest`, of some entries."""
    return max((record.fact.step for record in records if isinstance(record.fact, _Reaching)), default=None)


def in_durable_ring(*histories: History, place: str | None = None) -> set[str]:
    """The checkpoints that were copied to a durable ring and have not left it, by what journals amount to: ranks fill
    it, or a supervisor. One that has left counts again where the same journal says later that it was copied. place: of
    that ring; None: of any."""
    copied, left = (
        {(at, name) for history in histories for at, names in of(history).items() for name in names}
        for of in (attrgetter("drained"), attrgetter("left_ring"))
    )
    return {name for at, name in copied - left if place in (None, at)}


def passed_over_by(history: History, passed: Iterable[Window]) -> list[Window]:
    """What a run passes over, as another run is to be given it. passed: what it has passed over.

    Of a window that was given late, as at a resume, the batches before that were trained on. Those from where the run
    stands on are still to be passed over.
    """
    stands = history.stood[1] if history.stood else 0
    if history.pending is not None and history.pending.batch is not None:
        stands = min(stands, history.pending.batch)
    done, own = Window.merged(passed), Window.merged(history.skip_list)
    parts = [(max(one.first, other.first), min(one.last, other.last)) for one in own for other in done]
    parts += [(max(one.first, stands), one.last) for one in own]
    return Window.merged(Window(first=first, last=last) for first, last in parts if first <= last)
