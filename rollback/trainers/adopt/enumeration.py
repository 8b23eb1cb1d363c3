"""`enumerate(loader)` and `islice(loader, n)` of a script: what they give in a run that never resumed or went back."""

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, SupportsIndex

from rollback.errors import RollbackError
from rollback.train.guard import Guard

_OF_NO_LOADER = frozenset({list, tuple, range, str, bytes, dict, set})


@dataclass
class ScriptProgress:
    """What the script was given of its guard in this process. guard: None before it has one. draws: how many times it
    has asked for a batch, and was given one, or told of a pass's end. passes: those that it has
    begun, empty ones too. limited: whether the newest one had as many batches as `limit` allows, so that the script has
    not broken it off. untrained: whether the first batch of an epoch was among them, and nothing was computed since
    that trains. gathers: whether the script takes a further batch of an update, of which it has the first. raised: by
    which kind of error it has left the guarded loop, until it has another batch. holds: whether the loop of the newest
    pass gathers the batches of an update in a list."""

    guard: Guard | None = None
    batches: int = 0
    draws: int = 0
    passes: int = 0
    limited: bool = False
    untrained: bool = False
    gathers: bool = False
    raised: str = ""
    holds: bool = False
    _at_update: int = 0
    """How many batches there were at the newest update, or at the start of the pass."""
    _stale: bool = False
    """Whether training was put back in this pass while the script may have held batches of no update."""
    _at_pass: int = 0
    """How many batches there were before the newest pass."""
    _began: int = 0
    """Where in the data that pass began, or, once it has a batch, the epoch of its first one."""

    def set_guard(self, guard: Guard) -> None:
        """The guard is made."""
        self.guard = guard
        guard.on_rollback(self._note_rollback)

    def _note_rollback(self, _: object) -> None:
        self._stale = self.holds and self.batches > self._at_update

    @property
    def begins_update(self) -> bool:
        """Whether the batch in hand is the first of its update."""
        return self.batches <= self._at_update + 1

    def note_update(self) -> None:
        """The guard's optimizer makes one."""
        self.untrained, self._at_update = False, self.batches

    def require_none_stale(self) -> None:
        """Behind a draw. Raises RollbackError where the script's list has batches of an update that is undone."""
        if self._stale:
            raise RollbackError(
                "going back led behind batches that the script has gathered for its next update: it holds them in a "
                "list, from which this process cannot take them",
                hint="a new attempt begins with an empty list: `rollback launch` starts one, else run the same command "
                "again",
            )

    def note_script_pass(self, *, holds: bool) -> None:
        self.passes, self.holds = self.passes + 1, holds

    def note_guard_pass(self, guard: Guard) -> None:
        """A pass over the guard, which may go on where the script's has ended early."""
        self.limited = False
        self._began, self._at_pass = guard.batch, self.batches
        self._at_update, self._stale = self.batches, False

    def note_batch(self, guard: Guard) -> None:
        """The guard has handed one out."""
        self.require_none_stale()
        if self.batches == self._at_pass:
            self._began = guard.batch - guard.batch_in_epoch
        self.batches, self.draws, self.raised = self.batches + 1, self.draws + 1, ""
        self.untrained = self.untrained or guard.batch_in_epoch == 0

    def note_end(self) -> None:
        """A pass has no further batch. Raises RollbackError as `require_none_stale` does."""
        self.require_none_stale()
        self.draws += 1

    def note_raised(self) -> None:
        """The exception in hand leaves the loop over the guard."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            self.raised = type(error).__name__

    def falls_short(self) -> bool:
        """Whether the newest pass, which is at its end, was of less than an epoch: the run stands behind it, it began
        in its midst, or some of it is skipped. Not where the data themselves have no batch, and behind the training."""
        if (guard := self.guard) is None:
            return False
        given = self.batches - self._at_pass
        early = guard.batch + bool(given) - self._began != given
        return (early or guard.awaits_epoch) and not guard.finished


class Enumeration:
    """In place of `enumerate`. A draw in which the guard hands out no batch counts on, as it does there.

    One enumeration may go over many passes: `enumerate(forever(loader))`. Its numbers go by the place in the data then,
    and not by that in the epoch; a resumed run comes to its epoch through passes that are empty.
    """

    def __init__(self, progress: ScriptProgress, iterable: Iterable[Any], start: int = 0) -> None:
        self._progress, self._passes = progress, progress.passes
        self._items = iter(iterable)
        self._start, self._next = start, start
        self._in_midst = False
        """Whether it began in the midst of a pass: with what an iterator had left."""
        self._base: int | None = None
        """The place in the data at which it began."""

    def __iter__(self) -> "Enumeration":
        return self

    def __next__(self) -> tuple[int, Any]:
        before = self._progress.batches
        item = next(self._items)
        guard = self._progress.guard
        number = self._next
        if guard is not None and self._progress.batches == before + 1:  # an item of several batches has no place
            number = self._start + self._place(guard)
        self._next = number + 1
        return number, item

    def _place(self, guard: Guard) -> int:
        """Of the batch in hand, counted from the first one of this enumeration."""
        in_epoch, earlier = guard.batch_in_epoch, self._progress.passes - self._passes - 1
        if self._base is None:
            self._in_midst = earlier < 0
            epoch_began = guard.batch - in_epoch
            if self._in_midst:
                self._base = guard.batch
            elif earlier >= guard.epoch:
                self._base = 0  # epochs may differ in length
            else:
                self._base = epoch_began - earlier * (epoch_began // guard.epoch)
        return in_epoch if earlier == 0 and not self._in_midst else guard.batch - self._base


def numbered(progress: ScriptProgress, iterable: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
    """In place of `enumerate(iterable, start)`, wherever the script may number its batches."""
    return enumerate(iterable, start) if type(iterable) in _OF_NO_LOADER else Enumeration(progress, iterable, start)


def limit(progress: ScriptProgress, function: Callable[..., Any], *given: Any, **others: Any) -> Any:
    """In place of `function(...)`, of which the source says that it gives a training loop so many batches."""
    match given:
        case [items, SupportsIndex() as count] if function is islice and operator.index(count) >= 0:  # NumPy's, too
            return (item for _, item in _limited(progress, items, range(operator.index(count))))
        case [range() as numbers, items] if function is zip:
            return _limited(progress, items, numbers)
        case [items, range() as numbers] if function is zip:
            return ((item, number) for number, item in _limited(progress, items, numbers, behind=1))
    return function(*given, **others)


def _limited(
    progress: ScriptProgress, items: Iterable[Any], numbers: range, *, behind: int = 0
) -> Iterator[tuple[int, Any]]:
    """The first items, as many as `numbers`, by their places in the data: those that are skipped count, too.

    behind: how many are drawn behind the last one; where that is skipped it is one, too. Raises RollbackError where
    this is a pass that has gone back into an earlier epoch: what is left of that one ends here, and this process cannot
    go on to its own.
    """
    if not numbers and not behind:
        return
    began = 0
    for place, item in Enumeration(progress, items):
        guard = progress.guard
        epoch_began = guard.batch - guard.batch_in_epoch if guard is not None else 0
        began = max(began, epoch_began)
        if place < len(numbers):
            yield numbers[place], item
        if place >= len(numbers) - 1 + behind:
            if epoch_began < began:
                raise RollbackError(
                    f"going back led into an earlier epoch, of which the script takes {len(numbers)} batches: its loop "
                    "over epochs has begun a later one, and cannot be sent back in this process",
                    hint="`for epoch in range(n):` in the training loop's own file is sent back. A new attempt goes on "
                    "from there, too: `rollback launch` starts one, else run the same command again",
                )
            progress.limited = True
            return
