"""The present state of a run, from journals, heartbeats and processes. Takes no lock and writes nothing.

`StatusReader` reads the state again and again. Each time it reads only what is new, so the cost does not grow with the
length of the run.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from rollback.checkpoints.resume import newest_good_on_record, of_present_timeline
from rollback.checkpoints.tiers import Located, locate
from rollback.errors import RunDirectoryError, message_of
from rollback.facts.history import History
from rollback.facts.training import RARE_KINDS, Attached, JournalEntry, Restored, Tier
from rollback.inspect.document import Point, fields_of
from rollback.inspect.record.cost import Death, deaths
from rollback.inspect.record.ending import RunEnding, confirmed
from rollback.inspect.record.last_judged import LINES, LastJudged, last_judged
from rollback.inspect.record.reading import lost_lines, read_progress, require_run_directory, torn_notice
from rollback.inspect.status.record import RunRecord
from rollback.inspect.status.report import Durable, HeldCheckpoint, Holder, RankStatus, RunState, RunStatus, Work
from rollback.rundir import seal
from rollback.rundir.heartbeats import Heartbeat, read_all_heartbeats
from rollback.rundir.identity import read_identity
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import JournalTail, read_entries
from rollback.rundir.lock import read_holder
from rollback.rundir.metrics.metric_lines import read_last_metrics
from rollback.rundir.paths import WRITING, RunPaths
from rollback.rundir.requests import handed_in
from rollback.system.collector import no_collection
from rollback.system.processes import is_alive, state_of
from rollback.terminal.quantities import seconds_since_epoch


@dataclass(frozen=True)
class Now:
    """Clocks and name of this machine."""

    wall: float
    monotonic: float
    host: str


def read_status(root: Path) -> RunStatus:
    """The status of a run. Raises UsageError, RunDirectoryError, JournalDamaged or RunDoesNotFit."""
    return StatusReader(root).read()


class StatusReader:
    """Reads the status of one run again and again. The constructor reads nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tails: list[JournalTail] = []
        self._past = RunRecord()
        self._seals = 0
        self._deaths_of: tuple[int, bool] | None = None
        self.deaths: dict[int, Death] = {}
        """Those that have undone steps, by attempt, as of the last call."""
        self._held: bool | None = None
        self._ring: list[HeldCheckpoint] = []
        self._unseen: list[str] = []
        self.news: list[JournalEntry] = []
        """The journal entries that the last call read; at the first one, of the ranks' that a kept history covers
        only the `RARE_KINDS`."""

    @no_collection()
    def read(self) -> RunStatus:
        """The status now. Raises as `read_status`; after an error that may pass, make a new reader."""
        paths = require_run_directory(self._root)
        self.news = self._past.take_in(*(tail.new() for tail in self._tails)) if self._tails else self._begin(paths)
        self._seals += sum(tail.seals for tail in self._tails)
        holder, before = _holder(paths), self._held
        self._held = holder is not None and holder.alive != "no"
        if self.news or self._held != before:  # what its memory had, of a disk that took nothing, is lost with it
            self._look_into_ring(paths)
        journals = (paths.train_journal, paths.supervisor_journal)
        torn = [(path, tail.torn_bytes) for path, tail in zip(journals, self._tails, strict=True)]
        notices = [torn_notice(path, size) for path, size in torn if size] + seal.in_words(self._seals) + self._unseen
        notices += _suspended(holder)
        status = _status(self._root, paths, self._past, holder, self._ring, notices)
        self._look_for_deaths(paths, status)
        return status.model_copy(update={"death": self.deaths[max(self.deaths)] if self.deaths else None})

    def _look_for_deaths(self, paths: RunPaths, status: RunStatus) -> None:
        is_over = status.state in ("ended", "died")
        if (known := (len(self._past.told), is_over)) == self._deaths_of:
            return  # the metrics are long
        there = [(it.checkpoint, it.step) for it in self._ring[-1:]]
        far, undone = status.durable, self._past.history.discarded
        if far is not None and far.checkpoint not in {None, *undone} and "://" in (far.place or ""):
            there.append((str(far.checkpoint), far.step or 0))  # this host may have lost its memory since
        next_start = max(there, key=itemgetter(1), default=None) if is_over else None
        self.deaths = deaths(self._past.told, self._past.history.reached, read_progress(paths, []), next_start)
        self._deaths_of = known

    def _look_into_ring(self, paths: RunPaths) -> None:
        try:
            places = locate(paths)
            self._unseen = lost_lines(paths, self._past.history, [place.manifest for place in places])
            self._ring = _ring(places, self._past.history)
        except (OSError, RunDirectoryError) as error:
            self._ring, self._unseen = [], [f"which checkpoints there are cannot be told: {message_of(error)}"]

    def _begin(self, paths: RunPaths) -> list[JournalEntry]:
        """Read what is there, and from the ranks' journal only what a kept history lacks."""
        past = fold_journal(paths.train_journal)
        told = [*read_entries(paths.train_journal, RARE_KINDS, past.folded_blocks), *past.reading.records]
        tails = [JournalTail(paths.train_journal, past.reading), JournalTail(paths.supervisor_journal)]
        self._past, supervisor = RunRecord(past.history), tails[1].new()
        self._tails = tails
        return self._past.begin(told, supervisor)


def _ring(places: Sequence[Located], history: History) -> list[HeldCheckpoint]:
    """The checkpoints of the run that this host can see, as `rollback ring list` finds them. By the record alone they
    could not be told: of one that left the memory it does not say whether the ring has it."""
    manifests, tiers = {}, defaultdict[str, list[Tier]](list)
    for place in places:
        manifests[place.name] = place.manifest
        tiers[place.name].append(place.tier)
    return [
        HeldCheckpoint(checkpoint=it.name, step=it.step, good=it.name in history.good, tiers=tiers[it.name])
        for it in of_present_timeline(history, list(manifests.values()))
    ]


def _status(
    root: Path, paths: RunPaths, past: RunRecord, holder: Holder | None, ring: list[HeldCheckpoint], notices: list[str]
) -> RunStatus:
    history = past.history
    identity = read_identity(paths)
    now = Now(time.time(), time.monotonic(), socket.gethostname())
    judged = last_judged(read_last_metrics(paths.metrics, LINES), past.begun, history.timeline)
    found = read_all_heartbeats(paths)
    heartbeats = {rank: beat for rank, beat in found.items() if beat.attempt >= history.last_attempt}
    ranks = [_rank(rank, heartbeat, now) for rank, heartbeat in sorted(heartbeats.items())]
    slowest = min(ranks, key=lambda entry: (entry.step, entry.batch), default=None)
    point = _present_point(past, judged, list(heartbeats.values()))
    newest_good = newest_good_on_record(history)
    good = history.committed[newest_good] if newest_good else None
    abandoned = holder is not None and {holder.alive, *(entry.alive for entry in ranks)} == {"no"}
    ending = confirmed(
        past.ending, locked=holder is not None, reached=point.step if point else None,
        orphaned=abandoned and past.lacks_its_end,
    )  # fmt: skip
    state = _state(holder, ranks, ending)
    return RunStatus(
        directory=str(root),
        run_id=identity.run_id if identity else None,
        world_size=identity.job.world_size if identity else None,
        state=state,
        doing=slowest.doing if slowest and state in ("running", "unknown") else None,
        attempt=history.last_attempt,
        holder=holder,
        ranks=ranks,
        **fields_of(point, "step", "batch"),
        **fields_of(judged, "loss", "grad_norm", "verdict"),
        last_judged=judged,
        steps_per_second=_rate(past.begun, heartbeats.get(0), now) if state == "running" else None,
        last_good=Point.of(good) if good else None,
        last_good_checkpoint=newest_good,
        last_good_age=max(0, point.step - good.step) if point and good else None,
        candidates=[held.checkpoint for held in ring if not held.good],
        ring=ring,
        durable=_durable(paths, past),
        waiting=past.cause if state == "starting" and past.waiting is not None else None,
        work=_work(paths, past, state, point, now),
        began=past.began,
        incidents=len(history.cases),
        incidents_asked=sum(case.asked_for for case in history.cases),
        rollbacks=sum(case.carried_out for case in history.cases),
        rewinds_asked=sum(case.carried_out and case.asked_for for case in history.cases),
        skipped_batches=sum(map(len, past.passed_over)),
        pending=_pending(history),
        requests=_open_requests(paths, history),
        last_snapshot=past.last_snapshot,
        spare_nodes=past.spares.in_words() if past.spares is not None else None,
        advice=dict(past.advice),
        init=past.history.init,
        ending=ending,
        notices=notices,
    )


def _durable(paths: RunPaths, past: RunRecord) -> Durable | None:
    if not (past.drained or past.undrained):
        return None
    at, fact = past.drained or (None, None)
    place = paths.place_of_ring(fact.place) if fact else None
    history = past.history
    put_aside = fact is not None and fact.checkpoint in history.discarded | history.left_run_directory  # on purpose
    is_there = fact is None or put_aside or "://" in fact.place or not _is_gone(paths.checkpoint(fact.checkpoint))
    return Durable(
        place=place, **fields_of(fact, "checkpoint", "step"), at=at, trouble=past.undrained, is_there=is_there
    )


def _is_gone(checkpoint: Path) -> bool:
    """Where this user may not look, nobody says so: that the ring cannot be read is a notice."""
    try:
        os.stat(checkpoint)
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _work(paths: RunPaths, past: RunRecord, state: RunState, point: Point | None, now: Now) -> Work | None:
    """The present work that takes time: waiting for an attempt, writing a checkpoint, repeating lost steps."""
    if state == "starting" and past.waiting is not None:
        since, total = seconds_since_epoch(past.waiting[0]), past.waiting[1].delay
        done = 0.0 if since is None else min(total, max(0.0, now.wall - since))
        return Work(what="waiting before the next attempt", done=round(done, 1), total=total, unit="seconds")
    if state != "running":
        return None
    written, newest = _being_written(paths), max(past.history.committed.values(), key=lambda c: c.step, default=None)
    if written is not None and newest is not None and newest.bytes:
        return Work(what="writing a checkpoint", done=min(written, newest.bytes), total=newest.bytes, unit="bytes")
    if point is not None and past.lost is not None and past.lost.first <= point.step < past.lost.last:
        done, total = point.step - past.lost.first, past.lost.last - past.lost.first
        return Work(what="making up what was undone", done=done, total=total, unit="steps")
    return None


def _being_written(paths: RunPaths) -> int | None:
    """Bytes on disk of the checkpoint that is being written; None: there is none."""
    try:
        with os.scandir(paths.ring) as entries:
            made = next((entry.path for entry in entries if entry.name.startswith(WRITING)), None)
        if made is None:
            return None
        with os.scandir(made) as files:
            return sum(file.stat(follow_symlinks=False).st_size for file in files)
    except OSError:
        return None


def _holder(paths: RunPaths) -> Holder | None:
    stated = read_holder(paths)
    if stated is None:
        return None
    pid = stated.get("pid")
    number = pid if isinstance(pid, int) and 0 < pid < 1 << 31 else None
    role, host, since = (str(stated.get(name)) for name in ("role", "host", "since"))
    alive = is_alive(pid, host, stated.get("start"))
    return Holder(role=role, pid=number, host=host, since=since, alive=alive)


def _suspended(holder: Holder | None) -> list[str]:
    """A notice where the holder is there and does nothing, as behind Ctrl-Z."""
    if holder is None or holder.alive != "yes" or holder.pid is None or state_of(holder.pid) != "T":
        return []
    return [
        f"{holder.role} (pid {holder.pid}) is suspended, as by Ctrl-Z: until it goes on, nobody sees to what the run "
        f"needs. To let it go on: fg in its shell, or kill -CONT {holder.pid}"
    ]


def _rank(rank: int, heartbeat: Heartbeat, now: Now) -> RankStatus:
    alive = is_alive(heartbeat.pid, heartbeat.host, heartbeat.start)
    age = max(0.0, round(now.monotonic - heartbeat.monotonic, 1)) if heartbeat.host == now.host else None
    return RankStatus.of(heartbeat, rank=rank, alive=alive, age=age)


def _state(holder: Holder | None, ranks: Sequence[RankStatus], ending: RunEnding | None) -> RunState:
    if any(entry.alive == "yes" for entry in ranks):
        return "running"
    if ending is not None:
        return "ended"
    if holder is not None and holder.alive == "yes":
        return "starting"
    if any(entry.alive == "unknown" for entry in ranks) or (holder is not None and holder.alive == "unknown"):
        return "unknown"
    return "died"


def _present_point(past: RunRecord, judged: LastJudged | None, heartbeats: Sequence[Heartbeat]) -> Point | None:
    """The position of the run: from present heartbeats, else from the last judged step, else from facts."""
    if heartbeats:
        slowest = min((Point(step=h.step, batch=h.batch) for h in heartbeats), key=lambda point: point.step)
        # A rank that is starting is at step 0, one that has ended names its last batch, and a fact may be newer.
        return max(filter(None, (slowest, past.point)), key=lambda point: (point.step, point.batch))
    if judged is not None:
        return Point(step=judged.step + 1, batch=judged.batch + 1)
    return past.point


def _rate(begun: JournalEntry | None, heartbeat: Heartbeat | None, now: Now) -> float | None:
    """Steps per second, from the beginning of the present stretch of training to the heartbeat."""
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
    skip = plan.skips_in_words()
    return f"{plan.action} to {plan.checkpoint} (step {plan.step}){skip}, for incident {plan.incident}"


def _open_requests(paths: RunPaths, history: History) -> list[str]:
    """The oldest of them in words, with who asked."""
    return [
        f"{request.in_words()} ({request.who}{': ' + request.why if request.why else ''})"
        for _, request in handed_in(paths, history.answers)[:8]  # what a screen has room for
    ]
