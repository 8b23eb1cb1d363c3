"""Skips the batches of the skip list, with a record of each; and knows the samples that are left out."""

from bisect import bisect_left
from collections.abc import Callable, Collection
from functools import partial
from operator import attrgetter

import xxhash

from rollback.facts.training import PassedOver, SampleQuarantine, Trouble, Window
from rollback.rundir.skip_records import WRITING, SkippedBatch
from rollback.system.lines import LineWriter
from rollback.train.comm.recorder import say
from rollback.train.data.cursor import Cursor
from rollback.train.run import AttachedRun

_first = attrgetter("first")


def why_kept(samples: Collection[int], cursor: Cursor) -> str | None:
    """Why samples cannot be left out of what a cursor gives; None: they can."""
    length = cursor.describe().get("length") if cursor.leaves_out else None
    if length is None:
        return "this loader's batches have no data set indices that could be left out"
    beyond = min((sample for sample in samples if sample >= length), default=None)
    return f"the data set has {length} samples, and no sample {beyond}" if beyond is not None else None


class SkipList:
    """The skip windows in force, and this rank's record of the batches that it skipped."""

    def __init__(self, run: AttachedRun) -> None:
        self.windows = Window.merged(run.history.skip_list)
        self.quarantine = list(run.history.quarantine)
        """The samples that are left out, and from which batch on, as journalled; the same on all ranks."""
        self._digest, self._digest_of = 0, (self.windows, 0, 0)
        """The last one, and of how many windows and facts: it is asked at every batch, and a long run may have skipped
        thousands of times."""
        self._rank, self._path = run.ranks.rank, run.paths.skip_record(run.ranks.rank)
        self._writer: LineWriter | None = None
        self._record = run.record
        self._failing = False

    def add(self, window: Window) -> None:
        self.windows = Window.merged([*self.windows, window])

    def digest_before(self, batch: int) -> int:
        """A hash of what was skipped and left out before a batch; 0: nothing."""
        if not (self.windows or self.quarantine):
            return 0
        windows, count = self.windows, bisect_left(self.windows, batch, key=_first)
        facts = [fact for fact in self.quarantine if fact.batch <= batch]
        known, *numbers = self._digest_of
        if known is not windows or numbers != [count, len(facts)]:
            skipped = [(window.first, window.last) for window in windows[:count]]
            left_out = [(fact.batch, fact.samples) for fact in facts]
            self._digest = xxhash.xxh3_64_intdigest(repr((skipped, left_out)).encode()) if skipped or left_out else 0
            self._digest_of = windows, count, len(facts)
        return self._digest

    def window_at(self, batch: int) -> Window | None:
        """The window that this batch is in, if any."""
        return Window.holding(self.windows, batch)

    def leave_out(self, fact: SampleQuarantine) -> None:
        """Leave samples out from the fact's batch on, whatever earlier facts say of later batches. Journalled on
        return; `announce` tells the cursor."""
        self.quarantine.append(fact)
        self._record.note(fact, fact.in_words())

    def announce(self, cursor: Cursor) -> None:
        """Tell the cursor what is left out and what will be skipped, so that no worker reads it ahead."""
        cursor.leave_out([(fact.batch, frozenset(fact.samples)) for fact in self.quarantine])
        for window in self.windows:
            if window.last >= cursor.batch:
                cursor.plan_skips(window.first, window.last)

    def pass_over(self, cursor: Cursor, step: int, timeline: int) -> None:
        """Move the cursor to the end of the window it is in, if any. Raises StopIteration at the epoch's end.

        Every batch is recorded with its data set indices. The record is on disk before training goes on.
        """
        window = self.window_at(cursor.batch)
        if window is None:
            return
        first = cursor.batch
        try:
            while cursor.batch in window:
                batch, epoch, offset = cursor.batch, cursor.epoch, cursor.offset
                indices = cursor.skip()
                held = None if indices is None else list(indices)
                line = SkippedBatch(batch=batch, epoch=epoch, offset=offset, indices=held, timeline=timeline)
                self._guarded(partial(LineWriter.write, line=line.model_dump_json()))
        finally:
            if cursor.batch > first:
                self._guarded(lambda writer: writer.flush(durable=True), proves=True)
                self._record.note(PassedOver(first=first, last=cursor.batch - 1, step=step, timeline=timeline))

    def close(self) -> None:
        """Close the record. It is opened again where more is skipped."""
        if self._writer is not None:
            self._guarded(LineWriter.close)
            self._writer = None

    def _guarded(self, act: Callable[[LineWriter], None], *, proves: bool = False) -> None:
        """proves: a success shows that the disk has what was recorded. Else a line waits in memory for the next try."""
        try:
            if self._writer is None:
                self._writer = LineWriter(self._path)
            act(self._writer)
        except OSError as error:
            if self._failing:
                return
            self._failing = True
            told = f"{WRITING} {self._path} failed ({error}); training goes on, the journal has the windows"
            if self._rank:  # the journal is rank 0's
                say(told)
            else:
                self._record.note(Trouble(doing=WRITING, error=f"{self._path}: {error.strerror or error}"), told)
        else:
            self._failing = self._failing and not proves
