"""Passes: how the script's loops over the guard correspond to epochs of the data, also after a resume or a rollback.

A *pass* is one `for batch in guard`. Pass p covers epoch p. Two things change that:

- A resumed run begins in a later epoch. The passes before it are empty.
- A rollback goes back over an epoch's start. With `guard.epochs()` the pass ends, and the body of the earlier epoch
  begins again. A plain `range` loop cannot be sent back: the pass goes on with the rest of the earlier epoch, crosses
  the start of its own epoch again, and repeats the learning-rate steps that the script made there and what it had made
  of `requires_grad`. Other work between epochs is not repeated; scripts with such work need `guard.epochs()`.

A run resumes after the last batch of an epoch only if the script says that it may (`Guard.epochs`, resume_between).
Every other resumed pass has at least one batch, and the code after its loop works. The one exception is a complete run
that goes on: its last pass begins again and ends at once, so that the script does its work after the pass, and the next
pass begins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rollback.errors import RollbackError, UsageError
from rollback.train.data.cursor import Cursor
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.updates.advice import of_loops
from rollback.train.updates.wanted_gradients import WantedGradients

_BEHIND_THE_END = 1_000_000  # passes in a row, in some seconds: more than any script has epochs


class Again(Enum):
    """What is restored again when a pass begins, because the script has run code of its own since the restore."""

    NOTHING = "nothing"
    RANDOM_STATES = "random states"
    EVERYTHING = "everything"


class Passes:
    """Counts passes. The same on all ranks, since the script's loops are the same."""

    def __init__(self, cursor: Cursor, objects: Iterable[Any], gradients: WantedGradients) -> None:
        self._cursor = cursor
        self._schedulers = [item for item in objects if isinstance(item, LRScheduler)]
        self._announced: int | None = None
        self._target: int | None = None
        self._target_is_over = False
        self._strayed = False
        self._has_strayed: Callable[[], bool] = lambda: False
        self._finished = False
        self._behind_the_end = 0  # passes that have begun there
        self._by_epochs = self._between = False
        self._steps_at_end: list[int] | None = None
        self._boundary_steps: dict[int, list[int]] = {}
        self._gradients = gradients
        self._gradients_at: dict[int, Mapping[str, Any]] = {}
        self.count = 0
        """Number of passes that have begun in this process; with epochs(), the number of the next one."""
        self.epoch = 0
        """Number of the present pass."""
        self.over = False
        """Whether the present pass has no batches left."""
        self.interrupted = False
        """Whether the present pass ends because epochs() goes back to an earlier epoch."""
        self.uncounted = False
        """Whether the script loops over epochs by itself: a resumed run must go through the epochs that are over."""
        self._own_epoch: int | None = None  # the epoch of the first pass, by the script's own count

    def resume(self, *, left: bool = False, strayed: Callable[[], bool] = lambda: False) -> None:
        """The cursor is at the position of an earlier attempt. left: the script has done its work after the epoch.
        strayed: asked when the first pass begins, whether the script has changed since then what was restored."""
        self._has_strayed = strayed
        self._target_is_over = self._stands_behind_an_epoch() and not left
        self._target = self._cursor.epoch - self._target_is_over

    def start_pass(self) -> Again:
        """A `for batch in guard` begins."""
        number = self.count if self._announced is None else self._announced
        self.count, self._announced = number + 1, None
        self.interrupted = False
        self._require_an_end()
        self.uncounted = not self._by_epochs and number > 0 and self._cursor.has_epochs
        self._own_epoch = None if self._by_epochs or number > 0 else self._cursor.told_epoch
        self._note_boundary(number)
        if self._finished or (self._target is not None and number < self._target):
            self.over, self._strayed = True, True
            return Again.NOTHING
        self.epoch, self.over = number, False
        if self._target is None:
            self.leave_broken_epoch(number)
            return Again.NOTHING
        strayed, self._has_strayed = self._strayed or self._has_strayed(), lambda: False
        again = Again.EVERYTHING if strayed else Again.RANDOM_STATES
        self.over = self._target_is_over
        self._target, self._target_is_over, self._strayed = None, False, False
        return again

    def advice(self) -> Iterator[tuple[str, str]]:
        """Advice about the pass that has begun: code and text."""
        return of_loops(uncounted=self.uncounted, own_epoch=self._own_epoch, epoch=self._cursor.epoch)

    def end(self, *, final: bool) -> None:
        """The present pass has no more batches. final: later passes have none either."""
        self.over = True
        self._finished = final
        self.note_end()

    def note_end(self) -> None:
        self._steps_at_end = [*map(_steps_of, self._schedulers)]

    def rollback_applied(self, event: RollbackApplied) -> None:
        """The cursor was put back: perhaps into an earlier epoch, or, at an epoch's start, to the pass's beginning. A
        probe leaves it where it is."""
        if event.cause in (RollbackCause.EPOCH_START, RollbackCause.PROBE):
            return
        behind = self._stands_behind_an_epoch() and not event.epoch_left
        if self._by_epochs and (self._between or self._cursor.epoch - behind < self.epoch):
            self._target, self._target_is_over = self._cursor.epoch - behind, behind
            self._strayed, self.interrupted = True, True
        elif behind:
            self.cross()

    @property
    def replaying(self) -> bool:
        """Whether the epoch that has just ended is before the epoch of this pass."""
        return self._cursor.epoch <= self.epoch

    def cross(self) -> None:
        """Cross an epoch's start within a pass: repeat the learning-rate steps that the script made there, and what it
        made of `requires_grad`.

        Raises RollbackError where such a step was made by a metric: an attempt that resumes in the earlier epoch has
        the script do its work between the two itself.
        """
        self._gradients.put_back(self._gradients_at.get(self._cursor.epoch))
        for scheduler, count in zip(
            self._schedulers, self._boundary_steps.get(self._cursor.epoch, [0] * len(self._schedulers)), strict=True
        ):
            if count and isinstance(scheduler, ReduceLROnPlateau):
                raise _stepped_by_metric(self._cursor.epoch)
            for _ in range(count):
                scheduler.step()

    def epochs(self, count: int, end: Callable[[str], bool] = lambda by: True) -> Iterator[int]:
        """See `Guard.epochs`. end: `Guard.finish`, called after the last epoch; False: training has moved."""
        self._by_epochs = True
        try:
            while not self._finished:
                number = self._cursor.epoch + self._in_broken_epoch() if self._target is None else self._target
                if number >= count:
                    self._between = True
                    if end(f"guard.epochs({count})"):
                        return
                    self._between = False
                    continue
                self._announced = number
                yield number
                if self._announced is not None:
                    raise UsageError(
                        f"the body of guard.epochs() did not iterate over the guard in epoch {number}",
                        hint="write `for epoch in guard.epochs(n):` and inside it `for batch in guard:`",
                    )
        finally:
            self._by_epochs = self._between = False

    def _require_an_end(self) -> None:
        """Raise UsageError where the script begins passes behind the end of training for ever: it would be at work, by
        all that can be seen from outside, and do nothing."""
        self._behind_the_end += self._finished
        if self._behind_the_end >= _BEHIND_THE_END:
            raise UsageError(
                f"training is complete, and the script has looped over the guard {_BEHIND_THE_END:,} times since then "
                "and got no batch: its loop has no end of its own, as that of a generator cycle(loader)",
                hint="take the batches from `batches = (batch for _ in guard.epochs(10**9) for batch in guard)`, and "
                "train in `for batch in batches`, which ends where training ends",
            )

    def _note_boundary(self, number: int) -> None:
        self._gradients_at[number] = self._gradients.told()
        if self._steps_at_end is not None:
            now = [*map(_steps_of, self._schedulers)]
            self._boundary_steps[number] = [
                max(0, after - before) for after, before in zip(now, self._steps_at_end, strict=True)
            ]
        self._steps_at_end = None

    def _stands_behind_an_epoch(self) -> bool:
        return not self._cursor.opened and self._cursor.batch > 0

    def _in_broken_epoch(self) -> bool:
        """Whether the script left its last pass inside an epoch."""
        return self._cursor.opened and self._cursor.offset > 0 and self._cursor.has_epochs and not self.interrupted

    def leave_broken_epoch(self, number: int | None = None) -> bool:
        """A pass begins, or none follows. True: the pass before was left early; its epoch is over now."""
        broken = self._in_broken_epoch() and (number is None or number > self._cursor.epoch)
        if broken:
            self._cursor.end_epoch()
        return broken


def _steps_of(scheduler: Any) -> int:
    """How often it was stepped. A ChainedScheduler leaves the counting to the schedulers in it."""
    while not hasattr(scheduler, "last_epoch"):
        scheduler = scheduler._schedulers[0]
    return int(scheduler.last_epoch)


def _stepped_by_metric(epoch: int) -> RollbackError:
    return RollbackError(
        f"going back led over the start of epoch {epoch}, where the script had stepped ReduceLROnPlateau: its metric "
        "was of weights that are undone, so this process cannot take that step again",
        hint="write `for epoch in guard.epochs(n):` (with --adopt `for epoch in range(n):`, in the script's own file), "
        "which has the script do again what it does between two epochs; a new attempt does so too: `rollback launch` "
        "starts one, else run the same command again",
    )
