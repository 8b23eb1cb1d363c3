"""What the clone of a map-style loader reads from in place of the user's batch sampler."""

from __future__ import annotations

from collections import deque
from typing import Any

from rollback.train.data.cursor.order import BatchOrder
from rollback.train.data.cursor.quarantine import Neighbours
from rollback.train.data.cursor.workers import Keyed


class Feed:
    """The order from the position on, as the clone's batch sampler.

    `pending` holds the batches of indices that have left the order but not yet been handed out or passed over; the
    first is the one at the position. The first `reading` of them have been given to the reader, or withheld from it
    because they are planned to be skipped.

    It does not know the cursor: the clone's iterator must be freed with the last reference to the cursor, not by
    the cycle collector, which could run in a forked worker and would there shut down the workers of its parent.
    """

    def __init__(self) -> None:
        self._order: BatchOrder | None = None
        self._key: str | None = None
        self._batch = self._offset = 0
        self._pending: deque[Any] = deque()
        self.reading = 0
        self.planned: list[range] = []
        self.neighbours = Neighbours([], 0)
        self.last: Any = None
        """The batch of indices before the position, as the sampler gave it."""
        self._repeat = False

    def begin(self, order: BatchOrder, last: Any, *, batch: int, offset: int, key: str | None) -> None:
        """Goes to a position. `key` names the epoch's random states in workers; None without workers."""
        self._order, self.last = order, last
        self._batch, self._offset, self._key = batch, offset, key
        self._pending.clear()
        self.reading = 0

    def repeat_last(self) -> None:
        """Whoever reads next gets the batch before the position once more, and then those behind it."""
        self._repeat = True

    def __iter__(self) -> Feed:
        self.reading = 0
        return self

    def __next__(self) -> Any:
        if self._repeat:
            self._repeat = False
            return self._keyed(self.neighbours.instead(self.last, self._batch - 1), -1)
        while True:
            ahead = self.reading
            indices = self.peek(ahead)
            self.reading += 1
            if not self.is_planned(ahead):
                return self._keyed(indices, ahead)

    def _keyed(self, indices: Any, ahead: int) -> Any:
        return indices if self._key is None else Keyed(f"{self._key}/{self._offset + ahead}", indices)

    def peek(self, ahead: int = 0) -> Any:
        """The indices of the batch `ahead` of the position. StopIteration where the epoch has no such batch."""
        return self.neighbours.instead(self.drawn(ahead), self._batch + ahead)

    def drawn(self, ahead: int = 0) -> Any:
        """The same as the sampler gave them, with nothing in the place of samples that are left out."""
        assert self._order is not None
        if ahead == len(self._pending):
            self._pending.append(self._order.take())
        return self._pending[ahead]

    def pop(self) -> Any:
        """Moves the position past the first pending batch, and gives its indices."""
        taken = self.peek()
        self.last = self._pending.popleft()
        self.reading = max(0, self.reading - 1)
        self._batch += 1
        self._offset += 1
        return taken

    def is_over(self) -> bool:
        """Whether the epoch has no batch at the position."""
        try:
            self.peek()
        except StopIteration:
            return True
        return False

    def is_planned(self, ahead: int = 0) -> bool:
        """Whether the batch `ahead` of the position is to be skipped."""
        return any(self._batch + ahead in window for window in self.planned)
