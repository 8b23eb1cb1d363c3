"""Which checkpoints leave a full ring. Pure, and the same for slots, for the run directory's ring and for one at a URL.

A trouble may be called long after it began, so the ring has to reach far back; but what lies far back need not lie
close together. So a full ring is thinned: what leaves is the checkpoint whose neighbours, once it is gone, are closest
to each other in proportion to their ages (steps before the newest). Where even these would be more than four times
apart, the oldest leaves instead. Two things follow, for a ring of capacity k that gets a checkpoint every s steps:

- The oldest good one is at least s * 2**(k - 2) steps old once the run is older than that (k - 3 where checkpoints come
  faster than probation passes): when the oldest leaves, each age is more than four times the next but one.
- Of two neighbours in age the older is at most four times as old: a trouble that began n steps ago costs going back at
  most four times n.

Never to let the oldest go, and so to keep the run's first checkpoint for ever, was rejected: the others would drift
apart without bound, and nobody goes back a million steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rollback.rundir.paths import CheckpointName

_APART = 4  # how much older than the next one a good checkpoint may be


def choose_evictions(
    held: Sequence[str], good: Collection[str], discarded: Collection[str], keep: int
) -> list[tuple[str, str]]:
    """Which checkpoints leave a ring of capacity `keep`, with the reason, given all names oldest first.

    Discarded ones go at once. Of the others three always stay: the newest good one; the oldest candidate after it,
    which will be the next good one (where checkpoints come faster than probation passes, a ring that evicted it would
    never gain another); and the newest of all, from which a crash resumes. Beyond capacity the rest is thinned.
    """
    leaving = [(name, "beyond a restored checkpoint") for name in held if name in discarded]
    staying = [name for name in held if name not in discarded]
    goods = [name for name in staying if name in good]
    after = staying.index(goods[-1]) + 1 if goods else 0
    fixed = {*goods[-1:], *staying[after : after + 1], *staying[-1:]}
    while len(staying) > keep and (name := _least_missed(staying, fixed)) is not None:
        leaving.append((name, "the ring is full"))
        staying.remove(name)
    return leaving


def _least_missed(names: Sequence[str], fixed: Collection[str]) -> str | None:
    """Which of these, oldest first, is thinned out next; None where all are fixed."""
    free = [place for place, name in enumerate(names) if name not in fixed]
    steps = [CheckpointName(name).step for name in names]
    ages = [steps[-1] - step for step in steps]
    between = [place for place in free if place > 0 and ages[place - 1] <= _APART * ages[place + 1]]
    if between:
        return names[min(between, key=lambda place: ages[place - 1] / max(1, ages[place + 1]))]
    return names[free[0]] if free else None
