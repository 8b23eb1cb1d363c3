"""The numbers of a script's turns, made what they were where the training stands.

`for i in range(n): batch = next(batches)`: the numbers are those of the batches in the data. A batch that follows a
resume or a rollback has another number than the turn that takes it. That turn ends, and the next one has this batch and
its number. Where a turn takes the batches of one update, its number is a count that checkpoints have.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from rollback.errors import RollbackError
from rollback.train.guard import Guard
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import in_place_of


class StepCount:
    """The number of a turn that has begun, on one rank, from 0."""

    def __init__(self) -> None:
        self.value = 0
        """As the script has it now; behind a load, as it is to have it with the next batch."""
        self.owed = False
        """Whether there was a load that the script does not know of yet."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.owed = state["value"], True

    def begin_anew(self) -> None:
        self.load_state_dict({"value": 0})

    def set(self, value: int) -> None:
        """The script has this now, unless it is owed another value."""
        self.value = self.value if self.owed else value

    def with_batch(self, present: int) -> int:
        """What the script has with the batch in hand. present: what it has without a load."""
        self.set(present)
        self.owed = False
        return self.value


class Turned(BaseException):
    """Ends a turn of a loop that `rollback.source.steering.steered` has changed; another one begins."""


class Turns(ABC):
    """What the script goes over in place of a loop's `range`. first: the place of its first batch, from the run's
    start; None: the loop goes over one epoch."""

    def __init__(self, numbers: range, first: int | None, handed: HandedOut) -> None:
        self._numbers, self._first, self._handed = numbers, first, handed
        self._next = 0
        self.held: list[Any] = []
        """The batch of the turn that begins next, if the one before has taken it."""
        self.end: int | None = None
        """The place behind its last batch, from the run's start, once it has come to the end of its numbers."""
        self.in_midst = False
        """Whether the turn has its first batch, and may take more."""
        self.moved = False
        """Whether its numbers do not count all batches that it had: the run has gone back, or on from a checkpoint."""

    @property
    def in_epochs(self) -> bool:
        return self._first is None

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self._next >= len(self._numbers):
            self._handed.limited = True
            self.end = None if self._first is None else self._first + len(self._numbers)
            raise StopIteration
        number, self._next = self._numbers[self._next], self._next + 1
        return number

    def __len__(self) -> int:
        return len(self._numbers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._numbers, name)

    @abstractmethod
    def require_number(self, guard: Guard, item: Any) -> None:
        """The turn has taken this batch. Raises Turned where it has another number, RollbackError where it is of a loop
        before this one."""

    def end_early(self) -> NoReturn:
        """There is no batch for this turn: what is left of the epoch is skipped, or was trained on before."""
        self._next = len(self._numbers)
        raise Turned


class PlacedTurns(Turns):
    """Each takes one batch, and has its place."""

    def __init__(self, numbers: range, first: int | None, handed: HandedOut) -> None:
        super().__init__(numbers, first, handed)
        if (guard := handed.guard) is not None and not handed.batches:  # the run goes on from where it stands
            self._next = self._place(guard)

    def _place(self, guard: Guard) -> int:
        return guard.batch_in_epoch if self._first is None else guard.batch - self._first

    def require_number(self, guard: Guard, item: Any) -> None:
        place = self._place(guard)
        if place < 0:
            raise RollbackError(
                "going back led into a loop of the script that is over, and it cannot be sent back there",
                hint="a new attempt goes on from there: `rollback launch` starts one, else run the same command again",
            )
        if place != self._next - 1:
            self._next, self.held = place, [item]
            raise Turned


class CountedTurns(Turns):
    """Each takes the batches of one update. Between two epochs, what is kept of them is that the next one is the first.

    count: the number of the turn that has begun, as the guard keeps it; None: there is no guard yet."""

    def __init__(
        self, numbers: range, first: int | None, handed: HandedOut, count: Callable[[], StepCount | None]
    ) -> None:
        super().__init__(numbers, first, handed)
        self._count = count
        if (kept := count()) is not None:
            self._next = kept.value if kept.owed else 0

    def __next__(self) -> int:
        self.in_midst = bool(self.held)
        if (count := self._count()) is not None:
            count.set(0 if self.in_epochs and self._next >= len(self) else self._next)
        return super().__next__()

    def require_number(self, guard: Guard, item: Any) -> None:
        count, number = self._count(), self._next - 1
        if count is None:
            return
        moved, wanted = count.owed, count.with_batch(number)
        self.moved = self.moved or moved
        if wanted != number or (moved and self.in_midst):  # in the midst of an update it is of another one
            self._next, self.held = wanted, [item]
            raise Turned
        self.in_midst = True


class TurningLoops:
    """Those that a watched script has begun last. count_of: a count by its name and file; None: there is no guard yet.
    demands: whether the script is not prepared for the end of what it takes from."""

    def __init__(
        self, handed: HandedOut, count_of: Callable[[str, str], StepCount | None], demands: Callable[[], bool]
    ) -> None:
        self._handed, self._count_of, self._demands = handed, count_of, demands
        self._turns: dict[tuple[str, int], Turns | None] = {}
        """By where they are; None: one that is not led, since its turns have no places in the data."""

    def turns(self, numbers: Any, filename: str, line: int, in_epochs: bool, counted: str) -> Any:
        """What the script goes over in place of `numbers`, in the loop of that line. counted: the name of the count of
        its turns, where one may take several batches."""
        first, place = None if in_epochs else 0, (filename, line)
        if place in self._turns and not in_epochs:
            before = self._turns[place]
            first = before.end if before is not None and not counted else None
            if first is None:  # where this one begins, a later attempt could not know: that one was broken off
                self._turns[place] = None
                return numbers
        count = partial(self._count_of, counted, filename)
        instead, self._turns[place] = in_place_of(
            numbers,
            lambda found: (
                CountedTurns(found, first, self._handed, count) if counted else PlacedTurns(found, first, self._handed)
            ),
        )
        return instead

    def take(self, filename: str, line: int, batches: Iterator[Any], *default: Any) -> Any:
        """`next(batches, *default)` in that loop. Raises Turned."""
        turns = self._turns.get((filename, line))
        if turns is None:
            return next(batches, *default)
        if turns.held:
            return turns.held.pop()
        before, self._handed.gathers = self._handed.batches, turns.in_midst
        try:
            item = next(batches, *default)
        except StopIteration:
            if turns.in_epochs and (turns.moved or self._handed.falls_short()) and self._demands():
                self._handed.untrained = False  # what this turn has taken is too little for an update
                turns.end_early()
            raise
        finally:
            self._handed.gathers = False
        guard = self._handed.guard
        if guard is None or self._handed.batches != before + 1:  # not the guard's, or of several batches
            self._turns[filename, line] = None
        else:
            turns.require_number(guard, item)
        return item
