"""The facts that a run's journals hold, one class for each kind of line.

A fact says what happened; it is never edited or taken back. State is what folding the facts gives
(`rollback.rundir.history`). docs/format.md has the table of all kinds, and a test compares the two.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

Outcome = Literal["recovered", "repeated", "not_reproduced", "structural", "observed", "carried_out"]
Action = Literal["rollback", "retry", "stop", "observe"]
Order = Literal["rewind", "skip", "stop"]
Why = Literal[
    "stopped", "hang", "hardware", "oom_kill", "signal", "out_of_memory", "exception", "exit", "aborted", "timeout",
    "lost_peer", "launcher", "told_to_stop",
]  # fmt: skip
"""Classes of what can end an attempt before its time; `rollback.supervisor.classify` has the table."""


class Window(BaseModel):
    """Inclusive range of batches, `first` to `last`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    first: int = Field(ge=0)
    last: int = Field(ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Window:
        if self.last < self.first:
            raise ValueError(f"window ends ({self.last}) before it begins ({self.first})")
        return self

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch <= self.last

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}:{self.last}"


class Fact(BaseModel):
    """Base of all facts. `kind` names the line, `writer` the journal it belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")
    writer: ClassVar[Literal["train", "supervisor"]] = "train"
    kind: str

    @model_validator(mode="before")
    @classmethod
    def _spell_out_what_utf8_lacks(cls, fields: Any) -> Any:
        return _writable(fields)


def _writable(value: Any) -> Any:
    """With lone surrogates spelt out: an exception that quotes an undecodable path must not fail the journal."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, (list, tuple)) else value


class Attached(Fact):
    """The ranks of an attempt have agreed on where to begin."""

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


class Committed(Fact):
    """A checkpoint exists: all shards and the manifest are on disk under its final name."""

    kind: Literal["committed"] = "committed"
    checkpoint: str
    step: int
    batch: int
    timeline: int
    bytes: int
    seconds: float


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
    """A checkpoint left the ring."""

    kind: Literal["evicted"] = "evicted"
    checkpoint: str
    reason: str


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

    `request` names the request file then, `cause` who it was, `explanation` why.
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


class Planned(Fact):
    """What will be (or, for `observe`, would have been) done about an incident. Written before anything is done.

    `repeats` names the incident whose trouble this is, come back. `through` is the last batch of the detection step;
    `timeline` the one that begins when the plan is carried out.
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


class Restored(Fact):
    """The plan was carried out on every rank; `steps_lost` updates will not count."""

    kind: Literal["restored"] = "restored"
    incident: int
    checkpoint: str
    step: int
    batch: int
    steps_lost: int
    seconds: float
    route: Literal["in_process", "relaunch"]


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


class Stopped(Fact):
    """The ranks stopped together before the end of the data."""

    kind: Literal["stopped"] = "stopped"
    reason: Literal["preempted", "structural"]
    step: int
    batch: int
    checkpoint: str | None
    account: str


class Finished(Fact):
    """The training loop ended by itself."""

    kind: Literal["finished"] = "finished"
    step: int
    batch: int


class AttemptStarted(Fact):
    """torchrun was started."""

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["attempt_started"] = "attempt_started"
    command: tuple[str, ...]
    host: str
    pid: int


class AttemptEnded(Fact):
    """torchrun and all its ranks are gone. `cause` is in words, from the evidence in the run directory.

    `why` is its class (null: the attempt ended as it should), `rank` the one with which it began, `batch` what that
    rank had in hand, `followed` the ranks whose failure is a consequence, `fingerprint` that of the exception.
    """

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["attempt_ended"] = "attempt_ended"
    status: int
    cause: str
    step: int | None
    seconds: float
    why: Why | None = None
    rank: int | None = None
    batch: int | None = None
    followed: tuple[int, ...] = ()
    fingerprint: str | None = None


class Hung(Fact):
    """No rank showed a sign of progress within `limit` seconds: stacks were taken and everything was ended.

    `suspect` is the rank that the others seem to wait for, null where none stands out.
    """

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["hung"] = "hung"
    suspect: int | None
    reason: str
    silent: float
    limit: float
    stacks: tuple[int, ...]


class Blamed(Fact):
    """A rank raised the same exception twice at the same batch: the next attempt passes over `window`."""

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["blamed"] = "blamed"
    window: Window
    batch: int
    rank: int
    step: int
    fingerprint: str
    error: str
    attempts: tuple[int, ...]


class RestartScheduled(Fact):
    """The supervisor will start another attempt."""

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["restart_scheduled"] = "restart_scheduled"
    delay: float
    budget_left: int
    reason: str


class Signalled(Fact):
    """The supervisor was told to stop and passed it on to the ranks."""

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["signalled"] = "signalled"
    signal: str


class RunEnded(Fact):
    """The supervisor is done with this run for now; `exit_code` is what it exited with."""

    writer: ClassVar[Literal["train", "supervisor"]] = "supervisor"
    kind: Literal["run_ended"] = "run_ended"
    exit_code: int
    reason: str


AnyFact = Annotated[
    Union[  # noqa: UP007  (a list of classes, one for each kind of line, reads better than a chain)
        Attached, Committed, BecameGood, Dropped, Evicted, Quarantined, Noticed, ScalerSkipped, PhaseAnnounced,
        Incident, Planned, Restored, Concluded, SkipAdded, Requested, Answered, PassedOver,
        Advice, Trouble, Stopped, Finished,
        AttemptStarted, AttemptEnded, Hung, Blamed, RestartScheduled, Signalled, RunEnded,
    ],
    Field(discriminator="kind"),
]  # fmt: skip


class Record(BaseModel):
    """A journal line: a fact and its place in the record."""

    model_config = ConfigDict(frozen=True)
    seq: int
    at: str
    attempt: int
    fact: AnyFact


parse_fact: TypeAdapter[Any] = TypeAdapter(AnyFact)
