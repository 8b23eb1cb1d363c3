"""The script's side of the guard: what it may ask, and what it tells, in the body of its loop and elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from rollback.rundir.paths import RunPaths
from rollback.train.data.passes import Passes
from rollback.train.state.kept_values import KeptValues
from rollback.train.state.state import TrainingState
from rollback.train.step import StepInHand
from rollback.train.updates.optimizer import Updates


class ScriptSide:
    """All of `Guard` but its loop. Nothing here is collective, and nothing waits for the device."""

    _loader: Any
    _paths: RunPaths
    _passes: Passes
    _state: TrainingState
    _hand: StepInHand
    _updates: Updates

    # What it tells -------------------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float, *, grad_norm: Tensor | float | None = None) -> None:
        """Tell the guard the loss of this batch and, if known, the norm of the update's gradient before clipping.

        Call it for every batch, or once for each optimizer update, anywhere in the loop's body. Nothing is waited for.
        loss: scalar, of this rank. Losses of the batches of one update are averaged; what is divided by the number of
        accumulation steps may stay so.
        """
        self._hand.observe(loss, grad_norm)

    def keep(self, **first: Any) -> KeptValues:
        """Have values of the script kept in each checkpoint, and brought back by a resume and by a rollback.

            kept = guard.keep(best=float("inf"), tokens=0)
            ...
            kept.tokens += x.numel()

        Call it before the loop, for each name once. `first`: the values that a fresh run begins with; a resumed run
        finds those of its checkpoint at once, or these where the checkpoint is from before the script asked. Returns
        the one object that has them all as attributes. Values are numbers, texts, None, and lists, tuples and dicts of
        these; a tensor of one number becomes that number. Each rank has its own, so rank 0 may use one that others do
        not. An object with `state_dict` and `load_state_dict` may be kept too: what the one gives, in such values, is
        handed to the other whenever the run has been put to another place. Raises UsageError for anything else, and
        for a name that is kept already.
        """
        return self._state.memory.add(first)

    def announce(self, phase: str) -> None:
        """Tell the guard that a new phase begins: other data, another loss. Its level is learned afresh.

        It begins with the update in progress, or with the next one if that update is done. All ranks should say so; one
        suffices. After a rollback to before it, it need not be said again.
        """
        updated = self._updates.happened or self._updates.dropped_by_scaler
        setattr(self._hand, "next_phase" if updated else "phase", phase)

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
        return self._state.cursor.batch - self._state.batch_in_hand

    @property
    def batch_in_epoch(self) -> int:
        """The position in its epoch of the batch in hand (of the next one, where none is): 0 for an epoch's first.

        What `enumerate(loader)` gives in a script without a guard. `enumerate(guard)` begins at 0 also where a resumed
        run goes on in the middle of an epoch, and does not go back in a rollback.
        """
        return max(0, self._state.cursor.offset - self._state.batch_in_hand)

    @property
    def last_in_epoch(self) -> bool:
        """Whether the loader has no further batch in the epoch of the batch in hand.

        Of a loader that is read in order and has no length, the next batch is read to know it.
        """
        return self._state.cursor.at_end

    @property
    def epoch(self) -> int:
        """The epoch of the batch in hand, from 0."""
        return self._passes.epoch

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._paths.root

    # What it asks of a loader --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches in an epoch: `len(loader)`. Raises TypeError where the loader has no length."""
        return len(self._loader)

    def __bool__(self) -> bool:
        return True  # also where the loader is empty, or has no length

    @property
    def dataset(self) -> Any:
        """The loader's data set. Raises AttributeError where it has none."""
        return self._loader.dataset

    if not TYPE_CHECKING:  # a type checker would believe that there is everything

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(self.__dict__.get("_loader")).__name__
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
