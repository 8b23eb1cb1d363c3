"""The evidence about an attempt, from the run directory, rank 0 and torchrun's process. Writes nothing."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.resume import is_provisional
from rollback.errors import JournalDamaged, RunDirectoryError
from rollback.facts.history import History, fold, in_durable_ring
from rollback.facts.training import Hung, Stopped
from rollback.rundir.failures import read_failures
from rollback.rundir.heartbeats import Heartbeat, UnrecordedEnd, read_all_heartbeats
from rollback.rundir.journal.folded_journal import FoldedJournal, fold_journal
from rollback.rundir.journal.journal import JournalTail
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.supervisor.diagnosis.attempt_record import AttemptRecord
from rollback.supervisor.diagnosis.first_cause import RankEnd
from rollback.supervisor.diagnosis.outcome import AttemptEvidence, HostOutcome

_KEEPS_UP_EVERY = 10.0  # seconds


class TrainJournal:
    """The ranks' journal. Each line is read once, since the journal is read ten times a second.

    It keeps the records of two attempts. past: the attempts before this launch; None: there are none.
    """

    def __init__(self, path: Path, past: FoldedJournal | None = None) -> None:
        self._tail = JournalTail(path, past.reading if past else None)
        self._history = past.history if past else History()
        self._of_attempt: dict[int, AttemptRecord] = {}
        self._read_at = time.monotonic()
        self._damage: JournalDamaged | None = None

    def _read(self) -> None:
        self._read_at = time.monotonic()
        if self._damage is not None:
            raise self._damage
        new = self._tail.new()
        try:
            fold(new, self._history)
        except JournalDamaged as error:
            self._damage = error  # the lines are read
            raise
        for entry in new:
            self._of_attempt.setdefault(entry.attempt, AttemptRecord()).take(entry)
        for attempt in sorted(self._of_attempt)[:-2]:
            del self._of_attempt[attempt]

    @property
    def history(self) -> History:
        """What the whole journal amounts to now. Raises as `records`."""
        self._read()
        return self._history

    def of_attempt(self, attempt: int) -> AttemptRecord:
        """The record of one of the last two attempts of this launch that have any; of an earlier one it is empty.

        Raises JournalDamaged or RunDirectoryError.
        """
        self._read()
        return self._of_attempt.get(attempt, AttemptRecord())

    def keep_up(self) -> None:
        """Read on from time to time, so that a long attempt does not leave all of it to be read when it has ended, in
        front of the next one. What cannot be read is left for then."""
        if time.monotonic() - self._read_at > _KEEPS_UP_EVERY:
            with contextlib.suppress(RunDirectoryError):
                self._read()


def furthest_step(paths: RunPaths, told: int | None, attempt: int | None = None) -> int | None:
    """The furthest step in facts (`told`) and heartbeats, and in the failure records of `attempt`, if it is given."""
    steps = [] if told is None else [told]
    steps += [beat.step for beat in read_all_heartbeats(paths).values() if attempt in (None, beat.attempt)]
    if attempt is not None:
        steps += [record.step for record in read_failures(paths.failures(attempt)).values()]
    return max(steps, default=None)


def gather(
    paths: RunPaths,
    journal: TrainJournal,
    attempt: int,
    *,
    left: HostOutcome,
    told_to_stop: bool,
    hung: Hung | None = None,
) -> AttemptEvidence:
    """All evidence about how an attempt ended. Call it when all its processes are gone."""
    record = journal.of_attempt(attempt)
    finished, lost, stopped = record.finished, record.final_state_lost, record.stopped
    unrecorded, complete = left.unrecorded, None
    if unrecorded is not None and unrecorded.step in {end.step for end in (finished, lost, stopped) if end is not None}:
        unrecorded = None  # the disk had room again before the rank ended
    told = record.furthest
    if unrecorded is not None:
        told, lacking = max(told or 0, unrecorded.step), f"{paths.train_journal}: {unrecorded.why}"
        match unrecorded.how:
            case "complete":
                complete = lacking
            case "structural" | "no_checkpoint" as reason:
                account = f"the output of rank 0 says why, and the run directory could not take that ({lacking})"
                stopped = Stopped(
                    reason=reason, step=unrecorded.step, batch=unrecorded.batch, checkpoint=None, account=account
                )
    furthest = furthest_step(paths, told, attempt)
    return AttemptEvidence(
        left=left,
        told_to_stop=told_to_stop,
        attached=unrecorded is not None or record.attached,
        stopped=stopped,
        finished=finished,
        final_state_lost=lost,
        save_failed=record.save_failed,
        checkpoint_step=newest_there(paths, journal.history),
        step=unrecorded.step if unrecorded else _step_since_rollback(paths, record, attempt, left.kept, furthest),
        furthest=furthest,
        hung=hung,
        unrecorded=complete,
    )


def _step_since_rollback(
    paths: RunPaths,
    record: AttemptRecord,
    attempt: int,
    kept: LastSnapshotResult | None,
    furthest: int | None,
) -> int | None:
    """How far an attempt had come at its end. A heartbeat may be from before a rollback in it; a failure record and the
    newest end mark are not."""
    if record.restored is None:
        return furthest
    steps = [failure.step for failure in read_failures(paths.failures(attempt)).values()]
    marked = kept.furthest if kept is not None else None
    return max(record.since_restored or 0, marked or 0, *steps)


def newest_there(paths: RunPaths, history: History) -> int | None:
    """The step of the newest checkpoint from which the run may go on, here or in the durable ring; None: there is none.

    Where the ring cannot be looked into, it is that of the newest one in memory, or that was seen to reach the ring.
    """
    try:
        here = tiers.locate(paths)
    except OSError:
        here = tiers.in_slots(paths)
    names = {place.name for place in here} | in_durable_ring(fold_journal(paths.supervisor_journal).history)
    names -= {place.name for place in here if is_provisional(history, place.manifest)}
    return max((CheckpointName(name).step for name in names), default=None)


def rank_ends(paths: RunPaths, attempt: int, left: HostOutcome) -> list[RankEnd]:
    """How each known rank ended: by torchrun's account, its failure record, its heartbeat and what the host saw."""
    records = read_failures(paths.failures(attempt))
    failures = {failure.rank: failure for failure in (left.failures.failures if left.failures else ())}
    beats = {rank: beat for rank, beat in read_all_heartbeats(paths).items() if beat.attempt == attempt}
    return [
        RankEnd(
            rank, failures.get(rank), records.get(rank), stopped=rank in left.stopped, oom_hosts=left.oom_hosts,
            beat=beats.get(rank), last_snapshot_step=left.kept.step if left.kept is not None else None,
        )
        for rank in sorted({*records, *failures, *left.stopped, *beats})
    ]  # fmt: skip


def unrecorded_by(beats: Mapping[int, Heartbeat]) -> UnrecordedEnd | None:
    """What a rank has shown of a journal that could not take the end of the training. beats: those on a host's board,
    which no disk holds back."""
    return next((beat.unrecorded_end for beat in beats.values() if beat.unrecorded_end is not None), None)
