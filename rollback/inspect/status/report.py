"""The document of `rollback status --json`, and its parts."""

from typing import Literal

from pydantic import Field

from rollback.facts.fact import InitialState
from rollback.facts.training import Tier
from rollback.inspect.document import Document, Point, ReportItem
from rollback.inspect.record.cost import Death
from rollback.inspect.record.ending import RunEnding
from rollback.inspect.record.last_judged import LastJudged
from rollback.system.processes import Alive

RunState = Literal["running", "starting", "ended", "died", "unknown"]


class RankStatus(ReportItem):
    rank: int
    alive: Alive = Field(description="unknown: it runs on another host")
    pid: int
    host: str
    step: int
    batch: int
    doing: str
    age: float | None = Field(description="seconds since the heartbeat; null for another host")


class Holder(ReportItem):
    """The process that holds the run directory, by holder.json."""

    role: str
    pid: int | None
    host: str
    since: str
    alive: Alive


class HeldCheckpoint(ReportItem):
    """A checkpoint that the run can restore."""

    checkpoint: str
    step: int
    good: bool = Field(description="false: a candidate")
    tiers: list[Tier] = Field(description="where it lies")


class Durable(ReportItem):
    """The durable ring: a URL, or the run directory's own where it is filled from memory."""

    place: str | None = Field(description="null: not known, nothing was copied yet")
    checkpoint: str | None = Field(description="the newest one that was copied, as are the next two")
    step: int | None
    at: str | None
    trouble: str | None = Field(description="why nothing could be copied since; null: nothing is amiss")
    is_there: bool = Field(True, description="false: that one is not in the run directory's ring; a URL is not asked")


class Work(ReportItem):
    what: str
    done: float
    total: float
    unit: Literal["bytes", "seconds", "steps"]


class RunStatus(Document):
    """Schema of `rollback status --json`, version 1; conventions as in the audit."""

    directory: str
    run_id: str | None
    world_size: int | None
    state: RunState = Field(
        description="running: ranks are alive; starting: only the holder is; ended: it said so; died: without a word; "
        "unknown: it may be running on another host"
    )
    doing: str | None = Field(description="what the slowest rank says it is doing")
    attempt: int
    holder: Holder | None
    ranks: list[RankStatus]
    step: int | None = Field(description="step in progress")
    batch: int | None
    loss: float | None = Field(description="of the last judged step, as are the next two")
    grad_norm: float | None
    verdict: str | None
    last_judged: LastJudged | None = Field(description="that step; null: none is on record")
    steps_per_second: float | None = Field(description="over the present attempt since its last restore")
    last_good: Point | None
    last_good_checkpoint: str | None
    last_good_age: int | None = Field(description="steps done since it was taken")
    candidates: list[str]
    ring: list[HeldCheckpoint] = Field(description="those that this host can see, oldest first")
    durable: Durable | None = Field(description="null: nothing was copied to one yet")
    waiting: str | None = Field(
        None, description="why there is to be another attempt, where the last one is over and the next has not begun"
    )
    work: Work | None = Field(description="null: nothing but training")
    began: str | None = Field(description="time of the first fact")
    init: InitialState | None = Field(None, description="what the run began with, written by others")
    incidents: int
    incidents_asked: int = Field(0, description="those that are rewinds that operators asked for")
    rollbacks: int = Field(description="restores that answered them")
    rewinds_asked: int = Field(0, description="those that operators asked for")
    skipped_batches: int
    pending: str | None = Field(description="a plan that is not carried out yet")
    requests: list[str] = Field(description="what operators asked for and has no answer yet, in words")
    last_snapshot: str | None = Field(
        description="how the state was kept when an attempt ended last, and the steps lost; null: nobody tried"
    )
    death: Death | None = Field(None, description="the last one that has undone steps; null: none has")
    spare_nodes: str | None = Field(
        None, description="the nodes that wait for the place of another one, in words; null: there never were any"
    )
    advice: dict[str, str] = Field(description="likely mistakes in the script: text by code")
    ending: RunEnding | None
    notices: list[str]
