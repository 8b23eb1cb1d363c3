"""What a script counts by itself, made what it was where the training stands.

`steps += 1`: variables of the script, which only it can set. So the batch that follows a resume or a rollback adds to
them what is missing (`rollback.source.steering`), and checkpoints have them as values of the script.

`for i in range(n): batch = next(batches)`: the numbers are those of the batches in the data. A batch that follows a
resume or a rollback has another number than the turn that takes it. That turn ends, and the next one has this batch and
its number. Where a turn takes the batches of one update, its number is a count that checkpoints have.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from rollback.errors import RollbackError
from rollback.train.guard import Guard
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import in_place_of


class Count:
    """One of them, on one rank. handed: what the script is given of the guard. value: what it begins with, if known."""

    def __init__(self, handed: HandedOut, value: int | None = None) -> None:
        self._handed, self._begins, self._value = handed, value, value
        """As the script has it now; behind a load, as it is to have it with the next batch."""
        self._loaded_at: int | None = None
        """How many batches there were at a load that the script does not know of yet."""
        self._first: int | None = None
        """As the script of this process had it with its first batch."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value, self._loaded_at = state["value"], self._handed.batches

    def begin_anew(self) -> None:
        self.load_state_dict({"value": self._begins})

    @property
    def owed(self) -> bool:
        """Whether there was a load that the script does not know of yet."""
        return self._loaded_at is not None

    def wanted(self, present: int) -> int:
        """What the script is to have in place of `present`."""
        wanted = self._first if self._value is None else self._value
        return present if wanted is None or not self.owed else wanted

    def set(self, value: int) -> None:
        """The script has this now, unless it is owed another value."""
        self._value = self._value if self.owed else value

    def after(self, present: int, by: int) -> int:
        """What the script has behind an addition, which may be of 0. present: what it has."""
        if self._loaded_at == self._handed.batches:
            return present + by  # in another loop than that over the guard's batches
        self._first = present if self._first is None else self._first
        self._value = self.wanted(present) + by
        self._loaded_at = None
        return self._value


class Counts:
    """Those of a watched script. say: tells its user something, once."""

    def __init__(self, handed: HandedOut, say: Callable[[str], object]) -> None:
        self._handed, self._say = handed, say
        self._counts: dict[tuple[str, str], Count] = {}

    def keep(self, guard: Guard, led: Iterable[tuple[str, str, int | None]]) -> None:
        """The guard is made: it keeps these from now on, and gives them what they were. led: name and file of each, and
        what it begins with."""
        named: dict[str, Count] = {}
        for name, file, first in led:
            count = self._counts[name, file] = Count(self._handed, first)
            text = f"count {name} of {os.path.basename(file)}"
            named[text if text not in named else f"{text} {len(named)}"] = count
        guard.keep(**named)

    def of(self, name: str, filename: str) -> Count | None:
        """None: there is no guard yet, or it is not led."""
        return self._counts.get((name, filename))

    def added(self, present: Any, by: int, name: str, filename: str) -> int:
        """What the script adds to one in place of `by`, which is 0 where it has a batch."""
        count = self.of(name, filename)
        if count is None or not self._handed.batches:
            return by
        if type(present) is not int:
            self._say(
                f"the script counts with `{name}` by itself, which is a {type(present).__name__}: a rollback and a "
                "resume leave that count behind, but for whole numbers"
            )
            return by
        return count.after(present, by) - present


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

    def __init__(self, numbers: range, first: int | None, handed: HandedOut, count: Callable[[], Count | None]) -> None:
        super().__init__(numbers, first, handed)
        self._count = count
        if (kept := count()) is not None:
            self._next = kept.wanted(0)

    def __next__(self) -> int:
        self.in_midst = bool(self.held)
        if (count := self._count()) is not None:
            count.set(0 if self.in_epochs and self._next >= len(self) else self._next)
        return super().__next__()

    def require_number(self, guard: Guard, item: Any) -> None:
        count, number = self._count(), self._next - 1
        if count is None:
            return
        moved, wanted = count.owed, count.after(number, 0)
        self.moved = self.moved or moved
        if wanted != number or (moved and self.in_midst):  # in the midst of an update it is of another one
            self._next, self.held = wanted, [item]
            raise Turned
        self.in_midst = True


class TurningLoops:
    """Those that a watched script has begun last. demands: whether the script is not prepared for the end of what it
    takes from."""

    def __init__(self, handed: HandedOut, counts: Counts, demands: Callable[[], bool]) -> None:
        self._handed, self._counts, self._demands = handed, counts, demands
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
        count = partial(self._counts.of, counted, filename)
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
