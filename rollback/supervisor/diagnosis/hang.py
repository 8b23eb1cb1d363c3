"""When a job hangs, and on which rank. Pure: heartbeats and times in, a finding out.

A job hangs when *no* rank has shown a sign of progress for so long. One rank that moves may be what all others wait for
(rank 0 evaluates, its peers are at a barrier), so a single silent rank means nothing. Progress is that a rank's Python
code moved; evaluation, compilation and data loading do. The limit, unless the user sets it:

| standing                                                     | silent for                                     |
|--------------------------------------------------------------|------------------------------------------------|
| no rank has a heartbeat yet                                  | not judged                                     |
| fewer than 3 steps done, or a rank saves, rewinds, or ends   | 30 minutes: compilation, slow disks            |
| training                                                     | 5 minutes, or 10 times a step if that is longer |

Heartbeats come from memory, so silence is silence. Where a rank's can be had from a disk only (it could not open the
supervisor's board), a disk that is full looks the same: whether such a rank moves is *unknown* while its process
computes, and what is unknown ends no job.

Ranks that have all closed their guards and left Python, and are not gone 20 seconds later, are ended at once: what they
were to do is done.

Ranks that fetch a checkpoint from a URL do not stall (`HangLimits.stall`): where nothing comes they give up by
themselves.

The suspect is the first rank of which one of these holds: it raised and did not end; it is stopped; it has died and its
peers wait on; it is in an uninterruptible system call; none of its threads gets to run Python while those of other
ranks do; it is behind all others, by step, batch, and the number of collectives begun. What a rank raised because it
gave up on its peers counts for nothing here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollback.rundir.records import LEAVING, Heartbeat

GONE = "X"  # the state of a process that is not there any more; /proc has this letter for one that is about to go
FLOOR = 300.0
SLOW_FLOOR = 1800.0
STEPS_BEFORE_TRUST = 3
TIMES_A_STEP = 10.0
AT_EXIT = 20.0
_REMEMBERED_STEPS = 101
_OUR_OWN_ABSENCE = 5.0  # a supervisor that was stopped itself has not seen the others move
_THREADS_SILENT = 3.0  # heartbeats are looked at twice a second


@dataclass(frozen=True)
class HangLimits:
    """after: seconds without a sign of progress on any rank, start-up included; `auto`: see above; None: never.
    stall: seconds in which no rank goes on to another batch although its Python code moves; None: never."""

    after: float | Literal["auto"] | None = "auto"
    stall: float | None = None


@dataclass(frozen=True)
class Silence:
    """A hang: nothing for `silent` seconds, and no more than `limit` were allowed."""

    silent: float
    limit: float
    stalled: bool
    mute: frozenset[int]
    """Ranks none of whose threads runs Python, while those of others do."""


@dataclass
class _Progress:
    """A rank as last seen; times are those at which we saw a change, by our own clock."""

    beat: Heartbeat
    moved: float
    looked: float
    advanced: float


@dataclass
class HangWatch:
    """Told of all heartbeats of an attempt about once a second."""

    limits: HangLimits
    began: float
    _ranks: dict[int, _Progress] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_STEPS))
    _last: float | None = None

    def look(self, now: float, beats: Mapping[int, Heartbeat], untold: Collection[int] = ()) -> Silence | None:
        """A hang, if there is one at monotonic time `now`. untold: ranks that compute, and whose heartbeats a disk may
        hold back."""
        if self._last is not None and now - self._last > _OUR_OWN_ABSENCE:
            self._forgive(now - self._last)
        self._last = now
        for rank, beat in beats.items():
            self._take(rank, beat, now)
            seen = self._ranks[rank]
            if rank in untold and now - seen.looked > _THREADS_SILENT:
                seen.moved = seen.advanced = now
        limit, mute = self.limit(), self._mute(now)
        silent = now - max((seen.moved for seen in self._ranks.values()), default=self.began)
        if limit is not None and silent >= limit:
            return Silence(silent, limit, False, mute)
        idle = now - max((seen.advanced for seen in self._ranks.values()), default=self.began)
        if self.limits.stall is not None and idle >= self.limits.stall:
            return Silence(idle, self.limits.stall, True, mute)
        return None

    def stuck_at_exit(self, now: float) -> float | None:
        """Seconds since the last rank was heard of, if all of them had left Python by then and that is too long ago.

        While handlers of others run at the exit, ranks are heard of. One that says no more and is still there waits for
        something below Python, for which nobody will ever come.
        """
        if not self._ranks or any(seen.beat.doing != LEAVING for seen in self._ranks.values()):
            return None
        silent = now - max(seen.looked for seen in self._ranks.values())
        return silent if silent >= AT_EXIT else None

    @property
    def trains(self) -> bool:
        """Whether a step has been done."""
        return bool(self._steps)

    def limit(self) -> float | None:
        """Seconds of silence that are allowed now; None: any."""
        if self.limits.after != "auto":
            return self.limits.after
        if not self._ranks:
            return None
        training = all(seen.beat.doing in ("training", "reading") for seen in self._ranks.values())
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

    def _mute(self, now: float) -> frozenset[int]:
        mute = frozenset(rank for rank, seen in self._ranks.items() if now - seen.looked > _THREADS_SILENT)
        return mute if len(mute) < len(self._ranks) else frozenset()


_DIED = "has ended, but its peers have not"
_STATES = {"Tt": "is stopped (SIGSTOP)", GONE: _DIED, "D": "is in a system call that cannot be interrupted (state D)"}


@dataclass(frozen=True)
class Suspicion:
    """The rank that the others seem to wait for, None where none stands out, and why."""

    rank: int | None
    reason: str


def suspect(
    beats: Mapping[int, Heartbeat], states: Mapping[int, str], raised: Mapping[int, str], mute: Collection[int]
) -> Suspicion:
    """Whom to suspect of a hang. states: of processes as in /proc (`T`: stopped, `X`: gone), where known. raised: what
    ranks raised that did not merely notice others', the first cause first. mute: see `Silence`."""
    if not beats:
        return Suspicion(None, "no rank has come as far as making its Guard")
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
