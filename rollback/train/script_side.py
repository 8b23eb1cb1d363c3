"""The script's side of the guard: what it may ask, and what it tells, in the body of its loop and elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from rollback.train.data.batches import Batches
from rollback.train.data.passes import Passes
from rollback.train.events import RollbackApplied
from rollback.train.incidents.rollback import Rewinder
from rollback.train.state.kept_values import KeptValues
from rollback.train.state.state import TrainingState
from rollback.train.step import StepInProgress


class ScriptSide:
    """All of `Guard` but its loop. Nothing here is collective, and nothing waits for the device."""

    _batches: Batches
    _passes: Passes
    _rewinder: Rewinder
    _state: TrainingState
    _step_in_progress: StepInProgress

    # What it tells -------------------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float, *, grad_norm: Tensor | float | None = None) -> None:
        """Tell the guard the loss of this batch and, if known, the norm of the update's gradient before clipping.

        Call it for every batch, or once for each optimizer update, anywhere in the loop's body. Nothing is waited for.
        loss: scalar, of this rank. Losses of the batches of one update are averaged; what is divided by the number of
        accumulation steps may stay so.
        """
        self._step_in_progress.observe(loss, grad_norm)

    def keep(self, **first: Any) -> KeptValues:
        """Have values of the script kept in each checkpoint, and brought back by a resume and by a rollback.

            kept = guard.keep(best=float("inf"), tokens=0)
            ...
            kept.tokens += x.numel()

        Call it before the loop, for each name once. `first`: the values that a fresh run begins with; a resumed run
        finds those of its checkpoint at once, or these where the checkpoint is from before the script asked. Returns
        the one object that has them all as attributes. Values are numbers, texts, None, and lists, tuples and dicts of
        these; a tensor of one number becomes that number. Each rank has its own, so rank 0 may use one that others do
        not. Raises UsageError for anything else, and for a name that is kept already.
        """
        return self._state.memory.add(first)

    def announce(self, phase: str) -> None:
        """Tell the guard that a new phase begins: other data, another loss. Its level is learned afresh.

        It begins with the update in progress, or with the next one if that update is done. All ranks should say so; one
        suffices. After a rollback to before it, it need not be said again.
        """
        self._step_in_progress.announce(phase)

    def on_rollback(self, act: Callable[[RollbackApplied], object]) -> None:
        """Call `act(event)` whenever training is put back to a checkpoint: for what the script keeps beside the guard.

        By then all that the guard keeps has been put back. `event.step` and `event.batch` say where training goes on,
        `event.checkpoint` from what, `event.cause` why (`rollback.train.events`). On every rank, with the same event,
        between two batches or at the start of an epoch; several are called in the order in which they were given. A
        resume is none: where it stands is known when the guard is made. What `act` raises ends this rank.
        """
        self._rewinder.subscribers.append(act)

    # What it asks --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The update in progress: the number of completed ones."""
        return self._state.counters.step

    @property
    def batch(self) -> int:
        """The position in the data stream of the batch in hand (of the next one, where none is).

        Batches count from 0 over the whole run; micro-batches of an accumulation count one by one.
        """
        return self._step_in_progress.batch

    @property
    def batch_in_epoch(self) -> int:
        """The position in its epoch of the batch in hand (of the next one, where none is): 0 for an epoch's first.

        What `enumerate(loader)` gives in a script without a guard. `enumerate(guard)` begins at 0 also where a resumed
        run goes on in the middle of an epoch, and does not go back in a rollback.
        """
        return max(0, self._state.cursor.offset - self._state.batch_in_hand)

    @property
    def epoch(self) -> int:
        """The epoch of the batch in hand, from 0."""
        return self._passes.epoch

    # What it asks of a loader --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches in an epoch: `len(loader)`. Raises TypeError where the loader has no length."""
        return len(self._batches.loader)

    def __bool__(self) -> bool:
        return True  # also where the loader is empty, or has no length

    @property
    def dataset(self) -> Any:
        """The loader's data set. Raises AttributeError where it has none."""
        return self._batches.loader.dataset

    if not TYPE_CHECKING:  # a type checker would believe that there is everything

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(getattr(self.__dict__.get("_batches"), "loader", None)).__name__
            raise AttributeError(
                f"the guard has no attribute {name!r}; what its loader ({kind}) has, ask of the loader"
            )


class PassIterator:
    """What `iter(guard)` returns: the guard's batches. Unlike the guard's own, its `iter` begins no pass."""

    def __init__(self, guard: Iterator[Any]) -> None:
        self._guard = guard

    def __iter__(self) -> PassIterator:
        return self

    def __next__(self) -> Any:
        return next(self._guard)
