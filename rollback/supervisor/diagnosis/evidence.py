"""The evidence about an attempt, from the run directory, rank 0 and torchrun's process. Writes nothing."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.resume import is_provisional
from rollback.facts.history import History, fold, furthest_of, in_durable_ring
from rollback.facts.training import (
    Attached,
    Committed,
    Fact,
    FinalStateLost,
    Finished,
    Hung,
    JournalEntry,
    LastSaveFailed,
    Restored,
    Stopped,
)
from rollback.rundir.failures import read_failures
from rollback.rundir.heartbeats import Heartbeat, UnrecordedEnd, read_all_heartbeats
from rollback.rundir.journal.folded_journal import FoldedJournal, fold_journal
from rollback.rundir.journal.journal import JournalTail
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.supervisor.diagnosis.first_cause import RankEnd
from rollback.supervisor.diagnosis.outcome import AttemptEvidence, HostOutcome

_Fact = TypeVar("_Fact", bound=Fact)


class TrainJournal:
    """The ranks' journal. Each line is read once, since the journal is read ten times a second.

    It keeps the entries of two attempts: a launch of months has too many of them to keep all.

    past: the attempts before this launch; None: there are none.
    """

    def __init__(self, path: Path, past: FoldedJournal | None = None) -> None:
        self._tail = JournalTail(path, past.reading if past else None)
        self._history = past.history if past else History()
        self._of_attempt: dict[int, list[JournalEntry]] = {}

    def _read(self) -> None:
        new = self._tail.new()
        fold(new, self._history)
        for record in new:
            self._of_attempt.setdefault(record.attempt, []).append(record)
        for attempt in sorted(self._of_attempt)[:-2]:
            del self._of_attempt[attempt]

    @property
    def history(self) -> History:
        """What the whole journal amounts to now. Raises as `records`."""
        self._read()
        return self._history

    def records(self, attempt: int) -> list[JournalEntry]:
        """Facts of the ranks of one of the last two attempts of this launch that have any; none of earlier ones.

        Raises JournalDamaged or RunDirectoryError.
        """
        self._read()
        return list(self._of_attempt.get(attempt, ()))

    def has_attached(self, attempt: int) -> bool:
        return any(isinstance(record.fact, Attached) for record in self.records(attempt))


def furthest_step(paths: RunPaths, told: int | None, attempt: int | None = None) -> int | None:
    """The furthest step in facts (`told`) and heartbeats, and in the failure records of `attempt`, if it is given."""
    steps = [] if told is None else [told]
    steps += [beat.step for beat in read_all_heartbeats(paths).values() if attempt in (None, beat.attempt)]
    if attempt is not None:
        steps += [record.step for record in read_failures(paths.failures(attempt)).values()]
    return max(steps, default=None)


def got_further(
    records: Iterable[JournalEntry], step: int | None, best: int | None, *, before: Iterable[JournalEntry] = ()
) -> bool:
    """Whether an attempt made progress.

    It did if it went further than all attempts before, or if it left a checkpoint after the one it began with: after a
    rollback a run repeats steps and still makes progress. Not so where it began where the attempt before it did: what
    that one left was of no use, as a checkpoint of an epoch's end is none to a script whose evaluation fails there
    each time. step: the furthest step of the attempt. best: that of all attempts before; None: this is the first
    attempt. before: the records of the attempt before it.
    """
    began: int | None = None
    began_before = {record.fact.step for record in before if isinstance(record.fact, Attached)}
    for record in records:
        if isinstance(record.fact, Attached):
            began = record.fact.step
        elif began is None or began in began_before:
            continue
        elif isinstance(record.fact, Committed) and record.fact.step > began:
            return True
    return step is not None and step > (best or 0)


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
    records = journal.records(attempt)
    finished, lost, stopped = _last(records, Finished), _last(records, FinalStateLost), _last(records, Stopped)
    unrecorded, complete = left.unrecorded, None
    if unrecorded is not None and unrecorded.step in {end.step for end in (finished, lost, stopped) if end is not None}:
        unrecorded = None  # the disk had room again before the rank ended
    told = furthest_of(records)
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
        attached=unrecorded is not None or any(isinstance(record.fact, Attached) for record in records),
        stopped=stopped,
        finished=finished,
        final_state_lost=lost,
        save_failed=_last(records, LastSaveFailed),
        checkpoint_step=newest_there(paths, journal.history),
        step=unrecorded.step if unrecorded else _step_since_rollback(paths, records, attempt, left.kept, furthest),
        furthest=furthest,
        hung=hung,
        unrecorded=complete,
    )


def _step_since_rollback(
    paths: RunPaths,
    records: Sequence[JournalEntry],
    attempt: int,
    kept: LastSnapshotResult | None,
    furthest: int | None,
) -> int | None:
    """How far an attempt had come at its end. A heartbeat may be from before a rollback in it; a failure record and the
    newest end mark are not."""
    for at, record in reversed([*enumerate(records)]):
        if isinstance(record.fact, Restored) and record.fact.route == "in_process":
            steps = [failure.step for failure in read_failures(paths.failures(attempt)).values()]
            marked = kept.furthest if kept is not None else None
            return max(record.fact.step, furthest_of(records[at:]) or 0, marked or 0, *steps)
    return furthest


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


def _last(records: Iterable[JournalEntry], kind: type[_Fact]) -> _Fact | None:
    """The last fact of that kind since the ranks attached last: one process may train several times."""
    found = None
    for record in records:
        if isinstance(record.fact, Attached):
            found = None
        elif isinstance(record.fact, kind):
            found = record.fact
    return found


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
