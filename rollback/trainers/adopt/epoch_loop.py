"""The script's loop over epochs: where the guard stands in another epoch than the loop's body, that body is left."""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Iterable[int])


class EpochMoved(BaseException):
    """Ends the body of a loop over epochs that `rollback.source.instrumentation` has changed; another one begins."""


class EpochLoop:
    """What the script goes over in place of its `range`. begun: called when its iteration begins."""

    def __init__(self, numbers: range, begun: "Callable[[EpochLoop], None]") -> None:
        self._numbers = numbers
        self._begun = begun
        self.place = -1
        """The number of the epoch, from 0; none has begun yet."""
        self.taken = False
        """Whether the script has begun to take the guard's batches in this body."""
        self.again = False
        """Whether its body has begun before: the script was sent back."""
        self._furthest = -1
        self._places: Iterator[int] | None = None
        """Of the epochs to come, where a guard says which is next."""
        self.over = False
        """Whether the guard has had its last epoch here."""

    @property
    def first(self) -> int:
        """What the script begins with. One with a snapshot of its own begins elsewhere when it is started again."""
        return self._numbers[0]

    @property
    def last(self) -> int:
        return self._numbers[-1]

    @property
    def at_first(self) -> bool:
        """Whether the first body is running, and no guard says yet which is next."""
        return self.place == 0 and self._places is None

    def follow(self, first: int, begun: Collection[int], places: Callable[[int], Iterator[int]]) -> None:
        """In the first body: from here on `places`, of the guard, say which epoch is next. They are given their count.

        first: of the run, which its places count from. begun: the epochs that the script has begun with, on all ranks:
        a host may lack the snapshot that it goes by on another one. Raises EpochMoved, on all ranks, where the run
        stands in another epoch than one of these, or has had its last one.
        """
        self._numbers = range(first, self._numbers.stop, self._numbers.step)
        self._places = places(len(self._numbers))
        stands = next(self._places, len(self._numbers))
        if stands >= len(self._numbers) or {*begun} != {self._numbers[stands]}:
            self._places = chain([stands], self._places)
            raise EpochMoved
        self.place = stands

    def release(self) -> None:
        """The guard is closed, and the script goes on by itself: behind the epoch in hand."""
        self._places = None

    def __iter__(self) -> "EpochLoop":
        self._begun(self)
        return self

    def __next__(self) -> int:
        self.taken = False
        self.place = self.place + 1 if self._places is None else next(self._places, len(self._numbers))
        self.again, self._furthest = self.place <= self._furthest, max(self.place, self._furthest)
        if self.place >= len(self._numbers):
            self.over = True
            raise StopIteration
        return self._numbers[self.place]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numbers, name)


def in_place_of(numbers: Any, make: Callable[[range], Loop]) -> tuple[Any, Loop | None]:
    """What a script goes over in place of `numbers`, and the loop that is made of these if they are a range, or a bar
    of tqdm over a range."""
    found = numbers if type(numbers) is range else getattr(numbers, "iterable", None)
    if type(found) is not range or not len(found):
        return numbers, None
    loop = make(found)
    return (loop if found is numbers else _shown(loop, numbers)), loop


def _shown(loop: Iterable[int], bar: Any) -> Iterator[int]:
    """The loop's numbers, as the script's bar counts them. What the bar goes over stays the script's range."""
    try:
        for number in loop:
            yield number
            bar.update()
    finally:
        bar.close()
