"""Passes: how the script's loops over the guard correspond to epochs of the data, also after a resume or a rollback.

A *pass* is one `for batch in guard`. Pass p covers epoch p. Two things change that:

- A resumed run begins in a later epoch. The passes before it are empty.
- A rollback goes back over an epoch's start. With `guard.epochs()` the pass ends, and the body of the earlier epoch
  begins again. A plain `range` loop cannot be sent back: the pass goes on with the rest of the earlier epoch, crosses
  the start of its own epoch again, and repeats the learning-rate steps that the script made there and what it had made
  of `requires_grad` and of modes. Other work between epochs is not repeated; scripts with such work need
  `guard.epochs()`.

A run resumes after the last batch of an epoch only if the script says that it may (`Guard.epochs`, resume_between).
Every other resumed pass has at least one batch, and the code after its loop works. The one exception is a complete run
that goes on: its last pass begins again and ends at once, so that the script does its work after the pass, and the next
pass begins. Where an operator has asked the run to go back, it does so first, and that pass has batches.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rollback.errors import RollbackError, UsageError
from rollback.train.data.cursor import Cursor
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.updates.model_switches import ModelSwitches
from rollback.wording import AdviceText

PLAIN_EPOCH_LOOP = AdviceText(
    "plain-epoch-loop",
    "the script counts its epochs itself: when the run resumes in a later epoch, the loop body first runs with no "
    "batches for each epoch before it. Behind a rollback into an earlier epoch the loop goes on with the rest of that "
    "one, and a `break` ends that. `for epoch in guard.epochs(n):` begins where the run stands; with --adopt so does "
    "`for epoch in range(n):` in the training loop's own file",
)
OWN_SNAPSHOT_EPOCH = AdviceText(
    "own-snapshot",
    "the script begins with epoch {told} by its own count: it seems to load a snapshot of its own. The guard's epochs "
    "begin where the run stands, in epoch {epoch}, so the script's loop would end at another place than meant. Take "
    "that loading out, and write `for epoch in guard.epochs(n):`",
)
_LATE = 2  # some count epochs from 1
_BEHIND_THE_END = 1_000_000  # passes in a row, in some seconds: more than any script has epochs


class RestoreAtPass(Enum):
    """What is restored again when a pass begins, because the script has run code of its own since the restore."""

    NOTHING = "nothing"
    RANDOM_STATES = "random states"
    EVERYTHING = "everything"


class PassState(Enum):
    """Of a pass."""

    NONE = "none has begun in this process"
    OPEN = "it has batches"
    OVER = "it has no batches left"
    INTERRUPTED = "it ends because guard.epochs() goes back to an earlier epoch"
    LAST = "it has no batches left, and later passes have none either"


class OuterLoop(Enum):
    """What drives the script's loop over epochs, and where that stands."""

    SCRIPT = "the script, by itself: a resumed run must go through the epochs that are over"
    HANDED_OUT = "guard.epochs(): it has handed out an epoch, whose body has not begun a pass yet"
    IN_BODY = "guard.epochs(): a pass has begun in that body"
    ASKING = "guard.epochs(): it asks whether training ends here"


@dataclass(frozen=True)
class SoughtPass:
    """The pass with which training goes on; those before it are empty."""

    number: int
    over: bool
    """Whether it begins again only for what the script does behind it."""
    strayed: Callable[[], bool]
    """Whether the script has changed by then what was restored."""


class _PassStarts:
    """What the script had done where each pass began, by its number: what it had made of `requires_grad` and of modes,
    and how often it had stepped each scheduler there. Kept where it was otherwise than at the pass before: of an epoch
    with one batch a run has millions."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._told: list[tuple[Mapping[str, Any], list[int]]] = []
        self._newest = -1

    def note(self, number: int, switches: Mapping[str, Any], steps: list[int]) -> None:
        """A pass begins. Later ones will begin again."""
        kept = bisect_left(self._numbers, number)
        del self._numbers[kept:], self._told[kept:]
        if self._told[-1:] != [(switches, steps)]:
            self._numbers.append(number)
            self._told.append((switches, steps))
        self._newest = number

    def at(self, number: int) -> tuple[Mapping[str, Any] | None, list[int]]:
        """None and no steps: that pass has not begun in this process."""
        known = bisect_right(self._numbers, number) if number <= self._newest else 0
        return self._told[known - 1] if known else (None, [])


class Passes:
    """Counts passes. The same on all ranks, since the script's loops are the same."""

    def __init__(self, cursor: Cursor, objects: Iterable[Any], switches: ModelSwitches) -> None:
        self._cursor = cursor
        self._schedulers = [item for item in objects if isinstance(item, LRScheduler)]
        self._switches = switches
        self._sought: SoughtPass | None = None
        self.epochs_in_words = "guard.epochs({})"
        self._loop = OuterLoop.SCRIPT
        self._ended_by: str | None = None  # of guard.epochs(), where that has ended the training
        self._behind_the_end = 0  # passes that have begun there
        self._steps_at_end: list[int] | None = None
        self._starts = _PassStarts()
        self._next = 0  # number of the pass that begins next
        self._own_epoch: int | None = None  # the epoch of the first pass, by the script's own count
        self.state = PassState.NONE
        """Of the present pass."""
        self.epoch = 0
        """Number of the present pass."""

    def resume(self, *, left: bool = False, strayed: Callable[[], bool] = lambda: False) -> None:
        """The cursor is at the position of an earlier attempt. left: the script has done its work after the epoch.
        strayed: asked when the first pass begins, whether the script has changed since then what was restored."""
        self._seek(over=self._stands_behind_an_epoch() and not left, strayed=strayed)

    def _seek(self, *, over: bool, strayed: Callable[[], bool]) -> None:
        self._sought = SoughtPass(self._cursor.epoch - over, over, strayed)

    @property
    def over(self) -> bool:
        """Whether the present pass has no batches left."""
        return self.state in (PassState.OVER, PassState.LAST)

    @property
    def interrupted(self) -> bool:
        return self.state is PassState.INTERRUPTED

    @property
    def awaits_epoch(self) -> bool:
        """Whether the present pass is before the one with which training goes on."""
        return self._sought is not None and self.state is PassState.OVER

    def start_pass(self) -> RestoreAtPass:
        """A `for batch in guard` begins."""
        number, self._next = self._next, self._next + 1
        if self._loop is OuterLoop.HANDED_OUT:
            self._loop = OuterLoop.IN_BODY
        by_script = self._loop is OuterLoop.SCRIPT
        self._own_epoch = self._cursor.told_epoch if by_script and number == 0 else None
        self._note_boundary(number)
        if self.state is PassState.LAST:
            self._require_an_end()
            return RestoreAtPass.NOTHING
        sought, self.state = self._sought, PassState.OPEN
        if sought is None:
            self.epoch = number
            self.leave_broken_epoch(number)
            return RestoreAtPass.NOTHING
        if number < sought.number:
            self._sought, self.state = replace(sought, strayed=lambda: True), PassState.OVER
            return RestoreAtPass.NOTHING
        self._sought, self.epoch = None, number
        if sought.over:
            self.state = PassState.OVER
        return RestoreAtPass.EVERYTHING if sought.strayed() else RestoreAtPass.RANDOM_STATES

    def advice(self) -> Iterator[AdviceText]:
        """Advice about the pass that has begun."""
        counts = self._loop is OuterLoop.SCRIPT and self._next > 1 and self.state is not PassState.LAST
        if counts and self._cursor.has_epochs:
            yield PLAIN_EPOCH_LOOP
        if self._own_epoch is not None and self._own_epoch >= _LATE:
            yield OWN_SNAPSHOT_EPOCH.of(told=self._own_epoch, epoch=self._cursor.epoch)

    def end(self, *, final: bool) -> None:
        """The present pass has no more batches. final: later passes have none either."""
        self.state = PassState.LAST if final else PassState.OVER
        self.note_end()

    def note_end(self) -> None:
        self._steps_at_end = [*map(_steps_of, self._schedulers)]

    def rollback_applied(self, event: RollbackApplied) -> None:
        """The cursor was put back: perhaps into an earlier epoch, or, at an epoch's start, to the pass's beginning. A
        probe leaves it where it is."""
        if event.cause in (RollbackCause.EPOCH_START, RollbackCause.PROBE):
            return
        behind = self._stands_behind_an_epoch() and not event.epoch_left
        can_go_back = self._loop is not OuterLoop.SCRIPT and self._cursor.epoch - behind < self.epoch
        if can_go_back or self._loop is OuterLoop.ASKING:
            self._seek(over=behind, strayed=lambda: True)
            self.state = PassState.INTERRUPTED
        elif behind:
            self.cross()
        if self.state is PassState.OVER and self.replaying:
            self.state = PassState.OPEN

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
        switches, steps = self._starts.at(self._cursor.epoch)
        self._switches.put_back(switches)
        for scheduler, count in zip(self._schedulers, steps or [0] * len(self._schedulers), strict=True):
            if count and isinstance(scheduler, ReduceLROnPlateau):
                raise _stepped_by_metric(self._cursor.epoch)
            for _ in range(count):
                scheduler.step()

    def epochs(self, count: int, end: Callable[[str], bool] = lambda by: True) -> Iterator[int]:
        """The epochs from where the run stands to `count`, each for one body of the script's loop (`Guard.epochs`).
        end: `Guard.finish`, called after the last epoch; False: training has moved. Raises UsageError where training is
        over by fewer epochs."""
        if self._ended_by is not None and count > self._cursor.epoch:
            raise _over(self._ended_by)
        return self._handed_out(count, end)

    def _handed_out(self, count: int, end: Callable[[str], bool]) -> Iterator[int]:
        try:
            while self.state is not PassState.LAST:
                number = self._sought.number if self._sought else self._cursor.epoch + self._in_broken_epoch()
                if number >= count:
                    self._loop = OuterLoop.ASKING
                    by = self.epochs_in_words.format(count)
                    if end(by):
                        self._ended_by = by
                        return
                    continue
                self._loop, self._next = OuterLoop.HANDED_OUT, number
                yield number
                if self._loop is OuterLoop.HANDED_OUT:
                    raise UsageError(
                        f"the body of guard.epochs() did not iterate over the guard in epoch {number}",
                        hint="write `for epoch in guard.epochs(n):` and inside it `for batch in guard:`",
                    )
        finally:
            self._loop = OuterLoop.SCRIPT

    def _require_an_end(self) -> None:
        """Raise UsageError where the script begins a pass behind the last of guard.epochs(), which would be empty. Else
        its loop may only be one that the end has cut short. But it may not begin passes for ever: it would be at work,
        by all that can be seen from outside, and do nothing."""
        if self._ended_by is not None:
            raise _over(self._ended_by)
        self._behind_the_end += 1
        if self._behind_the_end >= _BEHIND_THE_END:
            raise UsageError(
                f"training is complete, and the script has looped over the guard {_BEHIND_THE_END:,} times since then "
                "and got no batch: its loop has no end of its own, as that of a generator cycle(loader)",
                hint="take the batches from `batches = (batch for _ in guard.epochs(10**9) for batch in guard)`, and "
                "train in `for batch in batches`, which ends where training ends",
            )

    def _note_boundary(self, number: int) -> None:
        now = [*map(_steps_of, self._schedulers)]
        each = zip(now, self._steps_at_end or now, strict=True)
        self._starts.note(number, self._switches.state_dict(), [max(0, after - before) for after, before in each])
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


def _over(by: str) -> UsageError:
    return UsageError(
        f"training is complete, by {by}, and the script loops over the guard again: no checkpoint would keep what it "
        "trains there",
        hint="count all epochs in one `guard.epochs(n)`, also where they are of several phases: the same command then "
        "goes on from this end. What trains nothing, as an evaluation, takes its batches from a loader of its own",
    )


def _stepped_by_metric(epoch: int) -> RollbackError:
    return RollbackError(
        f"going back led over the start of epoch {epoch}, where the script had stepped ReduceLROnPlateau: its metric "
        "was of weights that are undone, so this process cannot take that step again",
        hint="write `for epoch in guard.epochs(n):` (with --adopt `for epoch in range(n):`, in the training loop's own "
        "file), which has the script do again what it does between two epochs; a new attempt does so too: `rollback "
        "launch` starts one, else run the same command again",
    )
