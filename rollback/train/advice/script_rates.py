"""A learning rate that the script sets from what no checkpoint has, as from a count of updates of its own.

Nothing shows it until the run goes back or resumes: then the schedule goes on where the script's count is, or begins
anew. Behind a rollback an update has another rate than it had the first time. Behind a resume one has the rate of the
run's very first update, and the update before it had not. Updates of another epoch are not compared: a scheduler may
step between two, and a skip window may have led over that.
"""

import dis
import inspect
import math
from collections.abc import Callable, Iterable

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from rollback.wording import AdviceText

RATE_NOT_KEPT = AdviceText(
    "learning-rate-not-kept",
    "the update of step {step} has the learning rate {now:g}, {told}: the script seems to set it from a count of its "
    "own, which no checkpoint has. Count by {guard.step}, or have the count kept: {guard.keep:kept = updates=0}. Where "
    "the rate is to follow the batches and not the updates, nothing is wrong",
)
_COMPARED = 2  # updates: a scheduler's own rate comes back, and what it asks a script's count for is the next one
_REMEMBERED = 4096  # updates that a rollback may undo and are still compared


class ScriptRates:
    """The rates of this process's updates. objects: what the guard was handed."""

    def __init__(self, objects: Iterable[object]) -> None:
        schedulers = [item for item in objects if isinstance(item, LRScheduler)]
        self._by_metric = any(isinstance(item, ReduceLROnPlateau) for item in schedulers)
        self._by_script_alone = not any(map(_may_begin_anew, schedulers))
        self._had: dict[int, tuple[int, float]] = {}
        """Epoch and rate by step."""
        self._last: int | None = None
        self._compared = 0
        self.found: list[AdviceText] = []
        """The advice, once there is one."""

    def note(self, step: int, epoch: int, rate: float | None, before: float | None, first: float | None) -> None:
        """An update is made. before: the rate of the one before it; first: of the run's first one. None: not known."""
        if rate is None:
            return
        if self._last is None or step <= self._last:
            self._compared = 0 if self._last is None and not step else _COMPARED  # a run that begins
        if self._compared and not self._by_metric:
            self._compared -= 1
            told = self._told(step, epoch, rate, before, first)
            if told is not None and not self.found:
                self.found = [RATE_NOT_KEPT.of(step=step, now=rate, told=told)]
        self._last = step
        self._had[step] = epoch, rate
        if len(self._had) > _REMEMBERED:
            del self._had[next(iter(self._had))]

    def _told(self, step: int, epoch: int, rate: float, before: float | None, first: float | None) -> str | None:
        """What is strange about a rate, in words."""
        if step in self._had:
            epoch_then, then = self._had[step]
            other = epoch_then == epoch and not math.isclose(then, rate)
            return f"and had {then:g} before the run went back" if other else None
        if before is None or first is None or not self._by_script_alone:
            return None
        anew = math.isclose(rate, first) and not math.isclose(before, first)
        return f"that of the run's first one, and the update before it had {before:g}" if anew else None


def _may_begin_anew(scheduler: LRScheduler) -> bool:
    """Whether its rates may come again by what is kept, as with warm restarts: also those of a LambdaLR may, but for
    functions that do not look at the count that they are given."""
    return type(scheduler) is not LambdaLR or any(map(_looks_at_its_argument, scheduler.lr_lambdas))


def _looks_at_its_argument(function: Callable[[int], float]) -> bool:
    """True too where that cannot be seen, as of an object that is called."""
    if (code := getattr(function, "__code__", None)) is None:
        return True
    given = code.co_varnames[int(inspect.ismethod(function) and code.co_argcount > 1)]  # of a method the first is self
    read = (one.argval for one in dis.get_instructions(code))
    return any(given in (names if isinstance(names, tuple) else (names,)) for names in read)
