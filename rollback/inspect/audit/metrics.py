"""The last steps on record, and their loss.

A recorded loss is the loss that the script observed, or the mean of several in an update. The record does not tell
whether the script had divided them by the number of accumulated batches, so the text names both values.
"""

import itertools
import math
from collections.abc import Sequence

from rollback.facts.training import Attached, JournalEntry, Restored
from rollback.inspect.audit.report import LastJudged
from rollback.rundir.metrics.metric_lines import Metric

LINES = 16
"""Of the metrics, that are enough for `last_judged`."""


def last_judged(metrics: Sequence[Metric], begun: JournalEntry | None, timeline: int) -> LastJudged | None:
    """The last judged step; None: there is none.

    metrics: oldest first. begun: the line that began the present stretch of training. timeline: the present one.
    """
    if not metrics:
        return None
    last = metrics[-1]
    # Skipped batches between two steps make the difference larger, so the smallest one counts.
    each = [
        after.batch - before.batch
        for before, after in itertools.pairwise(metrics)
        if (after.attempt, after.timeline, after.step) == (before.attempt, before.timeline, before.step + 1)
    ]
    batches = min((count for count in each if count > 0), default=None)
    undone = (
        begun is not None
        and isinstance(begun.fact, Attached | Restored)
        and (last.attempt < begun.attempt or last.timeline < timeline)
        and last.step >= begun.fact.step
    )
    return LastJudged.of(last, undone=undone, batches=batches)


def as_observed(loss: float | None, batches: int | None) -> str | None:
    """In words which loss it is, where this is uncertain."""
    if loss is None or batches is None or batches < 2 or not math.isfinite(loss):
        return None
    undivided = f"where the script divides each by {batches}, it is {loss * batches:.5g} undivided"
    return f"as observed in an update of {batches} batches; {undivided}"
