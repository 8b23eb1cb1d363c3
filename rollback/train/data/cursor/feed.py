"""The batch sampler that the clone of a map-style loader gets in place of the user's."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from rollback.train.data.cursor.digest import digest_of_indices
from rollback.train.data.cursor.loader_clone import Keyed
from rollback.train.data.cursor.order import BatchOrder
from rollback.train.data.quarantine import Replacements


class SamplerBatch:
    """What the sampler gave for one batch, and its digest, which is asked for more than once in a step."""

    def __init__(self, indices: Any) -> None:
        self.indices = indices
        self.digest = digest_of_indices(indices)
        self.hex_digest = None if self.digest is None else f"{self.digest:016x}"  # for JSON


class IndexFeed:
    """Gives the clone the batches of indices from the position on.

    `pending` holds batches of indices that were taken from the order and are not yet returned or skipped; the first one
    is at the position. The first `reading` of them were given to the reader, or kept from it because they are planned
    to be skipped.

    The feed holds no reference to the cursor. So the clone's iterator is freed with the last reference to the cursor,
    and not by the cycle collector: that could run in a forked worker and would shut down its parent's workers.
    """

    def __init__(self) -> None:
        self._order: BatchOrder | None = None
        self._key: str | None = None
        self._batch = self._offset = 0
        self._pending: deque[SamplerBatch] = deque()
        self.reading = 0
        self.planned: list[range] = []
        self.replacements = Replacements([], 0)
        self.last: SamplerBatch | None = None
        """Of the batch before the position."""
        self._repeat = False
        self.copies = 0
        """How often the reader that begins now gets its first batch again, to be compared. As often as there are
        workers: then each of them reads, from there on, what it would have read."""

    def begin(self, order: BatchOrder, last: Any, *, batch: int, offset: int, key: str | None) -> None:
        """Goes to a position. `key` names the epoch's random states in workers; None without workers."""
        self._order, self.last = order, None if last is None else SamplerBatch(last)
        self._batch, self._offset, self._key = batch, offset, key
        self._pending.clear()
        self.reading = 0

    def repeat_last(self) -> None:
        """The next reader gets the batch before the position again, and then the batches behind it."""
        self._repeat, self.copies = True, 0

    def __iter__(self) -> "IndexFeed":
        self.reading = 0
        return self

    def __next__(self) -> Any:
        if self._repeat:
            self._repeat = False
            assert self.last is not None
            last = self.replacements.instead(self.last.indices, self._batch - 1, self._drawn_from)
            return self._keyed(last, -1)
        if self.copies and self.reading == 1:
            self.copies -= 1
            return self._keyed(self.peek(), 0)
        while True:
            ahead = self.reading
            indices = self.peek(ahead)
            self.reading += 1
            if not self.is_planned(ahead):
                return self._keyed(indices, ahead)

    def _keyed(self, indices: Any, ahead: int) -> Any:
        return indices if self._key is None else Keyed(f"{self._key}/{self._offset + ahead}", indices)

    def peek(self, ahead: int = 0) -> Any:
        """Indices of the batch `ahead` batches behind the position. StopIteration if the epoch ends before."""
        if ahead == len(self._pending):
            self._draw()
        indices = self._pending[ahead].indices
        if not self.replacements.listed:
            return indices
        return self.replacements.instead(indices, self._batch + ahead, lambda: self._drawn_from(ahead + 1))

    def _draw(self) -> None:
        """Takes one more batch from the order. StopIteration at the epoch's end."""
        assert self._order is not None
        self._pending.append(SamplerBatch(self._order.take()))

    def _drawn_from(self, ahead: int = 0) -> Iterator[Any]:
        """What the sampler gave from there on, up to the epoch's end."""
        with suppress(StopIteration):
            while True:
                if ahead == len(self._pending):
                    self._draw()
                yield self._pending[ahead].indices
                ahead += 1

    def pop(self) -> Any:
        """Moves the position past the first pending batch and returns its indices."""
        taken = self.peek()
        self.last = self._pending.popleft()
        self.reading = max(0, self.reading - 1)
        self._batch += 1
        self._offset += 1
        return taken

    @property
    def next(self) -> SamplerBatch | None:
        """The batch at the position, with no sample replaced; None: the epoch has none there."""
        try:
            if not self._pending:
                self._draw()
        except StopIteration:
            return None
        return self._pending[0]

    def is_planned(self, ahead: int = 0) -> bool:
        """Whether the batch `ahead` batches behind the position is planned to be skipped."""
        position = self._batch + ahead
        return any(position in window for window in self.planned)
