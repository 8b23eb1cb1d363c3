"""The last steps on record, and their loss.

A recorded loss is the loss that the script observed, or the mean of several in an update. The record does not tell
whether the script had divided them by the number of accumulated batches, so the text names both values.
"""

import itertools
import math
from collections.abc import Sequence

from pydantic import Field

from rollback.facts.training import Attached, JournalEntry, Restored
from rollback.inspect.document import ReportItem
from rollback.rundir.metrics.metric_lines import Metric
from rollback.terminal.quantities import number

LINES = 16
"""Of the metrics, that are enough for `last_judged`."""


class LastJudged(ReportItem):
    """The last step on record: its loss as the script observed it, averaged where it observed several."""

    step: int
    batch: int = Field(description="the last of the update")
    loss: float | None
    grad_norm: float | None
    verdict: str
    undone: bool = Field(description="whether the run has gone back behind that step since")
    batches: int | None = Field(description="of one update; null where the record does not tell")

    def in_words(self, *, last: bool) -> str:
        """The loss. last: later steps may have followed without a record."""
        so_far = ", undone since" if self.undone else ", the last on record" if last else ""
        observed = ""
        if self.loss is not None and math.isfinite(self.loss) and self.batches is not None and self.batches > 1:
            observed = f" (as observed in an update of {self.batches} batches; where the script divides each by "
            observed += f"{self.batches}, it is {number(self.loss * self.batches)} undivided)"
        return f"{number(self.loss)} at step {self.step}{so_far}{observed}"


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
