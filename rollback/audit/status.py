"""What a run is doing now: a glance at journals, heartbeats and processes. Takes no lock and writes nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from rollback.audit.asked import open_requests
from rollback.audit.compile import ending_of
from rollback.audit.cost import seconds_since_epoch
from rollback.audit.ledger import Ending, Entry, Point
from rollback.audit.material import read_records, require_run_directory
from rollback.events import Advice, Attached, Committed, PassedOver, Record, Restored
from rollback.rundir.durable import open_regular
from rollback.rundir.history import History, fold, merge_windows
from rollback.rundir.identity import read_identity
from rollback.rundir.lock import read_holder
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Heartbeat, Metric, read_heartbeats

Alive = Literal["yes", "no", "unknown"]

_SAME_START = 2.0  # seconds; a process start time is known to a clock tick, boot time to a second
_TAIL = 1 << 16


class RankStatus(Entry):
    """A rank by its heartbeat."""

    rank: int
    alive: Alive = Field(description="unknown: it runs on another host")
    pid: int
    host: str
    step: int
    batch: int
    doing: str
    age: float | None = Field(description="seconds since the heartbeat; null for another host")


class Holder(Entry):
    """Who runs the run directory, as holder.json says."""

    role: str
    pid: int | None
    host: str
    since: str
    alive: Alive


class Status(Entry):
    """Schema of `rollback status --json`, version 1; conventions as in the ledger."""

    schema_version: Literal[1] = Field(1, alias="schema")
    directory: str
    run_id: str | None
    world_size: int | None
    state: Literal["running", "starting", "ended", "died", "unknown"] = Field(
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
    steps_per_second: float | None = Field(description="over the present attempt since its last restore")
    last_good: Point | None
    last_good_checkpoint: str | None
    last_good_age: int | None = Field(description="steps done since it was taken")
    candidates: list[str]
    incidents: int
    rollbacks: int
    skipped_batches: int
    pending: str | None = Field(description="a plan that is not carried out yet")
    requests: list[str] = Field(description="what operators asked for and has no answer yet, in words")
    advice: dict[str, str] = Field(description="likely mistakes in the script: text by code")
    ending: Ending | None
    notices: list[str]


@dataclass(frozen=True)
class Now:
    """What the machine says, as against what the files say: clocks, own host, and who is alive."""

    wall: float
    monotonic: float
    host: str

    def process(self, pid: int | None, host: str, created: float | None, not_after: float | None = None) -> Alive:
        """Whether a process lives: the same pid with another start time is another process."""
        if host != self.host or pid is None:
            return "unknown"
        try:
            started = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            return "no"
        except psutil.Error:
            return "unknown"
        if created is not None and abs(started - created) > _SAME_START:
            return "no"
        return "no" if not_after is not None and started > not_after + _SAME_START else "yes"


def read_status(root: Path) -> Status:
    """The status of a run. Raises UsageError, RunDirectoryError, JournalDamaged or RunDoesNotFit."""
    paths = require_run_directory(root)
    notices: list[str] = []
    records = read_records(paths, notices)
    identity = read_identity(paths)
    now = Now(time.time(), time.monotonic(), socket.gethostname())
    metric = read_last_metric(paths)
    history = fold(records)
    found = read_heartbeats(paths.ranks)
    heartbeats = {rank: beat for rank, beat in found.items() if beat.attempt >= history.last_attempt}
    ending = ending_of(records)
    holder = _holder(paths, now)
    ranks = [_rank(rank, heartbeat, now) for rank, heartbeat in sorted(heartbeats.items())]
    slowest = min(ranks, key=lambda entry: (entry.step, entry.batch), default=None)
    point = _present_point(records, metric, list(heartbeats.values()))
    newest_good = max((name for name in history.good if name in history.committed), default=None)
    good = history.committed[newest_good] if newest_good else None
    passed = merge_windows(record.fact.window for record in records if isinstance(record.fact, PassedOver))
    state = _state(holder, ranks, ending)
    return Status(
        schema=1,
        directory=str(root),
        run_id=identity.run_id if identity else None,
        world_size=identity.job.world_size if identity else None,
        state=state,
        doing=slowest.doing if slowest and state in ("running", "unknown") else None,
        attempt=history.last_attempt,
        holder=holder,
        ranks=ranks,
        step=point.step if point else None,
        batch=point.batch if point else None,
        loss=metric.loss if metric else None,
        grad_norm=metric.grad_norm if metric else None,
        verdict=metric.verdict if metric else None,
        steps_per_second=_rate(records, heartbeats.get(0), now) if state == "running" else None,
        last_good=Point(step=good.step, batch=good.batch) if good else None,
        last_good_checkpoint=newest_good,
        last_good_age=max(0, point.step - good.step) if point and good else None,
        candidates=sorted(set(history.committed) - history.good - history.discarded - history.gone),
        incidents=len(history.cases),
        rollbacks=sum(case.carried_out for case in history.cases),
        skipped_batches=sum(window.last - window.first + 1 for window in passed),
        pending=_pending(history),
        requests=open_requests(paths, history.answers),
        advice={record.fact.code: record.fact.text for record in records if isinstance(record.fact, Advice)},
        ending=ending,
        notices=notices,
    )


def read_last_metric(paths: RunPaths) -> Metric | None:
    """The last sound line of the metrics, found from the end: the file may be large."""
    try:
        with open_regular(paths.metrics) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except (OSError, ValueError):
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return Metric.model_validate_json(line)
    return None


def _holder(paths: RunPaths, now: Now) -> Holder | None:
    said = read_holder(paths)
    if said is None:
        return None
    pid = said.get("pid")
    number = pid if isinstance(pid, int) and 0 < pid < 1 << 31 else None
    since, host = str(said.get("since")), str(said.get("host"))
    return Holder(
        role=str(said.get("role")),
        pid=number,
        host=host,
        since=since,
        alive=now.process(number, host, None, seconds_since_epoch(since)),
    )


def _rank(rank: int, heartbeat: Heartbeat, now: Now) -> RankStatus:
    return RankStatus(
        rank=rank,
        alive=now.process(heartbeat.pid if 0 < heartbeat.pid < 1 << 31 else None, heartbeat.host, heartbeat.created),
        pid=heartbeat.pid,
        host=heartbeat.host,
        step=heartbeat.step,
        batch=heartbeat.batch,
        doing=heartbeat.doing,
        age=max(0.0, round(now.monotonic - heartbeat.monotonic, 1)) if heartbeat.host == now.host else None,
    )


def _state(
    holder: Holder | None, ranks: Sequence[RankStatus], ending: Ending | None
) -> Literal["running", "starting", "ended", "died", "unknown"]:
    if any(entry.alive == "yes" for entry in ranks):
        return "running"
    if ending is not None:
        return "ended"
    if holder is not None and holder.alive == "yes":
        return "starting"
    if any(entry.alive == "unknown" for entry in ranks) or (holder is not None and holder.alive == "unknown"):
        return "unknown"
    return "died"


def _present_point(records: Iterable[Record], metric: Metric | None, heartbeats: Sequence[Heartbeat]) -> Point | None:
    """Where the run stands: the heartbeats of the present attempt tell best, then the last judged step, then facts."""
    if heartbeats:
        return min((Point(step=h.step, batch=h.batch) for h in heartbeats), key=lambda point: point.step)
    if metric is not None:
        return Point(step=metric.step + 1, batch=metric.batch + 1)
    told = [
        Point(step=r.fact.step, batch=r.fact.batch)
        for r in records
        if isinstance(r.fact, (Attached, Restored, Committed))
    ]
    return told[-1] if told else None


def _rate(records: Sequence[Record], heartbeat: Heartbeat | None, now: Now) -> float | None:
    """Steps a second from where the present stretch of training began to the heartbeat."""
    begun = next((r for r in reversed(records) if isinstance(r.fact, (Attached, Restored))), None)
    if begun is None or heartbeat is None or heartbeat.host != now.host or begun.attempt != heartbeat.attempt:
        return None
    assert isinstance(begun.fact, (Attached, Restored))
    at = seconds_since_epoch(begun.at)
    if at is None:
        return None
    seconds = (now.wall - (now.monotonic - heartbeat.monotonic)) - at
    steps = heartbeat.step - begun.fact.step
    return round(steps / seconds, 3) if seconds > 0 and steps > 0 else None


def _pending(history: History) -> str | None:
    plan = history.pending
    if plan is None:
        return None
    skip = f", skip batches {plan.skip}" if plan.skip else ""
    return f"{plan.action} to {plan.checkpoint} (step {plan.step}){skip}, for incident {plan.incident}"
