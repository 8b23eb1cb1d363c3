"""The report of a run, as one document. This is the schema of `rollback audit --json`, version 1."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from rollback.facts.fact import InitialState, Sharding
from rollback.facts.incidents import Action, IncidentVerdict, Outcome, Route
from rollback.facts.probes import ProbeOutcome
from rollback.facts.training import RequestKind, Tier, Window
from rollback.inspect.document import Document, Point, ReportItem
from rollback.inspect.record.ending import RunEnding
from rollback.inspect.record.last_judged import LastJudged
from rollback.inspect.record.reading import NODES_IN_WORDS, REMARKS_IN_WORDS
from rollback.rundir.evidence import Explosion, Where

CheckpointOutcome = Literal["candidate", "good", "discarded", "evicted", "lost", "quarantined", "dropped"]


class Span(ReportItem):
    """Inclusive range of batches."""

    first: int
    last: int
    batches: int = Field(description="how many they are")
    passed_over: int = Field(description="how many of them the ranks have passed over; the others are planned only")

    def in_words(self) -> str:
        return Window(first=self.first, last=self.last).in_words()


class Run(ReportItem):
    directory: str
    run_id: str | None = Field(description="null where the ranks never came up")
    created: str | None
    world_size: int | None
    data: dict[str, Any] = Field(description="what the loader says of itself")


class RestoredCheckpoint(ReportItem):
    """A plan that was carried out."""

    checkpoint: str
    step: int
    batch: int
    route: Route
    at: str
    seconds: float = Field(description="what the restore itself took")


class LeadingTensor(ReportItem):
    """A tensor at the head of the list of gradients."""

    name: str
    norm: float | None
    kind: Explosion | None = Field(description="null: its norm is nothing special")


class BatchFile(ReportItem):
    """What a rank kept of the onset step's batch."""

    rank: int
    step: int | None = Field(description="whose batch; null where none was held any more")
    file: str | None = Field(description="safetensors file in the run directory; null where nothing was kept")
    tensors: int
    left_out: list[str] = Field(description="what was not kept, and why")


class EvidenceEntry(ReportItem):
    """What the ranks saw of an incident. Norms are of the rank on which it began, else of the first one."""

    began: str = Field(description="where it began, in words")
    where: Where | None = Field(description="where the first non-finite value was; null: everything was finite")
    step: int | None
    name: str | None = Field(description="of the tensor, where one was found")
    ranks: list[int] = Field(description="on which it began; empty: on every rank, or nothing to tell")
    explosion: Explosion | None = Field(description="worst kind of gradient explosion in the step told of")
    exploding: dict[Explosion, int] = Field(description="gradient tensors of each kind")
    leading: list[LeadingTensor]
    vanishing: int = Field(description="gradient tensors with a norm below 1e-8")
    smallest_gradient: float | None = Field(description="finite norms only, as the three that follow")
    largest_gradient: float | None
    smallest_weight: float | None
    largest_weight: float | None
    batches: list[BatchFile]


class IncidentEntry(ReportItem):
    """One verdict that demanded action: evidence, answer, outcome, price."""

    incident: int
    at: str
    attempt: int
    timeline: int = Field(description="restores that the run had executed before")
    verdict: IncidentVerdict = Field(
        description="damaged: on a probe batch; requested: an operator's; `cause` is who it was, `explanation` why"
    )
    cause: str
    rule: str
    value: float | None = Field(description="what the rule looked at; strings stand for NaN and the infinities")
    threshold: float | None
    explanation: str
    recent: list[float] = Field(description="the values before it, oldest first")
    ranks: list[int] = Field(description="ranks on which it was seen; empty where the rule cannot tell")
    onset: Point
    detection: Point
    action: Action | None = Field(description="null: a crash came before the plan")
    escalation: int = Field(description="rollbacks already spent on this trouble")
    reason: str | None = Field(description="why this action and this checkpoint")
    planned_checkpoint: str | None
    skip: Span | None = Field(description="skip window; for action `observe` the one it would have been")
    screen: Span | None = Field(
        None, description="the batches that were screened; `passed_over` counts those that stood out and were skipped"
    )
    lower_rate: tuple[float, int] | None = Field(
        None, description="factor of the learning rate, and for how many steps; it comes back over as many more"
    )
    restored: RestoredCheckpoint | None
    repeats: int | None = Field(description="the incident that this one is a repeat of")
    repeated_by: int | None
    outcome: Outcome | Literal["open"]
    outcome_step: int | None
    steps_lost: int | None = Field(description="updates done between the restored checkpoint and the restore")
    seconds_lost: float | None = Field(
        description="wall-clock time that this rollback undid; see rollback.inspect.record.cost"
    )
    evidence: EvidenceEntry | None = Field(description="null: no rank left any")


class SkippedBatchEntry(ReportItem):
    """A batch that was passed over, and what it held."""

    batch: int
    epoch: int
    offset: int = Field(description="its position in the epoch")
    indices: dict[int, list[int] | None] = Field(description="data set indices by rank; null where the data has none")
    incidents: list[int] = Field(description="incidents whose skip window it is in")
    by_user: bool = Field(description="whether a window that the user gave contains it")
    by_supervisor: bool = Field(description="whether one of the supervisor does: a rank raised there twice")


class UserWindow(ReportItem):
    """A skip window that no incident gave: the user's, or the supervisor's."""

    span: Span
    who: str
    why: str
    at: str


class SampleEntry(ReportItem):
    """A data set sample that incidents have in common, or that is or was left out."""

    sample: int
    incidents: list[int] = Field(description="those that it explains; empty: it is no suspect")
    in_quarantine: bool = Field(description="whether it is left out of batches now")
    since: int | None = Field(description="the batch from which on it is or was left out; null: it never was")
    who: str | None = Field(description="who decided that last: `suspicion`, `settings`, `the supervisor`, an operator")
    why: str | None


class NoticedEntry(ReportItem):
    """Out of the ordinary, and left alone."""

    at: str
    first_step: int
    last_step: int
    peak: float
    threshold: float
    rule: str
    fate: str


class ProbeEntry(ReportItem):
    """The curve could not tell why the loss was up: the model was asked, or could not be."""

    at: str
    step: int
    onset_step: int = Field(description="where the rise began")
    finding: ProbeOutcome | None = Field(
        description="model: damaged; data: harder, and the rise is the new level; null: it could not be asked"
    )
    explanation: str


class PhaseEntry(ReportItem):
    at: str
    step: int
    batch: int
    phase: str | None = Field(description="null where rank 0 was not told its name")


class RequestEntry(ReportItem):
    """What an operator asked for. Null where the request could not be read."""

    request: str = Field(description="its name")
    order: RequestKind | None
    to: int | None = Field(description="step to go back to")
    skip: Window | None = Field(description="batches to pass over")
    samples: list[int] = Field([], description="data set samples to leave out, or to take in again")
    who: str | None
    why: str | None
    at: str = Field(description="when the ranks took it up; until then, when it was asked")
    taken_up: Point | None = Field(description="where they stood then")
    state: Literal["open", "carried_out", "refused"]
    answer: str | None


@dataclass(slots=True)  # a long run has a hundred thousand, and a model takes four times the time and memory
class CheckpointEntry:
    """A checkpoint, or a snapshot that did not become one."""

    checkpoint: str
    step: Annotated[int | None, Field(description="null where the line that would tell was lost in a crash")]
    batch: int | None
    at: str
    status: CheckpointOutcome
    reason: Annotated[str | None, Field(description="why it was evicted, quarantined or dropped")]
    bytes: int | None
    seconds: Annotated[float | None, Field(description="from snapshot to commit")]
    tier: Annotated[
        Tier | None, Field(description="where it was committed: in a slot of the fast tier, or in the ring")
    ]


class Message(ReportItem):
    """Advice to the user, or something of ours that failed and that training went on without."""

    at: str
    attempt: int
    subject: str = Field(description="code of an advice; what was being done for a trouble")
    text: str


AttemptEnd = Literal["finished", "stopped", "left", "died", "running_or_unknown"]
"""`finished`: trained to the end. `left`: the script left its loop over the guard before that."""


class AttemptEntry(ReportItem):
    """One torchrun spawn, or one run of the script without a supervisor."""

    attempt: int
    supervised: bool
    started: str
    host: str | None
    pid: int | None
    changed: list[str] = Field(description="what was not as at the start before: arguments, environment, the script")
    checkpoint: str | None = Field(description="what it resumed from")
    init: InitialState | None = Field(None, description="what a new run began with, written by others")
    sharding: Sharding | None = Field(None, description="how the model was spread; null: each rank held all of it")
    begins: Point | None = Field(description="null: the ranks did not get as far as agreeing where to begin")
    reached: int | None = Field(description="step in progress when last heard of")
    at_least: bool = Field(
        description="whether `reached` and `steps_lost` are the least that can have been: what ranks that were killed "
        "did after their last word is not on record"
    )
    ended: AttemptEnd
    ended_at: str | None
    status: int | None = Field(description="exit status of torchrun")
    cause: str | None = Field(description="how it ended, in words")
    last_snapshot: str | None = Field(description="how the state was kept, in words; null: nobody tried")
    nodes: list[str] = Field(default_factory=list, description=NODES_IN_WORDS)
    remarks: list[str] = Field(default_factory=list, description=REMARKS_IN_WORDS)
    signals: list[str] = Field(description="signals that the supervisor passed on")
    restart_delay: float | None = Field(description="seconds until the next attempt; null where none was scheduled")
    restart_reason: str | None
    restart_budget_left: int | None
    steps_lost: int | None = Field(description="updates that its end undid: the next attempt did them again")
    seconds_lost: float | None


class Totals(ReportItem):
    incidents: int
    incidents_asked: int = Field(0, description="those that are rewinds that operators asked for")
    explosions: dict[Explosion, int] = Field(description="incidents by the worst kind of gradient explosion seen")
    rollbacks: int = Field(description="rollbacks and replays that answered them")
    rewinds_asked: int = Field(0, description="those that operators asked for")
    noticed: int
    scaler_skips: int
    attempts: int
    skipped_batches: int = Field(description="batches passed over, each counted once")
    skipped_samples: int | None = Field(description="data set samples in them over all ranks; null where not known")
    steps: int = Field(description="updates that count")
    steps_at_least: bool = Field(description="whether there may be more: see `at_least` of an attempt")
    steps_lost: int = Field(description="updates that were undone and done again")
    steps_lost_at_least: bool = Field(description="as above")
    goodput: float | None = Field(
        description="share of `seconds` neither lost, hung nor down; null before the first step or without `seconds`"
    )
    seconds: float | None = Field(description="wall-clock; null: a clock was set back by over 1% of it")
    seconds_lost: float = Field(description="of these, undone by rollbacks and deaths")
    seconds_hung: float = Field(description="of these, from the last progress of attempts that hung to their end")
    seconds_down: float = Field(description="of these, between the end of an attempt and the next one's beginning")


class AuditReport(Document):
    """Everything on record about a run. Lists are in the order in which things happened."""

    run: Run
    totals: Totals
    incidents: list[IncidentEntry]
    skipped: list[SkippedBatchEntry] = Field(description="by batch")
    user_windows: list[UserWindow]
    samples: list[SampleEntry] = Field(description="suspected, or left out")
    noticed: list[NoticedEntry]
    probes: list[ProbeEntry]
    scaler_skipped: list[Point]
    phases: list[PhaseEntry]
    requests: list[RequestEntry]
    attempts: list[AttemptEntry]
    checkpoints: list[CheckpointEntry]
    advice: list[Message]
    troubles: list[Message]
    last_judged: LastJudged | None = Field(description="null: no step is on record")
    ending: RunEnding | None = Field(description="null while the run is running, or where it died without a word")
    notices: list[str] = Field(description="what could not be read or does not add up")

    def stories(self) -> list[list[IncidentEntry]]:
        """The incidents in groups: a first incident with the incidents that repeat it."""
        grouped: list[list[IncidentEntry]] = []
        for entry in self.incidents:
            if entry.repeats is not None and grouped and grouped[-1][-1].incident == entry.repeats:
                grouped[-1].append(entry)
            else:
                grouped.append([entry])
        return grouped

    def skipped_by(self, incident: int) -> list[SkippedBatchEntry]:
        return [entry for entry in self.skipped if incident in entry.incidents]
