"""The batches of one rank: an epoch is opened, what is to be skipped is passed over, and the next batch is read.

Each batch that is handed out is held against the draw log: one that was drawn before must be the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollback.train.data.cursor import Cursor
from rollback.train.data.draw_log import DrawLog
from rollback.train.data.skips import SkipList
from rollback.train.events import RollbackApplied
from rollback.train.run import AttachedRun


class Batches:
    """Nothing here is collective, unless it says so. Raises UsageError, RunDoesNotFit for data that do not come back.

    loader: the script's. skips: what is to be passed over and left out; the cursor is told at once.
    """

    def __init__(self, run: AttachedRun, loader: Any, cursor: Cursor, skips: SkipList) -> None:
        self._ranks = run.ranks
        self._record = run.record
        self.loader = loader
        self._cursor = cursor
        self.skips = skips
        skips.announce(cursor)
        # What others drew, or from other data, says nothing of what is drawn now.
        afresh = run.settings.accept_data_change or run.ranks_before is not None
        self._log = DrawLog(run.paths.draws(run.ranks.rank), afresh=afresh)
        cursor.witness = self

    def open_epoch(self) -> bool:
        """See to it that an epoch is open; True where one begins."""
        if self._cursor.opened:
            return False
        self._cursor.open_epoch()
        return True

    def read(self, step: int, timeline: int, show: Callable[[int], None]) -> Any:
        """The batch behind what is to be skipped. StopIteration at the epoch's end.

        show: called with the batch's position before it is read.
        """
        cursor = self._cursor
        opening = cursor.opening_digest()
        try:
            self.skips.pass_over(cursor, step, timeline)
            position = cursor.batch
            show(position)
            data = cursor.next()
        except StopIteration:
            self._log.check_end(cursor.batch, opening)
            raise
        self._check(position, data)
        for code, text in cursor.remarks():
            self._record.advise(code, text)
        return data

    def knows(self, batch: int) -> bool:
        """As the cursor's witness: whether there is anything to compare a batch with that is read to be dropped."""
        return self._log.knows(batch, self.skips.digest_before(batch))

    def check(self, batch: int, data: Any) -> None:
        """As the cursor's witness: RunDoesNotFit where the batch was another one."""
        self._log.compare(batch, data, self.skips.digest_before(batch))

    def may_resume_here(self) -> bool:
        """Collective: not behind an epoch's last batch, where the code after the script's loop would find none came.

        Ranks that find out by reading agree on it: one whose data end before the others' must not leave them alone with
        a snapshot.
        """
        if not self._cursor.opened:
            return False
        more = not self._cursor.at_end
        if self._cursor.ahead is not None:
            self._check(self._cursor.batch, self._cursor.ahead)
        return self._ranks.all_of(more) if self._cursor.reads_ahead else more

    def _check(self, position: int, data: Any) -> None:
        """Hold a batch that was read against the draw log, and note it there."""
        skipped, opening = self.skips.digest_before(position), self._cursor.opening_digest()
        self._log.check(position, self._cursor.order_digest(), data, skipped, opening)

    def rollback_applied(self, event: RollbackApplied) -> None:
        """The batches behind it are drawn again, but for those that are passed over now."""
        if event.skip is not None:
            self.skips.add(event.skip)
        self.skips.announce(self._cursor)

    def close(self) -> None:
        self._log.close()
        self._cursor.close()
