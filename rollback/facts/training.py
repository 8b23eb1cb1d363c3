"""The facts that a run's journals hold, one class for each kind of line: all of them together, as `AnyFact`.

Those of the ranks are here that no other module of this room has. The base class is in `rollback.facts.fact`.

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
from rollback.facts.ending import FinalStateLost, Finished, LastSaveFailed, ScriptLeft, Stopped
from rollback.facts.fact import Count, Fact, InitialState, Sharding, Window, by_whom
from rollback.facts.incidents import Concluded, Incident, Planned, Restored, ScreenedOut
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
