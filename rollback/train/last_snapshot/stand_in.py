"""Speaks for a host on which no rank is left, in a process that torchrun's starts: `stand_in.py LAST NOTICED SECONDS`.

What only these ranks knew lies in the host's memory, and the parameters are on the other hosts. So it offers every end
of a step of which all its ranks have left marks, goes along with the others, and writes shards with what its ranks
alone knew. It decides nothing: on some host a rank has to live. For a host that is lost with its memory, a rank of
its buddy does so (`lost_hosts`), by the copies of the marks that are there.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rollback.checkpoints.fast_tier import end_marks, last_locks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.checkpoints.fast_tier.last_account import LastAccount, read_accounts, write_account
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.system.small_json import sound_model
from rollback.train.last_snapshot.early import of_gone
from rollback.train.last_snapshot.exchange import Exchange, keep_together
from rollback.train.last_snapshot.hosts import Hosts, HostsOfJob
from rollback.train.last_snapshot.peers import all_ends, in_words
from rollback.train.last_snapshot.write import Foreseen, NotProved

_LIMIT = 1 << 20
_REST = 1.0  # seconds, for the account


def job_of(paths: EndMarkPaths) -> HostsOfJob | None:
    """What the ranks that left these marks knew of the other hosts."""
    return sound_model(paths.hosts, HostsOfJob, _LIMIT)


def stand_in(paths: EndMarkPaths, noticed: float, deadline: float, lost_at: int | None = None) -> None:
    """noticed: when it was known that the ranks are gone. deadline: monotonic seconds, too. lost_at: for a host that is
    lost, until when it may have lived, in nanoseconds of its own clock. Raises OSError."""
    if (job := job_of(paths)) is None:
        return
    gone = [rank for rank in job.ranks if not end_marks.has_left(paths, rank)]
    account = LastAccount(attempt=job.attempt, rank=job.own, reason=in_words(gone))
    with last_locks.busy(paths):
        try:
            with last_locks.alone(paths, deadline):
                if read_accounts(paths, job.attempt):
                    return  # somebody else has spoken
                try:
                    told = _keep(paths, job, gone, noticed, deadline, lost_at)
                except NotProved as error:
                    told = {"why_not": str(error)}
                except Exception as error:  # noqa: BLE001 - the record says why nothing was kept
                    told = {"why_not": f"{type(error).__name__}: {error}"}
                write_account(paths, account.model_copy(update=told))
        except TimeoutError as error:
            write_account(paths, account.model_copy(update={"why_not": str(error)}))


def _keep(
    paths: EndMarkPaths, job: HostsOfJob, gone: Sequence[int], noticed: float, deadline: float, lost_at: int | None
) -> dict[str, object]:
    """Returns what the account tells of it."""
    hosts = Hosts(job.place, job.keys, job.hosts, job.own)
    (hosts.ring if lost_at is None else hosts.speak_for)()
    exchange = Exchange(hosts, _foresee, deadline - time.monotonic())
    seen = int(noticed * 1e9) if lost_at is None else lost_at

    def of_rank(rank: int, end: StepEnd) -> bytes:
        return of_gone(paths, rank, end, seen)

    if not (ends := all_ends(paths, job.ranks, of_rank)):
        raise NotProved("its ranks are gone, and they had not come to the end of one step")
    plan, manifest = keep_together(exchange, SlotPaths(paths.root.parent), job.ranks, gone, lambda late: ends)
    seconds = round(time.monotonic() - noticed, 4)
    return {
        "reason": in_words(plan.gone), "checkpoint": manifest.name, "step": manifest.step, "seconds": seconds,
        "metrics": plan.metrics,
    }  # fmt: skip


def _foresee(sent: Sequence[bytes]) -> Foreseen:
    raise NotProved("nobody is left here who could judge the last step")


if __name__ == "__main__":
    stand_in(EndMarkPaths(Path(sys.argv[1])), float(sys.argv[2]), float(sys.argv[2]) + float(sys.argv[3]) - _REST)
