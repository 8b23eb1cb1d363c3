"""The facts that a run's journals hold, one class for each kind of line.

The facts of the ranks are here. The facts of the supervisor are in `rollback.facts.supervisor`; the base class is in
`rollback.facts.fact`.

A fact says what happened. Nobody edits or removes a fact. The state of a run is the fold of its facts
(`rollback.facts.history`). docs/format.md has the table of all kinds, and a test compares the two.
"""

from typing import Annotated, Any, Literal, NamedTuple, Union, get_args

from pydantic import Field, TypeAdapter, model_validator

from rollback.facts.checkpoints import (
    BecameGood,
    CheckpointLost,
    Committed,
    Drifted,
    Dropped,
    Evicted,
    LastSnapshotMade,
    NoLastSnapshot,
    Paced,
    Quarantined,
    Saving,
    Tier,
)
from rollback.facts.ending import FinalStateLost, Finished, GivingUp, LastSaveFailed, ScriptLeft, Stopped
from rollback.facts.fact import Count, Fact, InitialState, Sharding, Window, by_whom
from rollback.facts.probes import NotProbed, Probed
from rollback.facts.ring import Drained, DrainFailed, Fetched, LeftDurableRing
from rollback.facts.supervisor import (
    AttemptEnded,
    AttemptStarted,
    Blamed,
    Hung,
    NoBuddyCopy,
    NodeReplaced,
    PartBroughtBack,
    RestartScheduled,
    RunEnded,
    Signalled,
    SpareNodes,
    StuckAtExit,
)

Outcome = Literal["recovered", "repeated", "not_reproduced", "observed", "carried_out"] | GivingUp
Action = Literal["rollback", "retry", "stop", "observe"]
RequestKind = Literal["rewind", "skip", "stop", "quarantine", "release"]
THE_SUPERVISOR = "the supervisor"  # who added a skip window
Wrapping = Literal["bare", "ddp", "sharded"]


class Attached(Fact):
    """The ranks of an attempt have agreed where to begin."""

    kind: Literal["attached"] = "attached"
    world_size: int
    host: str
    pid: int
    supervised: bool
    checkpoint: str | None
    step: Count
    batch: Count
    torch: str
    settings: dict[str, Any]
    ranks_before: int | None = None
    """The number of ranks that wrote the checkpoint, if it is another number than now."""
    tier: Tier | None = None
    """Where the checkpoint was read: from the slots of all hosts, or from the ring."""
    writes: int | None = None
    """How often the script had written to the parameters in place before it made the guard, as torch counts."""
    wrapped: Wrapping | None = None
    """What the script has made of the model by then, which writes to the parameters too, or makes others: in `ddp`,
    `sharded`, or `bare`. `writes` of two attempts can be compared if it is the same."""
    init: InitialState | None = None
    """The checkpoint of others that a new run began with: its files, their hash, and how much of it was read."""
    sharding: Sharding | None = None
    """How the model is spread over the ranks; null: each of them holds all of it."""


class Accepted(Fact):
    """The job differs from the recorded job, and the run goes on with the difference."""

    kind: Literal["accepted"] = "accepted"
    what: Literal["ranks", "data"]
    """Either `ranks` (another number of ranks, the same batches) or `data` (a data set of another length, which the
    operator allowed)."""
    before: dict[str, int | None]
    after: dict[str, int | None]

    def in_words(self) -> str:
        changes = [f"{name.replace('_', ' ')} {self.before.get(name)} -> {value}" for name, value in self.after.items()]
        return f"going on with other {self.what}: {', '.join(changes)}"


class Noticed(Fact):
    """An unusual event that the sentinel saw and left alone."""

    kind: Literal["noticed"] = "noticed"
    first_step: Count
    last_step: Count
    peak: float
    threshold: float
    rule: str
    fate: str


class ScalerSkipped(Fact):
    """The gradient scaler dropped this update because of a non-finite gradient. This is routine."""

    kind: Literal["scaler_skipped"] = "scaler_skipped"
    step: Count
    batch: Count


class PhaseAnnounced(Fact):
    """The script announced a new phase, which begins with this step: the sentinel learns anew."""

    kind: Literal["announced"] = "announced"
    step: Count
    batch: Count
    phase: str | None


class Incident(Fact):
    """A verdict that demands action, with its evidence."""

    kind: Literal["incident"] = "incident"
    incident: Count
    verdict: Literal["spike", "nonfinite", "damaged", "requested"]
    """`spike` or `nonfinite`: what the sentinel said; `damaged`: the model did worse on a probe batch; `requested`: an
    operator asked for a rewind."""
    cause: str
    """The witness: `loss` or `grad_norm`; of a request, the operator."""
    rule: str
    value: float | None
    threshold: float | None
    explanation: str
    """The verdict in words; of a request, the operator's reason."""
    window: tuple[float, ...]
    ranks: tuple[int, ...]
    onset_step: Count
    onset_batch: Count
    detection_step: Count
    detection_batch: Count
    step: Count
    timeline: Count
    request: str | None = None
    """The name of the request file, where there is a request."""
    in_hand: bool = False
    """The loss of the detection step was not finite and all losses before were: its batch is the cause."""
    samples: tuple[int, ...] = ()
    """Data set indices of the batches that may be the cause, on the ranks that may have them; empty where they are
    unknown or too many."""


class Planned(Fact):
    """What will be done about an incident (for `observe`: would have been done). Journalled before anything is done."""

    kind: Literal["plan"] = "plan"
    incident: Count
    repeats: Count | None = None
    """The earlier incident that had the same trouble."""
    action: Action
    escalation: int
    checkpoint: str | None
    step: Count | None
    batch: Count | None
    skip: Window | None
    discards: tuple[str, ...]
    through: Count
    """The last batch of the detection step."""
    timeline: Count
    """The timeline that begins when the plan is carried out."""
    reason: str
    in_hand: bool = False
    """The plan skips the detection step's batch alone."""
    screen: Window | None = None
    """The batches whose updates are judged one by one before they count; then there is no `skip`. Each `screened_out`
    may move its end."""
    undone: Count = 0
    """Updates that this answer and the earlier ones to the same trouble undo together."""
    giving_up: GivingUp | None = None
    """Why the action is `stop`."""
    lower_rate: tuple[float, int] | None = None
    """A factor of the learning rate, and for how many steps from `step` on; it comes back over as many more."""

    @property
    def goes_back(self) -> bool:
        """Whether a checkpoint is restored."""
        return self.action in ("rollback", "retry")

    @property
    def last(self) -> int:
        """The last batch that the answer is about: that it skips, screens or, where it does neither, replays."""
        window = self.skip or self.screen
        return window.last if window else self.through

    def rate_at(self, step: int) -> float:
        """The factor of the learning rate at a step."""
        if self.lower_rate is None or self.step is None:
            return 1.0
        (factor, steps), since = self.lower_rate, step - self.step
        if not 0 <= since < 2 * steps:
            return 1.0
        return factor + (1 - factor) * max(0, since - steps + 1) / (steps + 1)

    def skips_in_words(self) -> str:
        """What becomes of the batches, to be added to a sentence; empty: nothing."""
        if self.skip is not None:
            return f", skip {self.skip.in_words()}"
        if self.lower_rate is not None:
            return f", learning rate times {self.lower_rate[0]:g} for {self.lower_rate[1]} steps"
        return f", screen {self.screen.in_words()}" if self.screen is not None else ""

    def screened_through(self, batch: int) -> "Planned":
        """The plan with a screen that lasts through this batch."""
        assert self.screen is not None
        return self.model_copy(update={"screen": Window(first=self.screen.first, last=max(self.screen.last, batch))})


class ScreenedOut(Fact):
    """In a screen, this update stood out: it is undone, and its batches are skipped. Journalled before it is undone."""

    kind: Literal["screened_out"] = "screened_out"
    incident: Count
    window: Window
    """The batches of the update, and what else must be skipped so that the rest of the epoch is whole updates."""
    verdict: Literal["spike", "nonfinite"]
    cause: str
    """As in `incident`, as are `rule`, `value`, `threshold` and `explanation`."""
    rule: str
    value: float | None
    threshold: float | None
    explanation: str
    step: Count
    timeline: Count
    through: Count
    """The last batch of the screen from now on."""


class Restored(Fact):
    """Every rank carried out the plan."""

    kind: Literal["restored"] = "restored"
    incident: Count
    checkpoint: str
    step: Count
    batch: Count
    steps_lost: Count
    """Updates that do not count any more."""
    seconds: float
    route: Literal["in_process", "relaunch"]
    """`relaunch`: by the next attempt, which found the plan; else `in_process`."""
    tier: Tier | None = None
    """As in `attached`."""


class Concluded(Fact):
    """How an incident ended."""

    kind: Literal["outcome"] = "outcome"
    incident: Count
    outcome: Outcome
    """`recovered`: no incident within the horizon; after a replay without a skip `not_reproduced`. `repeated`: the same
    trouble came back. `observed`: nothing was done. `carried_out`: a request. Else a `reason` of `stopped`."""
    step: Count


class SkipAdded(Fact):
    """A skip window from outside an incident: from the user, or from the supervisor for a batch at which a rank raised
    twice."""

    kind: Literal["skip_added"] = "skip_added"
    window: Window
    who: str
    why: str
    request: str | None = None

    @property
    def by_supervisor(self) -> bool:
        return self.request is None and self.who == THE_SUPERVISOR


class SampleQuarantine(Fact):
    """The samples that are left out of batches from now on. A neighbour takes the place of each."""

    kind: Literal["sample_quarantine"] = "sample_quarantine"
    batch: Count
    """The first batch that leaves them out."""
    samples: tuple[int, ...]
    """All samples that are left out."""
    added: tuple[int, ...]
    """Samples that were not left out before."""
    released: tuple[int, ...]
    """Samples that are not left out any more."""
    who: str
    """Who ordered it; for an incident, the suspicion."""
    why: str
    incident: Count | None = None
    request: str | None = None

    def in_words(self) -> str:
        listed = ", ".join(map(str, self.samples)) or "none"
        return f"from batch {self.batch} on left out: {listed} ({by_whom(self.who, self.why)})"


class Requested(Fact):
    """The ranks have accepted an operator's request; an `answer` follows."""

    kind: Literal["request"] = "request"
    request: str
    order: RequestKind
    to: Count | None
    skip: Window | None
    who: str
    why: str
    step: Count
    """The step at which they accepted it."""
    batch: Count
    samples: tuple[int, ...] = ()


class Answered(Fact):
    """The result of a request, in words. A request that could not be read has an answer only."""

    kind: Literal["answer"] = "answer"
    request: str
    carried_out: bool
    text: str


class PassedOver(Fact):
    """Batches of a skip window were skipped."""

    kind: Literal["skipped"] = "skipped"
    first: int
    last: int
    step: Count
    timeline: Count

    @model_validator(mode="after")
    def _is_a_window(self) -> "PassedOver":
        Window(first=self.first, last=self.last)
        return self

    @property
    def window(self) -> Window:
        return Window(first=self.first, last=self.last)


class Advice(Fact):
    """A likely mistake in the script's use of the guard; journalled once."""

    kind: Literal["advice"] = "advice"
    code: str
    text: str


class Trouble(Fact):
    """A part of rollback failed, and training went on without it."""

    kind: Literal["trouble"] = "trouble"
    doing: str
    error: str


AnyFact = Annotated[
    Union[  # noqa: UP007  (a list of classes, one for each kind of line, reads better than a chain)
        Attached, Accepted, Saving, Paced, Committed, BecameGood, Dropped, Drifted, Evicted, CheckpointLost,
        Quarantined, NoLastSnapshot, LastSnapshotMade, Noticed, ScalerSkipped, PhaseAnnounced, Incident, Planned,
        ScreenedOut, Probed, NotProbed, Restored, Concluded, SkipAdded, SampleQuarantine, Requested, Answered,
        PassedOver, Advice, Trouble,
        LastSaveFailed, Stopped, Finished, FinalStateLost, ScriptLeft,
        AttemptStarted, AttemptEnded, Hung, StuckAtExit, Blamed, RestartScheduled, NodeReplaced, SpareNodes,
        PartBroughtBack, NoBuddyCopy, Signalled, RunEnded,
        Drained, DrainFailed, LeftDurableRing, Fetched,
    ],
    Field(discriminator="kind"),
]  # fmt: skip


KINDS: frozenset[type[Fact]] = frozenset(get_args(get_args(AnyFact)[0]))
RARE_KINDS: frozenset[type[Fact]] = KINDS - {Committed, BecameGood, Evicted}
"""All but those that come with each checkpoint, which are most facts of a long run."""


class JournalEntry(NamedTuple):  # a long run has half a million, and a dataclass takes twice the time
    """A journal line: a fact and its place in the record."""

    seq: int
    at: str
    attempt: int
    fact: AnyFact


parse_fact: TypeAdapter[Any] = TypeAdapter(AnyFact)
