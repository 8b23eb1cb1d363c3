"""Speaks for a host that is lost, by the copies of its marks that this host has (`--replicas 2`)."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rollback.checkpoints.fast_tier import end_marks, mark_copies
from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.train.last_snapshot.hosts import Hosts, HostsOfJob, StoreGone
from rollback.train.last_snapshot.stand_in import job_of, stand_in

_POLL = 0.02
_ANSWER = 0.8  # seconds in which a host that lives has heard the bell; who decides waits two for somebody to be there


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
        while silent is None or time.monotonic() < silent + _ANSWER:
            if over.wait(_POLL):
                return
            silent = None if copied.is_fed() else silent or time.monotonic()
        job = job_of(copied.marks)
        if job is not None and _is_lost(job, hosts, copied):
            stand_in(copied.marks, silent, deadline, copied.last_alive())


def _is_lost(job: HostsOfJob, hosts: Hosts, copied: CopiedMarks) -> bool:
    """Whether these marks are of a host of this attempt of which nobody answers. Raises StoreGone."""
    of_this_job = (job.place, job.keys, [*job.hosts]) == (hosts.place, hosts.keys, hosts.hosts)
    of_another_host = job.own in hosts.hosts and job.own == min(job.ranks, default=None) and job.own != hosts.own
    left = all(end_marks.has_left(copied.marks, rank) for rank in job.ranks)
    return of_this_job and of_another_host and not left and not hosts.answers(job.own)
