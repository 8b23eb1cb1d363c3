"""The other ranks of a host, as a rank sees them that cannot talk to them: by their processes and by their marks."""

import os
import select
import time
from collections.abc import Iterable, Sequence

import psutil

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.train.comm.ranks import Ranks
from rollback.train.last_snapshot.early import split
from rollback.train.last_snapshot.write import NotProved

POLL = 0.002
_MOMENT = 0.1


class Peers:
    """Any thread may ask. pidfds: of the other ranks' processes; none before `watch`."""

    def __init__(self, paths: EndMarkPaths, ranks: Ranks) -> None:
        self._paths, self._ranks = paths, ranks
        self.pidfds: dict[int, int] = {}
        self.pids: Sequence[int] = ()

    def watch(self, pids: Sequence[int]) -> None:
        """Know the processes of all ranks from now on. Raises OSError."""
        self.pids = pids
        for rank, pid in enumerate(pids):
            if rank != self._ranks.rank:
                self.pidfds[rank] = os.pidfd_open(pid)

    def close(self) -> None:
        for fd in self.pidfds.values():
            os.close(fd)

    def ring(self, why: bytes) -> None:
        for rank in self.pidfds:
            end_marks.ring_bell(self._paths, rank, why)

    def is_gone(self, rank: int) -> bool:
        fd = self.pidfds.get(rank)
        return fd is not None and _any_ended([fd])

    def computed(self, rank: int) -> int | None:
        """What a rank's process has used of the processor's time, in nanoseconds; None: it is gone by now."""
        try:
            used = psutil.Process(self.pids[rank]).cpu_times()
        except psutil.Error:
            return None
        return None if self.is_gone(rank) else int((used.user + used.system) * 1e9)

    def lost(self) -> list[int]:
        """The ranks that are gone and did not end as they should."""
        if self.pidfds:  # a dying rank's connections end a moment before it does
            _any_ended(self.pidfds.values(), _MOMENT)
        return [rank for rank in self.pidfds if self.is_gone(rank) and not end_marks.has_left(self._paths, rank)]

    def marks_of(self, end: StepEnd) -> tuple[dict[int, tuple[bytes, bytes]], list[int]]:
        """What all ranks have left at a step's end, and the ranks that have left nothing there."""
        found = {rank: end_marks.read_ends(self._paths, rank).get(end) for rank in range(self._ranks.world_size)}
        there = {rank: split(body) for rank, body in found.items() if body is not None}
        return there, [rank for rank in found if rank not in there]

    def is_behind(self, rank: int, end: StepEnd) -> bool:
        """Whether a rank has not come to that step's end, nor further."""
        ends = end_marks.read_ends(self._paths, rank)
        return all((other.returns, other.step) < (end.returns, end.step) for other in ends)

    def any_is_beyond(self, end: StepEnd) -> bool:
        """Whether another rank has come to the end of a later step: then all have been given the sums of that step."""
        return any(
            (later.returns, later.step) > (end.returns, end.step)
            for rank in self.pidfds for later in end_marks.read_ends(self._paths, rank)
        )  # fmt: skip

    def require_same(self, end: StepEnd, digest: int, deadline: float) -> None:
        """Compare the parameters with those of the ranks that still live and stand at this very step's end.

        deadline: monotonic seconds. Raises NotProved.
        """
        waiting = {rank for rank in self.pidfds if not self.is_gone(rank)}
        while waiting:
            for rank in list(waiting):
                other = end_marks.read_digest(self._paths, rank, end)
                if other is not None and other != digest:
                    raise NotProved(f"the parameters of rank {rank} are others, though they are replicas")
                ends = end_marks.read_ends(self._paths, rank)
                if other is not None or self.is_gone(rank) or any(later.step > end.step for later in ends):
                    waiting.discard(rank)
            if time.monotonic() > deadline:
                return  # stopped, or in a call that does not end: as if it were gone
            time.sleep(POLL)


def _any_ended(pidfds: Iterable[int], seconds: float = 0.0) -> bool:
    """Whether one of these processes has ended, or does within that time."""
    poll = select.poll()  # select() knows no descriptor above 1,023
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
