"""The batches of one rank: an epoch is opened, what is to be skipped is passed over, and the next batch is read.

Each batch that is handed out is held against the draw log: one that was drawn before must be the same again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.data.cursor import Cursor
from rollback.train.data.draw_log import DrawLog
from rollback.train.data.skips import SkipList


class Batches:
    """Nothing here is collective, unless it says so. Raises UsageError, RunDoesNotFit for data that do not come back.

    afresh: what earlier attempts drew does not count (see `DrawLog`).
    """

    def __init__(
        self, paths: RunPaths, ranks: Ranks, cursor: Cursor, skips: SkipList, record: Recorder, *, afresh: bool
    ) -> None:
        self._ranks = ranks
        self._cursor = cursor
        self._skips = skips
        self._record = record
        self._log = DrawLog(paths.draws(ranks.rank), afresh=afresh)
        cursor.witness = self

    def open_epoch(self) -> bool:
        """See to it that an epoch is open; True where one begins."""
        if self._cursor.opened:
            return False
        self._cursor.open_epoch()
        return True

    def next(self, step: int, timeline: int, reading: Callable[[int], None]) -> Any:
        """The batch behind what is to be skipped. StopIteration at the epoch's end.

        reading: called with the batch's position before it is read.
        """
        cursor = self._cursor
        opening = cursor.opening_digest()
        try:
            self._skips.pass_over(cursor, step, timeline)
            position = cursor.batch
            reading(position)
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
        return self._log.knows(batch, self._skips.past_of(batch))

    def check(self, batch: int, data: Any) -> None:
        """As the cursor's witness: RunDoesNotFit where the batch was another one."""
        self._log.compare(batch, data, self._skips.past_of(batch))

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
        past, opening = self._skips.past_of(position), self._cursor.opening_digest()
        self._log.check(position, self._cursor.order_digest(), data, past, opening)

    def close(self) -> None:
        self._log.close()
        self._cursor.close()
