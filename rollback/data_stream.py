"""The data of a run, as an answer to an incident counts them: whole updates, and what incidents may cost of them."""

from dataclasses import dataclass

from rollback.config import Settings
from rollback.facts.training import Window

FIRST_ANSWER = 60
"""Updates that a first answer may always cost, besides `rewind` and `skip_after`: checkpoints are 50 apart in a run
that has just begun, and a trouble is a few steps old when it is called."""


@dataclass(frozen=True)
class DataStream:
    """The data in the units of the script."""

    batches_per_step: int = 1
    """Batches of a whole update."""
    epoch_end: int | None = None
    """The batch after the last one of an epoch; None where epochs have no length, or updates ignore the end of an
    epoch."""
    epoch_batches: int | None = None
    """Batches of each epoch; None as above."""
    skipped: tuple[Window, ...] = ()
    """Windows that incidents have cost so far; they do not overlap."""
    total: int = 0
    """Number of batches that the run will have at least, as far as known."""

    def end_of_update(self, first: int, last: int) -> int:
        """The last batch of the shortest window from `first` through `last` that leaves whole updates after it."""
        per_step = self.batches_per_step
        if self.epoch_end is None or not self.epoch_batches:
            return first + -(-(last + 1 - first) // per_step) * per_step - 1
        epochs = -(-(last + 1 - self.epoch_end) // self.epoch_batches)
        left = self.epoch_end + epochs * self.epoch_batches - (last + 1)  # of the epoch in which the window ends
        return last + left % per_step

    def excess_of(self, window: Window, settings: Settings) -> str | None:
        """The reason in words, where incidents would cost more batches than allowed with this window; else None."""
        skipped, of, allowed = self._cost(window, settings)
        if skipped <= allowed:
            return None
        if skipped >= of:
            return (
                f"skipping {window.in_words()} would leave nothing to train on: incidents would have cost all {of} "
                "batches that the run is known to have. Look at the data, and at what computes the loss"
            )
        floor = ", which one first answer may cost" if allowed > settings.max_skipped_share * of else ""
        return (
            f"skipping {window.in_words()} would make it {skipped} of {of} batches that incidents have cost, and "
            f"max_skipped ({settings.max_skipped}) allows {allowed}{floor}: too much of the data is bad, or the "
            "windows are too coarse for so short a run, or the cause is not in the data"
        )

    def _cost(self, window: Window, settings: Settings) -> tuple[int, int, int]:
        """The batches that incidents cost with this window, the batches of the run, and how many incidents may cost.

        The limit is `max_skipped` of the batches that the run has, as far as known, and at least of those through the
        window. One first answer is always allowed, but no answer by which nothing is left to train on.
        """
        known = sum(max(0, min(w.last, window.last) - max(w.first, window.first) + 1) for w in self.skipped)
        skipped = sum(map(len, self.skipped)) + len(window) - known
        of = max(self.total, window.last + 1)
        reach = settings.reach
        least = max((reach.rewind + FIRST_ANSWER) * self.batches_per_step + reach.skip_after, reach.skip_min)
        if self.total:
            least = min(least, max(1, of - 1))  # else a short run of bad data alone would end as one that is done
        share = settings.max_skipped_share
        return skipped, of, max(int(share * of), least) if share < 1 else skipped

    def cut_down(self, wide: Window, narrow: Window, settings: Settings) -> Window:
        """A window within `max_skipped`, given that `narrow` is: from there on, with half of what is left."""
        skipped, _, allowed = self._cost(narrow, settings)
        last = self.end_of_update(narrow.first, narrow.last + (allowed - skipped) // 2)
        cut = Window(first=narrow.first, last=max(narrow.last, min(wide.last, last)))
        return narrow if self.excess_of(cut, settings) else cut


SINGLE_BATCHES = DataStream()
"""Every batch is an update, and nothing is known of epochs."""
