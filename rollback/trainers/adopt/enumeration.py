"""`enumerate(loader)` of a script: the numbers that it would give in a run that never resumed and never went back."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollback.train.guard import Guard


@dataclass
class HandedOut:
    """What the script was given of a guard in this process. passes: those that it has begun, empty ones too."""

    guard: Guard | None = None
    batches: int = 0
    passes: int = 0


class Enumeration:
    """In place of `enumerate`. A draw in which the guard hands out no batch counts on, as it does there.

    One enumeration may go over many passes: `enumerate(forever(loader))`. Its numbers go by the place in the data then,
    and not by that in the epoch; a resumed run comes to its epoch through passes that are empty.
    """

    def __init__(self, handed: HandedOut, iterable: Iterable[Any], start: int = 0) -> None:
        self._handed, self._passes = handed, handed.passes
        self._items = iter(iterable)
        self._start, self._next = start, start
        self._in_midst = False
        """Whether it began in the midst of a pass: with what an iterator had left."""
        self._base: int | None = None
        """The place in the data at which it began."""

    def __iter__(self) -> "Enumeration":
        return self

    def __next__(self) -> tuple[int, Any]:
        before = self._handed.batches
        item = next(self._items)
        guard = self._handed.guard
        number = self._next if guard is None or self._handed.batches == before else self._start + self._place(guard)
        self._next = number + 1
        return number, item

    def _place(self, guard: Guard) -> int:
        """Of the batch in hand, counted from the first one of this enumeration."""
        in_epoch, earlier = guard.batch_in_epoch, self._handed.passes - self._passes - 1
        if self._base is None:
            self._in_midst = earlier < 0
            epoch_began = guard.batch - in_epoch
            begun = epoch_began - earlier * (epoch_began // max(1, guard.epoch))
            self._base = guard.batch if self._in_midst else begun
        return in_epoch if earlier == 0 and not self._in_midst else guard.batch - self._base
