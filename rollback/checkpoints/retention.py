"""Which checkpoints leave a full ring. Pure, and the same for slots, for the run directory's ring and for one at a URL.

A full ring is thinned: what leaves is the checkpoint whose neighbours, once it is gone, are closest to each other in
proportion to their ages (steps before the newest). Where even these would be more than four times apart, the oldest
leaves instead. docs/design.md, "How far the ring reaches", says why, and what follows.
"""

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
