"""The supervisor's part in the last snapshot: it asks the ranks of its host for one before it ends them, and reads what
they made of it."""

import contextlib
import time
from collections.abc import Callable, Collection

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import end_marks, last_locks, last_snapshot_result
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.facts.training import Finished, LastSnapshotMade
from rollback.rundir.paths import RunPaths
from rollback.supervisor.journal import SupervisorJournal

_ANSWER = 1.0  # seconds
_PATIENCE = 30.0
_POLL = 0.02


def ask_for_last_snapshot(
    paths: RunPaths, attempt: int, why: bytes, stopped: Collection[int] = (), *, begins_within: float = _ANSWER
) -> bool:
    """Have the ranks of this host that still live keep what they hold, and wait for it. why: of `end_marks.REASONS`.

    stopped: ranks that do not answer, and are not waited for. Where none lives and there are other hosts, somebody
    speaks for them, and torchrun may have the store by which the hosts agree: that is waited for, too. begins_within:
    seconds that whoever answers has to begin.
    Returns False where other hosts wait for a word of this one, and its ranks live and do not answer.
    """
    if (marks := _marks(paths)) is None:
        return True
    ranks = [rank for rank in end_marks.ranks_of(marks) if not end_marks.has_left(marks, rank)]
    living = {rank for rank in ranks if end_marks.ring_bell(marks, rank, why)}
    asked, others_wait = living - {*stopped}, bool(ranks) and marks.hosts.exists()
    if not asked and (living or not others_wait):
        return not others_wait
    began = time.monotonic()
    while (waited := time.monotonic() - began) < _PATIENCE:
        told = {result.rank for result in last_snapshot_result.read_results(marks, attempt)}
        answered = asked <= told if asked else bool(told)
        if answered or (waited > begins_within and not last_locks.is_busy(marks)):
            return bool(told) or not (asked and others_wait)
        time.sleep(_POLL)
    return True


def last_snapshot_on_host(paths: RunPaths, attempt: int | None = None) -> LastSnapshotResult | None:
    """What this host's ranks made of the last snapshot of an attempt (default: of the newest that they know of), when
    they are gone; None: nobody has tried. A checkpoint that is in no slot any more was taken back."""
    if (marks := _marks(paths)) is None or not (results := last_snapshot_result.read_results(marks, attempt)):
        return None
    here = {place.name for place in tiers.in_slots(paths)}
    kept = [result for result in results if result.checkpoint in here or result.tier == "durable"]
    result = next((result for result in kept if result.checkpoint is not None), results[0])
    taken_back = {} if result in kept else {"checkpoint": None, "step": None}
    ends = [end for rank in end_marks.ranks_of(marks) for end in end_marks.read_ends(marks, rank)]
    furthest = max(ends).step if ends else None  # of the attempt's newest return to a checkpoint
    return result.model_copy(update={**taken_back, "furthest": furthest, "metrics": ()})


def note_last_snapshot(
    last: LastSnapshotMade,
    newest: int | None,
    finished: Finished | None,
    own_journal: SupervisorJournal,
    say: Callable[[str], None],
) -> None:
    """Journal what became of a last snapshot, and say it, unless the ranks have saved more behind it, as those do that
    are told to stop. newest: the step of the newest checkpoint. finished: the end of the training, if it was reached:
    ranks that end one after the other have nothing to keep then."""
    if finished is None or last.checkpoint is not None or last.steps_lost != 0:
        own_journal.note(last)
        if last.step is None or newest is None or newest <= last.step:
            say(last.in_words())


def forget_last_snapshot(paths: RunPaths, attempt: int) -> None:
    """An attempt of this number begins, and there was one of the same number: what its ranks told is not of this one.
    The ranks remove it, too, but they may end before they come to that."""
    if (marks := _marks(paths)) is not None:
        with contextlib.suppress(OSError):
            last_snapshot_result.forget_results(marks, attempt)


def _marks(paths: RunPaths) -> EndMarkPaths | None:
    tier = tiers.fast_tier_of(paths)
    return end_marks.marks_of(tier) if tier is not None else None
