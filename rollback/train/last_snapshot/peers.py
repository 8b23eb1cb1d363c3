"""The other ranks of a host, as a rank sees them that cannot talk to them: by their processes and by their marks."""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import psutil

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.train.comm.ranks import Ranks
from rollback.train.last_snapshot.early import early_of_dead, early_of_living, why_refuted
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.small_state import split

POLL = 0.002
_MOMENT = 0.1


class HostMarks(NamedTuple):
    """What this host's ranks have left at a step's end. sent: of those that came there. bodies: what each alone knew,
    by rank. early: whether an early mark is among them. early_refuted: why none may be; None: one may."""

    sent: list[bytes]
    bodies: Mapping[int, bytes]
    early: bool
    early_refuted: str | None


class Peers:
    """Any thread may ask. pidfds: of the processes of the host's other ranks; none before `watch`."""

    def __init__(self, paths: EndMarkPaths, ranks: Ranks) -> None:
        self._paths, self._ranks = paths, ranks
        self.pidfds: dict[int, int] = {}
        self._pids: Sequence[int] = ()

    def watch(self, pids: Sequence[int]) -> None:
        """Know the processes of this host's ranks from now on. pids: of all ranks. Raises OSError."""
        self._pids = pids
        for rank in self._ranks.on_this_host:
            if rank != self._ranks.rank:
                self.pidfds[rank] = os.pidfd_open(pids[rank])

    def close(self) -> None:
        for fd in self.pidfds.values():
            os.close(fd)

    def ring(self, why: bytes) -> None:
        for rank in self.pidfds:
            end_marks.ring_bell(self._paths, rank, why)

    def _is_gone(self, rank: int) -> bool:
        fd = self.pidfds.get(rank)
        return fd is not None and _any_ended([fd])

    def _computed(self, rank: int) -> int | None:
        """What a rank's process has used of the processor's time, in nanoseconds; None: it is gone by now."""
        try:
            used = psutil.Process(self._pids[rank]).cpu_times()
        except psutil.Error:
            return None
        return None if self._is_gone(rank) else int((used.user + used.system) * 1e9)

    def lost(self, in_a_moment: bool) -> list[int]:
        """The ranks that are gone and did not end as they should. in_a_moment: one is about to end."""
        if self.pidfds and in_a_moment:  # a dying rank's connections end a moment before it does
            _any_ended(self.pidfds.values(), _MOMENT)
        return [rank for rank in self.pidfds if self._is_gone(rank) and not end_marks.has_left(self._paths, rank)]

    def marks_of(self, end: StepEnd, began: float, *, early: bool, over: bool) -> tuple[HostMarks, list[int]]:
        """What this host's ranks have left at a step's end, and the ranks that have left nothing there.

        began: when it was known that something is wrong. early: whether early marks tell of that end. over: whether all
        have had the time to come there. Raises NotProved.
        """
        ranks = sorted((self._ranks.rank, *self.pidfds))

        def early_mark_of(rank: int) -> bytes | None:
            return self._proved_early(rank, end, began, over) if early else None

        return _host_marks(self._paths, ranks, end, early_mark_of)

    def all_ends(self, began: float, *, over: bool = False) -> dict[StepEnd, HostMarks]:
        """The ends of steps of which all ranks of this host have left marks. The rest is as for `marks_of`."""
        ranks = sorted((self._ranks.rank, *self.pidfds))
        return ends_of_ranks(self._paths, ranks, lambda rank, end: self._proved_early(rank, end, began, over))

    def _proved_early(self, rank: int, end: StepEnd, began: float, over: bool) -> bytes | None:
        """The early mark of a rank in place of its mark of that end, if that can be proved."""
        if not self._is_behind(rank, end):
            return None
        if self._is_gone(rank):
            return early_of_dead(self._paths, rank, end, int(began * 1e9))
        return early_of_living(self._paths, rank, end, self._computed(rank) if over else None)

    def _is_behind(self, rank: int, end: StepEnd) -> bool:
        """Whether a rank has not come to that step's end, nor further."""
        ends = end_marks.read_ends(self._paths, rank)
        return all(_is_later(other, end) for other in ends)

    def any_is_beyond(self, end: StepEnd) -> bool:
        """Whether another rank has come to the end of a later step: then all have been given the sums of that step."""
        return any(_is_later(end, other) for rank in self.pidfds for other in end_marks.read_ends(self._paths, rank))

    def require_same(self, end: StepEnd, digest: int, deadline: float) -> None:
        """Compare the parameters with those of the ranks that still live and stand at this very step's end.

        deadline: monotonic seconds. Raises NotProved.
        """
        waiting = {rank for rank in self.pidfds if not self._is_gone(rank)}
        while waiting:
            for rank in list(waiting):
                other = end_marks.read_digest(self._paths, rank, end)
                if other is not None and other != digest:
                    raise NotProved(f"the parameters of rank {rank} are others, though they are replicas")
                ends = end_marks.read_ends(self._paths, rank)
                if other is not None or self._is_gone(rank) or any(_is_later(end, later) for later in ends):
                    waiting.discard(rank)
            if time.monotonic() > deadline:
                return  # stopped, or in a call that does not end: as if it were gone
            time.sleep(POLL)


def _is_later(end: StepEnd, other: StepEnd) -> bool:
    """Whether the other is later: behind a return to a checkpoint the steps begin anew."""
    return (other.returns, other.step) > (end.returns, end.step)


def _host_marks(
    paths: EndMarkPaths, ranks: Sequence[int], end: StepEnd, early_mark_of: Callable[[int], bytes | None]
) -> tuple[HostMarks, list[int]]:
    """What these ranks have left at a step's end, and those that have left nothing there. early_mark_of: gives one in
    place of a rank's mark of that end, if that can be proved. Raises NotProved."""
    found = {rank: end_marks.read_ends(paths, rank).get(end) for rank in ranks}
    ended = {rank: split(body) for rank, body in found.items() if body is not None}
    missing = [rank for rank in ranks if rank not in ended]
    early = {rank: split(body) for rank in missing if (body := early_mark_of(rank)) is not None}
    early_refuted = why_refuted(paths, {rank: own for rank, (_, own) in ended.items()}, end)
    if early and early_refuted is not None:  # their gradients are in the sums, or none would have come to that end
        raise NotProved(early_refuted)
    bodies = {rank: own for rank, (_, own) in sorted({**ended, **early}.items())}
    marks = HostMarks([sent for sent, _ in ended.values()], bodies, bool(early), early_refuted)
    return marks, [rank for rank in missing if rank not in early]


def ends_of_ranks(
    paths: EndMarkPaths, ranks: Sequence[int], early_mark_of: Callable[[int, StepEnd], bytes | None]
) -> dict[StepEnd, HostMarks]:
    """The ends of steps of which all these ranks have left marks, newest first, and what they have left."""
    known = {end for rank in ranks for read in (end_marks.read_ends, end_marks.read_early) for end in read(paths, rank)}
    found = {}
    for end in sorted(known, reverse=True):
        with contextlib.suppress(NotProved):
            marks, missing = _host_marks(paths, ranks, end, lambda rank, end=end: early_mark_of(rank, end))  # type: ignore[misc]
            if not missing:
                found[end] = marks
    return found


def _any_ended(pidfds: Iterable[int], seconds: float = 0.0) -> bool:
    """Whether one of these processes has ended, or does within that time."""
    poll = select.poll()  # select() knows no descriptor above 1,023
    for fd in pidfds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
