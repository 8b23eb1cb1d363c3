"""Speaks for a host on which no rank is left, in a process of torchrun's: `host_proxy.py LAST NOTICED SECONDS`.

What only these ranks knew lies in the host's memory, and the parameters are on the other hosts. So it offers every end
of a step of which all its ranks have left marks, goes along with the others, and writes shards with what its ranks
alone knew. It decides nothing: on some host a rank has to live. For a host that is lost with its memory, a rank of
its buddy does so, by the copies of the marks that are there (`--replicas 2`).
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollback.checkpoints.fast_tier import end_marks, last_locks, mark_copies
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult, read_results, write_result
from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.system.small_json import sound_model
from rollback.train.last_snapshot.early import early_of_dead
from rollback.train.last_snapshot.exchange import Exchange, keep_together
from rollback.train.last_snapshot.hosts import Hosts, HostsOfJob
from rollback.train.last_snapshot.peers import ends_of_ranks
from rollback.train.last_snapshot.proof import NotProved, StoreGone, why_not
from rollback.train.last_snapshot.writers import JudgedAhead
from rollback.wording import gone_in_words

_LIMIT = 1 << 20
_REST = 1.0  # seconds, for the result
_LOOK = 0.02
_HEARD = 0.8  # seconds in which a host that lives has heard the bell; who decides waits two for somebody to be there


def _job_of(paths: EndMarkPaths) -> HostsOfJob | None:
    """What the ranks that left these marks knew of the other hosts."""
    return sound_model(paths.hosts, HostsOfJob, _LIMIT)


def speak_for_host(paths: EndMarkPaths, noticed: float, deadline: float, lost_at: int | None = None) -> None:
    """noticed: when it was known that the ranks are gone. deadline: monotonic seconds, too. lost_at: for a host that is
    lost, until when it may have lived, in nanoseconds of its own clock. Raises OSError."""
    if (job := _job_of(paths)) is None:
        return
    gone = [rank for rank in job.ranks if not end_marks.has_left(paths, rank)]
    result = LastSnapshotResult(attempt=job.attempt, rank=job.own, reason=gone_in_words(gone))
    with last_locks.busy(paths):
        try:
            with last_locks.alone(paths, deadline):
                if read_results(paths, job.attempt):
                    return  # somebody else has spoken
                try:
                    result = _keep(result, paths, job, gone, noticed, deadline, lost_at)
                except Exception as error:  # noqa: BLE001 - the record says why nothing was kept
                    result = result.model_copy(update={"why_not": why_not(error)})
                write_result(paths, result)
        except TimeoutError as error:
            write_result(paths, result.model_copy(update={"why_not": str(error)}))


def _keep(
    result: LastSnapshotResult, paths: EndMarkPaths, job: HostsOfJob, gone: Sequence[int],
    noticed: float, deadline: float, lost_at: int | None,
) -> LastSnapshotResult:  # fmt: skip
    hosts = Hosts(job)
    (hosts.ring if lost_at is None else hosts.speak_for)()
    exchange = Exchange(hosts, _judge_ahead, deadline - time.monotonic())
    seen = int(noticed * 1e9) if lost_at is None else lost_at

    def of_rank(rank: int, end: StepEnd) -> bytes:
        return early_of_dead(paths, rank, end, seen)

    if not (ends := ends_of_ranks(paths, job.ranks, of_rank)):
        raise NotProved("its ranks are gone, and they had not come to the end of one step")
    told = keep_together(exchange, SlotPaths(paths.root.parent), job.ranks, gone, lambda late: ends)
    return result.kept(time.monotonic() - noticed, *told)


def _judge_ahead(sent: Sequence[bytes]) -> JudgedAhead:
    raise NotProved("nobody is left here who could judge the last step")


@contextlib.contextmanager
def speaking_for_lost_hosts(hosts: Hosts | None, tier: SlotPaths, seconds: float) -> Iterator[None]:
    """In the block, which is left when all is said: a host of this job of whose marks there are copies here, and which
    has gone silent, has somebody who speaks for it.

    All ranks of the buddy that keep a last snapshot call it; one of them speaks. seconds: for all of it. hosts: None
    where there is one host.
    """
    over = threading.Event()
    deadline = time.monotonic() + seconds
    copied = mark_copies.all_copied(tier) if hosts is not None else []
    threads = [
        threading.Thread(target=_speak, args=(hosts, each, deadline, over), name="rollback-lost-host", daemon=True)
        for each in copied
    ]
    with contextlib.suppress(RuntimeError):  # no thread can be made: then nobody speaks for it
        for thread in threads:
            thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def _speak(hosts: Hosts, copied: CopiedMarks, deadline: float, over: threading.Event) -> None:
    with contextlib.suppress(OSError, StoreGone):
        silent: float | None = None
        while silent is None or time.monotonic() < silent + _HEARD:
            if over.wait(_LOOK):
                return
            silent = None if copied.is_live() else silent or time.monotonic()
        job = _job_of(copied.marks)
        if job is not None and _is_lost(job, hosts, copied):
            speak_for_host(copied.marks, silent, deadline, copied.last_alive())


def _is_lost(job: HostsOfJob, hosts: Hosts, copied: CopiedMarks) -> bool:
    """Whether these marks are of a host of this attempt of which nobody answers. Raises StoreGone."""
    of_this_job = (job.place, job.keys, job.hosts) == (hosts.job.place, hosts.job.keys, hosts.hosts)
    of_another_host = job.own in hosts.hosts and job.own == min(job.ranks, default=None) and job.own != hosts.own
    left = all(end_marks.has_left(copied.marks, rank) for rank in job.ranks)
    return of_this_job and of_another_host and not left and not hosts.answers(job.own)


if __name__ == "__main__":
    speak_for_host(EndMarkPaths(Path(sys.argv[1])), float(sys.argv[2]), float(sys.argv[2]) + float(sys.argv[3]) - _REST)
