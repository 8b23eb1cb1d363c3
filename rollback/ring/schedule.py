"""What the drainer copies next, when, what leaves the durable ring, and what a plan may take from a ring at a URL.
Pure: no clock, no files.

Only good checkpoints are copied, the newest first; those between two copied ones are passed over. Three kinds are
copied whatever the pace: the very first checkpoint (until then the ring is empty), a pinned one, and, when the run ends
or is told to stop, the newest of all, from which the next start goes on.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollback.checkpoints.resume import on_record
from rollback.checkpoints.retention import choose_evictions
from rollback.facts.history import History, in_durable_ring
from rollback.policy import PolicyCheckpoint
from rollback.rundir.paths import CheckpointName

_SHARE = 20  # auto: draining takes at most one part in so many of the time
_NEWEST = 256  # checkpoints, far more than a ring in memory or a run directory holds
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class DrainPace:
    """How often a checkpoint is copied. Where both are None, copies take 1/20 of the time."""

    steps: int | None = None
    """Steps between two copies."""
    seconds: float | None = None
    """Seconds between two copies."""

    @classmethod
    def parse(cls, text: str) -> "DrainPace":
        """`500` steps, `90s`, `10m`, `2h`, or `auto`; the settings guarantee one of these."""
        if text == "auto":
            return cls()
        number, unit = re.fullmatch(r"(\d+)([smh]?)", text).groups()  # type: ignore[union-attr]
        return cls(seconds=int(number) * _SECONDS[unit]) if unit else cls(steps=int(number))


@dataclass(frozen=True)
class LastCopy:
    """The last copy."""

    began: float
    """When it began, in monotonic seconds."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True)
class Situation:
    """All that the decisions depend on."""

    history: History
    drained: Sequence[str]
    """The checkpoints in the durable ring, oldest first."""
    pinned: Collection[str] = ()
    lost: Collection[str] = ()
    """Checkpoints that cannot be copied: damaged, or gone."""
    last: LastCopy | None = None
    """None before the first copy by this process."""
    ending: bool = False
    """The run ends, or is told to stop."""

    @property
    def considered(self) -> set[str]:
        """The checkpoints that may be copied, or that others are compared with: not all that there have ever been."""
        newest = itertools.islice(reversed(self.history.committed), _NEWEST)
        return {*newest, *self.drained, *self.pinned}


def next_to_drain(now: Situation, pace: DrainPace, clock: float) -> str | None:
    """The checkpoint to copy now; None: there is nothing to do yet. clock: monotonic seconds."""
    present = on_record(now.history, now.considered)
    open_ = [name for name in present if name not in now.drained and name not in now.lost]
    if now.ending and open_ and open_[-1] == present[-1]:
        return open_[-1]
    if now.ending and (final := _final_off_record(now)) is not None:
        return final
    if (pinned := next((name for name in open_ if name in now.pinned), None)) is not None:
        return pinned
    drained = [name for name in present if name in now.drained]
    newest = next((name for name in reversed(present) if name in now.history.good and name not in now.lost), None)
    if newest is None or newest in now.drained or (drained and newest.seq < drained[-1].seq and not now.ending):
        return None
    if now.ending or not drained or _is_due(newest, drained[-1], now.last, pace, clock):
        return newest
    return None


def in_memory_alone(now: Situation, in_memory: Collection[str], in_run: Collection[str]) -> str | None:
    """The checkpoint from which the next start would go on, where memory alone has it; None: it is elsewhere too, or
    cannot be copied.

    in_memory, in_run: those in this host's memory and in its run directory.
    """
    newest = on_record(now.history, {*now.considered, *in_memory})[-1:]
    name = _final_off_record(now) or (newest[0] if newest else None)
    elsewhere = {*now.drained, *now.lost, *in_run}
    return name if name in in_memory and name not in elsewhere else None


def _final_off_record(now: Situation) -> str | None:
    """The final state, if it is to be copied and no line says that it was committed: a full disk has lost the line, and
    a start found the checkpoint in memory with nothing left to train."""
    final = now.history.final
    known = final is None or final in now.history.committed
    return None if known or final in now.drained or final in now.lost else final


def _is_due(name: CheckpointName, before: CheckpointName, last: LastCopy | None, pace: DrainPace, clock: float) -> bool:
    if pace.steps is not None:
        return name.step >= before.step + pace.steps
    if last is None:  # by an earlier process: how long ago it was is not known
        return True
    wait = pace.seconds if pace.seconds is not None else _SHARE * last.seconds
    return clock >= last.began + wait


def to_evict(now: Situation, keep: int) -> list[tuple[str, str]]:
    """The checkpoints that leave the durable ring of capacity `keep`, with the reasons. Pinned ones stay and do not
    count.

    Nothing leaves while a rollback is planned and not carried out: it may still need any of them.
    """
    if now.history.pending is not None:
        return []
    present = set(on_record(now.history, now.drained))
    free = [name for name in now.drained if name not in now.pinned]
    discarded = {name for name in free if name in now.history.committed and name not in present}
    return choose_evictions(free, now.history.good, discarded, keep)


def good_ones_at(url: str, ranks: History, supervisor: History) -> list[PolicyCheckpoint]:
    """The good checkpoints of the present timeline at a URL by the run's journals, oldest first: a plan never waits for
    a network. ranks, supervisor: what their journals amount to.

    One may have left since, or be lost there: the fetch finds out. One that was found damaged in the run directory is
    included: its copy may be sound.
    """
    there = in_durable_ring(ranks, supervisor, place=url.rstrip("/"))
    return [
        PolicyCheckpoint(name, name.step, ranks.committed[name].batch, True)
        for name in on_record(ranks, there)
        if name in ranks.good or name in ranks.spoiled
    ]
