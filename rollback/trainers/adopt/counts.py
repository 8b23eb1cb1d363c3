"""What a script counts by itself, made what it was where the training stands.

`steps += 1`: variables of the script, which only it can set. So the batch that follows a resume or a rollback adds to
them what is missing (`rollback.source.steering`), and checkpoints have them as values of the script.

`for i in range(n): batch = next(batches)`: the numbers are those of the batches in the data. A batch that follows a
resume or a rollback has another number than the turn that takes it. That turn ends, and the next one has this batch and
its number.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from rollback.errors import RollbackError
from rollback.train.guard import Guard
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import in_place_of


class Count:
    """One of them, on one rank. handed: what the script is given of the guard."""

    def __init__(self, handed: HandedOut) -> None:
        self._handed = handed
        self._value: int | None = None
        """As the script has it now; behind a load, as it is to have it with the next batch."""
        self._loaded_at: int | None = None
        """How many batches there were at a load that the script does not know of yet."""
        self._first: int | None = None
        """As this process had it with its first batch."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value, self._loaded_at = state["value"], self._handed.batches

    def begin_anew(self) -> None:
        self.load_state_dict({"value": None})

    def after(self, present: int, by: int) -> int:
        """What the script has behind an addition, which may be of 0. present: what it has."""
        if self._loaded_at == self._handed.batches:
            return present + by  # in another loop than that over the guard's batches
        if self._loaded_at is not None:
            wanted = self._first if self._value is None else self._value
            present = present if wanted is None else wanted
        self._loaded_at = None
        self._first = present if self._first is None else self._first
        self._value = present + by
        return self._value


class Counts:
    """Those of a watched script. say: tells its user something, once."""

    def __init__(self, handed: HandedOut, say: Callable[[str], object]) -> None:
        self._handed, self._say = handed, say
        self._counts: dict[tuple[str, str], Count] = {}

    def keep(self, guard: Guard, led: Iterable[tuple[str, str]]) -> None:
        """The guard is made: it keeps these from now on, and gives them what they were. led: name and file of each."""
        named: dict[str, Count] = {}
        for name, file in led:
            count = self._counts[name, file] = Count(self._handed)
            text = f"count {name} of {os.path.basename(file)}"
            named[text if text not in named else f"{text} {len(named)}"] = count
        guard.keep(**named)

    def added(self, present: Any, by: int, name: str, filename: str) -> int:
        """What the script adds to one in place of `by`, which is 0 where it has a batch."""
        count = self._counts.get((name, filename))
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


class Turns:
    """What the script goes over in place of a loop's `range`. first: the place of its first batch, from the run's
    start; None: the loop goes over one epoch."""

    def __init__(self, numbers: range, first: int | None, handed: HandedOut) -> None:
        self._numbers, self._first, self._handed = numbers, first, handed
        self._next = 0
        if (guard := handed.guard) is not None and not handed.batches:  # the run goes on from where it stands
            self._next = self._place(guard)
        self.held: list[Any] = []
        """The batch of the turn that begins next, if the one before has taken it."""
        self.end: int | None = None
        """The place behind its last batch, from the run's start, once it has come to the end of its numbers."""

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

    def _place(self, guard: Guard) -> int:
        return guard.batch_in_epoch if self._first is None else guard.batch - self._first

    def require_number(self, guard: Guard, item: Any) -> None:
        """The turn has taken this batch. Raises Turned where it has another number, RollbackError where it is of a loop
        before this one."""
        place = self._place(guard)
        if place < 0:
            raise RollbackError(
                "going back led into a loop of the script that is over, and it cannot be sent back there",
                hint="a new attempt goes on from there: `rollback launch` starts one, else run the same command again",
            )
        if place != self._next - 1:
            self._next, self.held = place, [item]
            raise Turned

    def end_early(self) -> NoReturn:
        """There is no batch for this turn: what is left of the epoch is skipped, or was trained on before."""
        self._next = len(self._numbers)
        raise Turned


class TurningLoops:
    """Those that a watched script has begun last. demands: whether the script is not prepared for the end of what it
    takes from."""

    def __init__(self, handed: HandedOut, demands: Callable[[], bool]) -> None:
        self._handed, self._demands = handed, demands
        self._turns: dict[tuple[str, int], Turns | None] = {}
        """By where they are; None: one that is not led, since its turns have no places in the data."""

    def turns(self, numbers: Any, filename: str, line: int, in_epochs: bool) -> Any:
        """What the script goes over in place of `numbers`, in the loop of that line."""
        first, place = None if in_epochs else 0, (filename, line)
        if place in self._turns and not in_epochs:
            before = self._turns[place]
            first = before.end if before is not None else None
            if first is None:  # it was broken off: where this one begins, a later attempt could not know
                self._turns[place] = None
                return numbers
        instead, self._turns[place] = in_place_of(numbers, lambda found: Turns(found, first, self._handed))
        return instead

    def take(self, filename: str, line: int, batches: Iterator[Any], *default: Any) -> Any:
        """`next(batches, *default)` in that loop. Raises Turned."""
        turns = self._turns.get((filename, line))
        if turns is None:
            return next(batches, *default)
        if turns.held:
            return turns.held.pop()
        before = self._handed.batches
        try:
            item = next(batches, *default)
        except StopIteration:
            if turns.in_epochs and self._handed.falls_short() and self._demands():
                turns.end_early()
            raise
        guard = self._handed.guard
        if guard is None or self._handed.batches != before + 1:  # not the guard's, or of several batches
            self._turns[filename, line] = None
        else:
            turns.require_number(guard, item)
        return item
