"""What a script's loops carry from turn to turn, made what it was where the training stands.

A temperature, a mean of losses, a patience: only the script can set its variables. So where a loop may have come to
another place in the data, by a resume or a rollback, the script asks for them (`rollback.source.steering`), and
checkpoints have them as values of the script.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from torch import Tensor, nn

from rollback.source.led_variables import LedVariable
from rollback.train.guard import Guard
from rollback.train.state.kept_values import ToldAtEnd
from rollback.trainers.adopt.carried_values import (
    ABSENT,
    MISSES,
    Read,
    decoded,
    is_lost,
    is_meter,
    is_same,
    put,
    state_of,
    value_of,
)
from rollback.trainers.adopt.counts import StepCount
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import EpochLoop


class Carried(ABC):
    """A variable on one rank, as its script has it. in_place: whether it is the same object all the time. handed: what
    the script is given of the guard. attribute: of which name, where it is an object's."""

    def __init__(self, handed: HandedOut, *, in_place: bool = False, attribute: str = "") -> None:
        self._handed, self._in_place, self._attribute = handed, in_place, attribute
        self._owed: Mapping[str, Any] | None = None
        """The state that the script is to have, and may not have yet."""
        self.missed = False
        """Whether the script has not what it was: a checkpoint has told that it was too much to be kept, or the object
        that it is an attribute of is not there."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it is; empty: nobody can tell."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._owed = state

    def begin_anew(self) -> None:
        """A checkpoint does not have it."""
        self._owed = None

    def _given(self, state: Mapping[str, Any], read: Read) -> tuple[Any, ...]:
        """The value that a state tells of; none: it tells of none, or what the script has is that, also now."""
        self.missed = self.missed or MISSES in state
        if "value" not in state:
            return ()
        try:
            present = read()
        except ABSENT as error:
            if self._attribute and not _is_missing(error, self._attribute):
                self.missed = True
                return ()
            return (decoded(state["value"]),)
        if is_same(self._told(read), state):  # it may be a buffer of a module, too
            return ()
        value = decoded(state["value"])
        return () if self._in_place and put(present, value) is present else (value,)

    def _told(self, read: Read) -> dict[str, Any]:
        return state_of(read)


class CarriedByBatches(Carried):
    """In a training loop: what it is at each time."""

    _read: Read | None = None
    _first: Mapping[str, Any] = MappingProxyType({})
    """As the script of this process had it first."""
    _loaded_at = 0
    """How many times the script had asked for a batch."""

    def state_dict(self) -> dict[str, Any]:
        if self._owed is not None:
            return dict(self._owed)
        return {"first": True} if self._read is None else self._told(self._read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded_at = self._handed.draws

    def begin_anew(self) -> None:
        self.load_state_dict({"first": True})

    def asked(self, read: Read, *, behind: bool = False) -> tuple[Any, ...]:
        """What the script is given in place of what it has, where it asks in its loop over batches, or behind it; none:
        nothing."""
        if self._read is None:
            self._first = self._told(read)
        self._read = read
        if self._owed is None or self._handed.draws == self._loaded_at:  # else in that loop over other batches
            return ()
        state, self._owed = self._owed, None
        return self._given(self._first if "first" in state else state, read)


class CarriedBeside(CarriedByBatches, ToldAtEnd):
    """In a training loop, a number that nothing of the training depends on, as a sum of losses.

    Where a checkpoint lacks it, it stays as it is. So it does behind a loop whose body has run for nothing but its
    names (`rollback.train.pass_rehearsal`): a script may divide by a count of samples.
    """

    def begin_anew(self) -> None:
        self._owed = None

    def asked(self, read: Read, *, behind: bool = False) -> tuple[Any, ...]:
        if behind and self._handed.draws != self._loaded_at:  # else it is that loop over other batches
            self._owed = None
        return super().asked(read)

    def _told(self, read: Read) -> dict[str, Any]:
        match value := value_of(read):
            case bool() | int() | float() | np.number():
                return state_of(lambda: value)
            case Tensor() if value.numel() == 1:
                return state_of(lambda: value) or {MISSES: True}
            case Tensor() | np.ndarray() | [int() | float(), *_] | deque():
                return {MISSES: True}
        return {MISSES: True} if is_meter(value) else {}


class CarriedByEpochs(Carried):
    """In a loop over epochs: what it was at the top of the epoch, by the epoch's place in the loop."""

    _present: Mapping[str, Any] = MappingProxyType({})

    def state_dict(self) -> dict[str, Any]:
        return dict(self._present if self._owed is None else self._owed)

    def asked(self, read: Read, place: int) -> tuple[Any, ...]:
        """The same where an epoch's body begins. Of another epoch, the script has made it by itself since."""
        state, self._owed = self._owed, None
        if state is not None and state.get("place") == place:
            self._present = dict(state)
            return self._given(state, read)
        self._present = {**state_of(read), "place": place}
        return ()


class CarriedVariables:
    """Those of a watched script, and the counts of its turns. loops: its loops over epochs, by where they are. unkept:
    told of a variable that cannot be kept, and is needed, with its file and its value. missed: of one that is not
    needed, with its file, where it was not kept."""

    def __init__(
        self,
        handed: HandedOut,
        loops: Mapping[tuple[str, int] | None, EpochLoop],
        unkept: Callable[[LedVariable, str, Any], object],
        missed: Callable[[LedVariable, str], object],
    ) -> None:
        self._handed, self._loops, self._unkept, self._missed = handed, loops, unkept, missed
        self._model: nn.Module | None = None
        self._lost: set[tuple[str, str]] = set()
        self._counts: dict[tuple[str, str], StepCount] = {}
        self._known: dict[tuple[str, str], tuple[LedVariable, Carried]] = {}

    def add(self, name: str, filename: str, variable: LedVariable) -> None:
        """One of a file that is about to run."""
        of_batches = CarriedByBatches if variable.steers else CarriedBeside
        kind = of_batches if variable.by_batch else CarriedByEpochs
        attribute = variable.name.rpartition(".")[2] if "." in variable.name else ""
        self._known[filename, name] = variable, kind(self._handed, in_place=variable.in_place, attribute=attribute)

    def keep(self, guard: Guard, model: nn.Module, turns: Iterable[tuple[str, str]]) -> None:
        """The guard of a model is made: it keeps them from now on, and gives them what they were. turns: file and name
        of each count."""
        self._model = model
        self._counts = {place: StepCount() for place in turns}
        kept: dict[tuple[str, str], StepCount | Carried] = {
            place: carried for place, (_, carried) in self._known.items()
        }
        kept |= self._counts
        named: dict[str, StepCount | Carried] = {}
        for (filename, name), value in kept.items():
            text = f"{name} of {os.path.basename(filename)}"
            named[text if text not in named else f"{text} {len(named)}"] = value
        guard.keep(**named)

    def count_of(self, name: str, filename: str) -> StepCount | None:
        """None: there is no guard yet."""
        return self._counts.get((filename, name))

    def by_batch(self, read: Read, name: str, filename: str, behind: bool = False) -> tuple[Any, ...]:
        """What the script is given for a variable of a loop over batches, if anything. behind: where it asks there."""
        variable, carried = self._known[filename, name]
        assert isinstance(carried, CarriedByBatches)
        given = carried.asked(read, behind=behind)
        if carried.missed:
            carried.missed = False
            self._tell_missed(variable, filename, read)
        if variable.steers and self._handed.guard is not None and self._handed.begins_update:
            self._look(name, filename, read)
        return given

    def by_epoch(self, read: Read, name: str, filename: str, line: int) -> tuple[Any, ...]:
        """The same where an epoch's body begins, of a loop that begins at that line."""
        _, carried = self._known[filename, name]
        assert isinstance(carried, CarriedByEpochs)
        if (loop := self._loops.get((filename, line))) is None:
            return ()
        given = carried.asked(read, loop.place)
        if loop.place:
            self._look(name, filename, read)
        return given

    def _tell_missed(self, variable: LedVariable, filename: str, read: Read) -> None:
        value = value_of(read)
        if variable.steers:
            self._unkept(variable, filename, value)
        elif not self._is_models(value):
            self._missed(variable, filename)

    def _is_models(self, value: Any) -> bool:
        """Whether it is one of the model's tensors, which every checkpoint has."""
        model = self._model
        return model is not None and any(value is item for item in (*model.buffers(), *model.parameters()))

    def _look(self, name: str, filename: str, read: Read) -> None:
        """Tell of it once, if it is lost."""
        if (filename, name) in self._lost:
            return
        value = value_of(read)
        if is_lost(value, steers=(variable := self._known[filename, name][0]).steers):
            self._lost.add((filename, name))
            if not self._is_models(value):
                self._unkept(variable, filename, value)


def _is_missing(error: Exception, name: str) -> bool:
    """Whether an object is there that lacks this attribute alone."""
    return isinstance(error, AttributeError) and error.name == name and error.obj is not None
