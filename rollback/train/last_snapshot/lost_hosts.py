"""Speaks for a host that is lost, by the copies of its marks that this host has (`--replicas 2`)."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rollback.checkpoints.fast_tier import mark_copies
from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.train.last_snapshot.hosts import Hosts, StoreGone
from rollback.train.last_snapshot.stand_in import job_of, stand_in

_POLL = 0.02
_ANSWER = 0.5  # seconds in which a host that lives has heard the bell


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
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _speak(hosts: Hosts, copied: CopiedMarks, deadline: float, over: threading.Event) -> None:
    job, noticed = job_of(copied.marks), time.monotonic()
    if job is None or job.keys != hosts.keys:
        return
    while copied.is_fed():
        if over.wait(_POLL):
            return
    with contextlib.suppress(OSError, StoreGone):
        if not (over.wait(_ANSWER) or hosts.answers(job.own)):
            stand_in(copied.marks, noticed, deadline, copied.last_alive())
