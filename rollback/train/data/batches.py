"""The batches of one rank: opens epochs, skips batches, and reads the next one.

Each batch is compared with the draw log: a batch that was drawn before must be the same again.
"""

from collections.abc import Callable
from typing import Any

from rollback.errors import DataUnreadable
from rollback.train.data.cursor import Cursor
from rollback.train.data.draw_log import DrawLog
from rollback.train.data.skips import SkipList
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.run import AttachedRun

_TRIES = 16
"""At one batch. Who tries again after a short failure of a disk needs fewer."""


class Batches:
    """Nothing here is collective, unless it says so. Raises UsageError, and RunDoesNotFit where data differ.

    loader: the script's. skips: the batches to skip and the samples to leave out; the cursor gets them at once.
    """

    def __init__(self, run: AttachedRun, loader: Any, cursor: Cursor, skips: SkipList) -> None:
        self._ranks = run.ranks
        self._record = run.record
        self.loader = loader
        self._cursor = cursor
        self.skips = skips
        skips.announce(cursor)
        self.resumes_between = False
        """Whether a run may resume behind an epoch's last batch: the script says so."""
        # Batches of other ranks, or of other data, cannot be compared.
        accepted = run.settings.accept_data_change
        afresh = accepted or run.ranks_before is not None
        self._log = DrawLog(run.paths.draws(run.ranks.rank), afresh=afresh, contents=not accepted)
        cursor.comparer = self
        self._tried = (0, 0)
        """The batch that could not be read last, and how often it was tried."""

    def open_epoch(self) -> bool:
        """Open an epoch, if none is open. True: an epoch begins, also one that a checkpoint has opened."""
        if not self._cursor.opened:
            self._cursor.open_epoch()
        return self._cursor.offset == 0

    def read(self, step: int, timeline: int, show: Callable[[int], None]) -> Any:
        """Skip what must be skipped, and read the next batch. StopIteration at the epoch's end.

        What reading raises is the script's: it may catch it, and gets the same batch again. Raises UsageError where it
        goes on like that without end.

        show: called with the batch's position before it is read.
        """
        cursor = self._cursor
        opening = cursor.opening_digest()
        try:
            if self.skips.windows:
                self.skips.pass_over(cursor, step, timeline)
            position = cursor.batch
            show(position)
            data = cursor.next()
        except StopIteration:
            self._log.check_end(cursor.batch, opening)
            raise
        except Exception as error:
            self._note_failure(cursor.batch, error)
            raise
        self._check(position, data, opening)
        self._record.advise(*cursor.remarks())
        return data

    def _note_failure(self, batch: int, error: Exception) -> None:
        before, tries = self._tried
        self._tried = batch, tries + 1 if batch == before else 1
        if self._tried[1] >= _TRIES:
            raise DataUnreadable(
                f"batch {batch} of the data could not be read in {_TRIES} tries ({type(error).__name__}: {error}); the "
                "script catches that and asks for the next batch, and under a guard it is this one again: all ranks "
                "count batches alike, and a later epoch or attempt must meet the same ones",
                hint="do not catch it: `rollback launch` leaves out a sample that has ended two attempts; or have the "
                "data set give another sample in its place; or name it: --skip-samples",
            ) from error

    def knows(self, batch: int) -> bool:
        """Whether a batch that is read and dropped can be compared. The cursor asks: this is its `comparer`."""
        return self.skips.window_at(batch) is None and self._log.knows(batch, self.skips.digest_before(batch))

    def check(self, batch: int, data: Any) -> None:
        """Raise RunDoesNotFit where the batch was another one before. The cursor's `comparer`, too."""
        self._log.compare(batch, data, self.skips.digest_before(batch))

    def may_resume_here(self, *, between: bool = False) -> bool:
        """Collective: whether a run may resume here.

        It may not after an epoch's last batch: a resumed pass would be empty, and code after the loop expects a batch.
        between: it may, where the script says so.

        Ranks that find this out by reading agree on it: a rank whose data end earlier must not leave the others alone
        with a snapshot.
        """
        if not self._cursor.opened:
            return False
        if between and self.resumes_between and not self._cursor.reads_ahead:
            return True
        more = not self._cursor.at_end
        if self._cursor.ahead is not None:
            self._check(self._cursor.batch, self._cursor.ahead, self._cursor.opening_digest())
        return self._ranks.all_of(more) if self._cursor.reads_ahead else more

    def may_be_marked(self) -> bool:
        """Whether a run may resume here, of a cursor that need not read ahead to know."""
        return self._cursor.opened and (self.resumes_between or not self._cursor.at_end)

    def nothing_is_left(self) -> bool:
        """Collective: whether the script gets no batch of the open epoch any more, since a run has resumed behind its
        last one, or since all that is left is on the skip list. False where it has no length."""
        cursor = self._cursor
        if cursor.offset and not cursor.reads_ahead and cursor.at_end:
            return True
        window = self.skips.window_at(cursor.batch)
        if window is None:  # on all ranks alike
            return False
        end = cursor.epoch_end
        return self._ranks.all_of(end is not None and cursor.batch < end <= window.last + 1)

    def _check(self, position: int, data: Any, opening: int) -> None:
        """Compare a batch that was read with the draw log, and add it there."""
        self._log.check(position, self._cursor.order_digest(), data, self.skips.digest_before(position), opening)

    def rollback_applied(self, event: RollbackApplied) -> None:
        """The later batches are drawn again, without the batches that are skipped now. A probe has drawn nothing."""
        if event.cause is RollbackCause.PROBE:
            return
        if event.skip is not None:
            self.skips.add(event.skip)
        self.skips.announce(self._cursor)

    def close(self) -> None:
        self._log.close()
        self.skips.close()
        self._cursor.close()
