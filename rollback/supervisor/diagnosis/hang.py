"""Decides whether a job hangs, and on which rank. Pure.

A job hangs when *no* rank has shown progress for a time. A single silent rank means nothing, since all others may wait
for one that moves (rank 0 evaluates, its peers are at a barrier). Progress means that a rank's Python code moved; it
moves in evaluation, compilation and data loading. The limit, unless the user sets it:

| standing                                                     | silent for                                     |
|--------------------------------------------------------------|------------------------------------------------|
| no rank has a heartbeat yet                                  | not judged                                     |
| fewer than 3 steps done, or a rank saves, rewinds, or ends   | 30 minutes: compilation, slow disks            |
| training                                                     | 5 minutes, or 10 times a step if that is longer |

Heartbeats come from memory, so a missing heartbeat means that the rank does not move. A rank that could not open the
supervisor's board has its heartbeats on a disk only, and a full disk looks the same as a hang. While such a rank's
process computes, its state is *unknown*, and an unknown state ends no job.

If all ranks have closed their guards and left Python, and still exist 20 seconds later, they are ended: their work is
complete.

Ranks that fetch a checkpoint from a URL do not stall (`HangLimits.stall`): a fetch has time limits of its own.

The suspect is the first rank of which one of these is true: it raised and did not end; it is stopped; it has died, and
its peers wait; it is in an uninterruptible system call; none of its threads runs Python while threads of other ranks
do; it is behind all others, by step, batch and number of collectives begun. An exception that only says that a peer is
gone does not count.
"""

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollback.rundir.heartbeats import LEAVING, READING, Heartbeat

GONE = "X"  # the state of a process that is gone; in /proc the letter of a process that is about to go
FLOOR = 300.0
SLOW_FLOOR = 1800.0
STEPS_BEFORE_TRUST = 3
TIMES_A_STEP = 10.0
AT_EXIT = 20.0
_REMEMBERED_STEPS = 101
_OUR_OWN_ABSENCE = 5.0  # a supervisor that was stopped itself could not see the ranks move
_THREADS_SILENT = 3.0  # heartbeats are looked at twice a second


@dataclass(frozen=True)
class HangLimits:
    """How long a job may show no progress."""

    after: float | Literal["auto"] | None = "auto"
    """Seconds without progress on any rank, start-up included; `auto`: the table of this module; None: no limit."""
    stall: float | None = None
    """Seconds in which no rank goes on to another batch although its Python code moves; None: no limit."""


@dataclass(frozen=True)
class Silence:
    """A hang: no progress for `silent` seconds, where `limit` are allowed."""

    silent: float
    limit: float
    stalled: bool
    mute: frozenset[int]
    """Ranks none of whose threads runs Python, while threads of other ranks do."""


@dataclass
class _Progress:
    """A rank's last heartbeat, and when the supervisor saw it change, by the supervisor's clock."""

    beat: Heartbeat
    moved: float
    looked: float
    advanced: float


@dataclass
class HangDetector:
    """Gets all heartbeats of an attempt about once a second."""

    limits: HangLimits
    began: float
    lag: float = 0.0
    """Seconds by which heartbeats may come late: those of other hosts' ranks."""
    _ranks: dict[int, _Progress] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    _last: float | None = None

    def look(
        self, now: float, beats: Mapping[int, Heartbeat], untold: Collection[int] = (), far: Collection[int] = ()
    ) -> Silence | None:
        """The hang at monotonic time `now`, if there is one.

        untold: ranks that compute, and whose heartbeats may be late because of a disk. far: ranks of other hosts.
        """
        if self._last is not None and now - self._last > _OUR_OWN_ABSENCE:
            self._forgive(now - self._last)
        self._last = now
        for rank, beat in beats.items():
            self._take(rank, beat, now)
            seen = self._ranks[rank]
            if rank in untold and now - seen.looked > _THREADS_SILENT:
                seen.moved = seen.advanced = now
        limit, mute = self.limit(), self._mute(now, far)
        silent = now - max((seen.moved for seen in self._ranks.values()), default=self.began)
        if limit is not None and silent >= limit:
            return Silence(silent, limit, False, mute)
        idle = now - max((seen.advanced for seen in self._ranks.values()), default=self.began)
        if self.limits.stall is not None and idle >= self.limits.stall:
            return Silence(idle, self.limits.stall, True, mute)
        return None

    def stuck_at_exit(self, now: float) -> float | None:
        """Seconds since the last heartbeat, if all ranks had left Python and this is too long ago; else None.

        While exit handlers run, ranks give heartbeats. A rank that exists without them waits for something in native
        code, and will wait for ever.
        """
        if not self._ranks or any(seen.beat.doing != LEAVING for seen in self._ranks.values()):
            return None
        silent = now - max(seen.looked for seen in self._ranks.values())
        return silent if silent >= AT_EXIT else None

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank, also of one whose heartbeats cannot be read any more."""
        return {rank: seen.beat for rank, seen in self._ranks.items()}

    @property
    def trains(self) -> bool:
        """Whether a rank has done a step."""
        return bool(self._steps)

    def limit(self) -> float | None:
        """Seconds without progress that are allowed now; None: no limit."""
        if self.limits.after != "auto":
            return self.limits.after
        if not self._ranks:
            return None
        training = all(seen.beat.doing in ("training", READING) for seen in self._ranks.values())
        if len(self._steps) < STEPS_BEFORE_TRUST or not training:
            return max(SLOW_FLOOR, *(TIMES_A_STEP * seconds for seconds in self._steps), 0.0)
        return max(FLOOR, TIMES_A_STEP * statistics.median(self._steps))

    def _take(self, rank: int, beat: Heartbeat, now: float) -> None:
        seen = self._ranks.get(rank)
        if seen is None:
            self._ranks[rank] = _Progress(beat, now, now, now)
            return
        if beat.monotonic != seen.beat.monotonic:
            seen.moved = now
        if beat.looked != seen.beat.looked:
            seen.looked = now
        if (beat.step, beat.batch) != (seen.beat.step, seen.beat.batch) or beat.doing == "fetching":
            if beat.step > seen.beat.step:
                self._steps.append((now - seen.advanced) / (beat.step - seen.beat.step))
            seen.advanced = now
        seen.beat = beat

    def _forgive(self, seconds: float) -> None:
        self.began += seconds
        for seen in self._ranks.values():
            seen.moved += seconds
            seen.looked += seconds
            seen.advanced += seconds

    def _mute(self, now: float, far: Collection[int]) -> frozenset[int]:
        mute = frozenset(
            rank
            for rank, seen in self._ranks.items()
            if now - seen.looked > _THREADS_SILENT + (self.lag if rank in far else 0.0)
        )
        return mute if len(mute) < len(self._ranks) else frozenset()


_DIED = "has ended, but its peers have not"
_STATES = {"Tt": "is stopped (SIGSTOP)", GONE: _DIED, "D": "is in a system call that cannot be interrupted (state D)"}
TELLING = tuple("".join(_STATES))
"""The states of a rank that matter for a hang."""


@dataclass(frozen=True)
class Suspicion:
    """The rank that the others seem to wait for (None: no rank stands out), and the reason."""

    rank: int | None
    reason: str


def suspect(
    beats: Mapping[int, Heartbeat], states: Mapping[int, str], raised: Mapping[int, str], mute: Collection[int]
) -> Suspicion:
    """The suspect of a hang. states: of processes as in /proc (`T`: stopped, `X`: gone), where known. raised: the
    exceptions of ranks that did not only notice another rank's failure, the first cause first. mute: see `Silence`."""
    if not beats:
        return Suspicion(None, "no rank has its Guard yet; a start that takes so long needs a longer --hang-after")
    for rank, error in raised.items():
        return Suspicion(rank, f"rank {rank} raised {error} and {_DIED if states.get(rank) == GONE else 'did not end'}")
    for letters, what in _STATES.items():
        for rank in sorted(rank for rank, state in states.items() if state in letters and rank in beats):
            return Suspicion(rank, f"rank {rank} {what}, last seen {_place(beats[rank])}")
    for rank in sorted(mute):
        why = "something holds its interpreter lock"
        return Suspicion(rank, f"no thread of rank {rank} gets to run: {why}, last seen {_place(beats[rank])}")
    if len(beats) == 1:
        ((rank, beat),) = beats.items()
        return Suspicion(rank, f"rank {rank} stands still, {_place(beat)}")
    places = {rank: (beat.step, beat.batch, beat.collectives or 0) for rank, beat in beats.items()}
    least = min(places.values())
    behind = [rank for rank, place in places.items() if place == least]
    if len(behind) > 1:
        who = "all ranks stand" if len(behind) == len(places) else f"ranks {', '.join(map(str, sorted(behind)))} stand"
        return Suspicion(None, f"{who} at the same point, {_place(beats[behind[0]])}")
    (rank,) = behind
    ahead = beats[max(places, key=lambda other: places[other])]
    return Suspicion(rank, f"rank {rank} is behind: {_place(beats[rank])}; others: {_place(ahead)}")


def _place(beat: Heartbeat) -> str:
    begun = "" if beat.collectives is None else f", {beat.collectives} collectives begun"
    return f"{beat.doing} at step {beat.step}, batch {beat.batch}{begun}"
