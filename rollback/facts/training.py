"""The facts that a run's journals hold, one class for each kind of line.

Those of the ranks are here, those of the supervisor in `rollback.facts.supervisor`, their base in
`rollback.facts.fact`.

A fact says what happened; it is never edited or taken back. State is what folding the facts gives
(`rollback.facts.history`). docs/format.md has the table of all kinds, and a test compares the two.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from rollback.facts.ending import FinalStateLost, Finished, LastSaveFailed, ScriptLeft, Stopped
from rollback.facts.fact import Fact, Window
from rollback.facts.ring import Drained, DrainFailed, Fetched, LeftDurableRing
from rollback.facts.supervisor import (
    AttemptEnded,
    AttemptStarted,
    Blamed,
    Hung,
    RestartScheduled,
    RunEnded,
    Signalled,
    StuckAtExit,
)

Outcome = Literal["recovered", "repeated", "not_reproduced", "structural", "observed", "carried_out"]
Action = Literal["rollback", "retry", "stop", "observe"]
Order = Literal["rewind", "skip", "stop", "quarantine", "release"]
Tier = Literal["fast", "durable"]
THE_SUPERVISOR = "the supervisor"  # who added a skip window


class Attached(Fact):
    """The ranks of an attempt have agreed on where to begin. `ranks_before`: how many ranks the checkpoint is of, if
    it is another number than now. `tier`: where it was read from, in the slots of all hosts or in the ring. `writes`:
    how often the script had written to the parameters in place when it made the guard, as torch counts it."""

    kind: Literal["attached"] = "attached"
    world_size: int
    host: str
    pid: int
    supervised: bool
    checkpoint: str | None
    step: int
    batch: int
    torch: str
    settings: dict[str, Any]
    ranks_before: int | None = None
    tier: Tier | None = None
    writes: int | None = None


class Accepted(Fact):
    """The job differs from the recorded one, and the run goes on with it: another number of ranks over the same
    batches, or, where the operator said so, a data set of another length."""

    kind: Literal["accepted"] = "accepted"
    what: Literal["ranks", "data"]
    before: dict[str, int | None]
    after: dict[str, int | None]

    def in_words(self) -> str:
        changes = [f"{name.replace('_', ' ')} {self.before[name]} -> {value}" for name, value in self.after.items()]
        return f"going on with other {self.what}: {', '.join(changes)}"


class Committed(Fact):
    """A checkpoint exists: all shards and the manifest are there. `tier`: where, in a slot or in the ring."""

    kind: Literal["committed"] = "committed"
    checkpoint: str
    step: int
    batch: int
    timeline: int
    bytes: int
    seconds: float
    tier: Tier = "durable"


class BecameGood(Fact):
    """A candidate has survived probation."""

    kind: Literal["good"] = "good"
    checkpoint: str
    step: int


class Dropped(Fact):
    """A snapshot did not become a checkpoint; training went on."""

    kind: Literal["dropped"] = "dropped"
    checkpoint: str
    step: int
    reason: str


class Evicted(Fact):
    """A checkpoint left a tier. One that left the fast tier may still be in the durable ring."""

    kind: Literal["evicted"] = "evicted"
    checkpoint: str
    reason: str
    tier: Tier = "durable"


class CheckpointLost(Fact):
    """A checkpoint of this run is not where it was committed: somebody or something has removed it, or part of it."""

    kind: Literal["checkpoint_lost"] = "checkpoint_lost"
    checkpoint: str
    tier: Tier
    reason: str = "somebody else has removed it, or part of it"


class Saving(Fact):
    """How snapshots are taken from now on, and why so.

    `slots` of `slot_bytes` (on each host) in the fast tier; none: straight to the ring. `capture`: `at_once`,
    `overlapped` with the next forward and backward, or `held`: the loop waits for the digest of the parameters too.
    """

    kind: Literal["saving"] = "saving"
    slots: int
    slot_bytes: int
    capture: Literal["overlapped", "at_once", "held"]
    reason: str


class Paced(Fact):
    """The steps between two snapshots were fitted to what they cost.

    `stall` is how long the loop waited for the last one and `step_seconds` what a step takes, as means over the ranks.
    """

    kind: Literal["paced"] = "paced"
    every: int
    stall: float
    step_seconds: float


class Drifted(Fact):
    """The parameters of the ranks differ, though they are replicas: the snapshot was dropped.

    `ranks` are those that differ from the majority; all, where there is none.
    """

    kind: Literal["drifted"] = "drifted"
    checkpoint: str
    step: int
    ranks: tuple[int, ...]


class Quarantined(Fact):
    """A checkpoint failed verification and was moved to quarantine."""

    kind: Literal["quarantined"] = "quarantined"
    checkpoint: str
    reason: str


class Noticed(Fact):
    """Something out of the ordinary that the sentinel saw and left alone."""

    kind: Literal["noticed"] = "noticed"
    first_step: int
    last_step: int
    peak: float
    threshold: float
    rule: str
    fate: str


class ScalerSkipped(Fact):
    """The gradient scaler dropped this update because of a non-finite gradient, as it does now and then."""

    kind: Literal["scaler_skipped"] = "scaler_skipped"
    step: int
    batch: int


class PhaseAnnounced(Fact):
    """The script announced a new phase, which begins with this step: the sentinel learns afresh."""

    kind: Literal["announced"] = "announced"
    step: int
    batch: int
    phase: str | None


class Incident(Fact):
    """A verdict that demands action, with its evidence. `requested`: an operator's, who wants to go back.

    `request` names the request file then, `cause` who it was, `explanation` why. `in_hand`: the loss of the detection
    step was not finite though all before it was, so its batch did it. `samples`: data set indices of the batches that
    may have done it, on the ranks that may have; empty where they are not known or too many.
    """

    kind: Literal["incident"] = "incident"
    incident: int
    verdict: Literal["spike", "nonfinite", "requested"]
    cause: str
    rule: str
    value: float | None
    threshold: float | None
    explanation: str
    window: tuple[float, ...]
    ranks: tuple[int, ...]
    onset_step: int
    onset_batch: int
    detection_step: int
    detection_batch: int
    step: int
    timeline: int
    request: str | None = None
    in_hand: bool = False
    samples: tuple[int, ...] = ()


class Planned(Fact):
    """What will be (or, for `observe`, would have been) done about an incident. Written before anything is done.

    `repeats` names the incident whose trouble this is, come back. `through` is the last batch of the detection step;
    `timeline` the one that begins when the plan is carried out. `in_hand`: the answer is to the batch in hand alone.
    """

    kind: Literal["plan"] = "plan"
    incident: int
    repeats: int | None = None
    action: Action
    escalation: int
    checkpoint: str | None
    step: int | None
    batch: int | None
    skip: Window | None
    discards: tuple[str, ...]
    through: int
    timeline: int
    reason: str
    in_hand: bool = False


class Restored(Fact):
    """The plan was carried out on every rank; `steps_lost` updates will not count. `tier`: as in `attached`."""

    kind: Literal["restored"] = "restored"
    incident: int
    checkpoint: str
    step: int
    batch: int
    steps_lost: int
    seconds: float
    route: Literal["in_process", "relaunch"]
    tier: Tier | None = None


class Concluded(Fact):
    """How an incident ended."""

    kind: Literal["outcome"] = "outcome"
    incident: int
    outcome: Outcome
    step: int


class SkipAdded(Fact):
    """A skip window that no incident gave: the user's, or the supervisor's for a batch on which a rank raised twice."""

    kind: Literal["skip_added"] = "skip_added"
    window: Window
    who: str
    why: str
    request: str | None = None

    @property
    def by_supervisor(self) -> bool:
        return self.request is None and self.who == THE_SUPERVISOR


class SampleQuarantine(Fact):
    """From `batch` on, the data set samples `samples`, and no others, are left out of batches: an innocent neighbour
    takes the place of each.

    `added` and `released` is what has changed. `who` and `why`: of an incident's the suspicion, else who ordered it.
    """

    kind: Literal["sample_quarantine"] = "sample_quarantine"
    batch: int
    samples: tuple[int, ...]
    added: tuple[int, ...]
    released: tuple[int, ...]
    who: str
    why: str
    incident: int | None = None
    request: str | None = None

    def in_words(self) -> str:
        listed = ", ".join(map(str, self.samples)) or "none"
        return f"from batch {self.batch} on left out: {listed} ({self.who}: {self.why})"


class Requested(Fact):
    """The ranks have taken up what an operator asked for; `step` and `batch` are where they stood. `answer` follows."""

    kind: Literal["request"] = "request"
    request: str
    order: Order
    to: int | None
    skip: Window | None
    who: str
    why: str
    step: int
    batch: int
    samples: tuple[int, ...] = ()


class Answered(Fact):
    """What became of a request, in words. One that could not be read has an answer only."""

    kind: Literal["answer"] = "answer"
    request: str
    carried_out: bool
    text: str


class PassedOver(Fact):
    """Batches of a skip window were passed over."""

    kind: Literal["skipped"] = "skipped"
    first: int
    last: int
    step: int
    timeline: int

    @model_validator(mode="after")
    def _is_a_window(self) -> PassedOver:
        Window(first=self.first, last=self.last)
        return self

    @property
    def window(self) -> Window:
        return Window(first=self.first, last=self.last)


class Advice(Fact):
    """A likely mistake in how the script uses the guard; said once."""

    kind: Literal["advice"] = "advice"
    code: str
    text: str


class Trouble(Fact):
    """Something of ours failed and training went on without it."""

    kind: Literal["trouble"] = "trouble"
    doing: str
    error: str


AnyFact = Annotated[
    Union[  # noqa: UP007  (a list of classes, one for each kind of line, reads better than a chain)
        Attached, Accepted, Saving, Paced, Committed, BecameGood, Dropped, Drifted, Evicted, CheckpointLost,
        Quarantined, Noticed, ScalerSkipped, PhaseAnnounced, Incident, Planned, Restored, Concluded, SkipAdded,
        SampleQuarantine, Requested, Answered, PassedOver, Advice, Trouble,
        LastSaveFailed, Stopped, Finished, FinalStateLost, ScriptLeft,
        AttemptStarted, AttemptEnded, Hung, StuckAtExit, Blamed, RestartScheduled, Signalled, RunEnded,
        Drained, DrainFailed, LeftDurableRing, Fetched,
    ],
    Field(discriminator="kind"),
]  # fmt: skip


class JournalEntry(BaseModel):
    """A journal line: a fact and its place in the record."""

    model_config = ConfigDict(frozen=True)
    seq: int
    at: str
    attempt: int
    fact: AnyFact


parse_fact: TypeAdapter[Any] = TypeAdapter(AnyFact)
