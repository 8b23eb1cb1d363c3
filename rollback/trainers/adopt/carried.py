"""What a script's loops carry from turn to turn, made what it was where the training stands.

A temperature, a mean of losses, a patience: only the script can set its variables. So where a loop may have come to
another place in the data, by a resume or a rollback, the script asks for them (`rollback.source.steering`), and
checkpoints have them as values of the script.
"""

import os
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollback.source.led_variables import LedVariable
from rollback.train.guard import Guard
from rollback.trainers.adopt.counts import Count
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import EpochLoop

Read = Callable[[], Any]

_SINGLE, _KEYS = frozenset((type(None), bool, int, float, str)), frozenset((str, int))
_TYPE = "type of"
_ABSENT = NameError, AttributeError
"""What reading a variable raises that is not there."""
_MOST = 1000
"""Items that a list, an array or a tensor may have: each step's end has a copy of it."""


class Carried(ABC):
    """A variable on one rank, as its script has it. handed: what the script is given of the guard."""

    def __init__(self, handed: HandedOut) -> None:
        self._handed = handed
        self._owed: Mapping[str, Any] | None = None
        """The state that the script is to have, and may not have yet."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it is; empty: nobody can tell."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._owed = state

    def begin_anew(self) -> None:
        """A checkpoint does not have it."""
        self._owed = None


class CarriedByBatches(Carried):
    """In a training loop: what it is at each time."""

    def __init__(self, handed: HandedOut) -> None:
        super().__init__(handed)
        self._read: Read | None = None
        self._first: dict[str, Any] = {}
        """As the script of this process had it first."""
        self._loaded_at = 0
        """How many times the script had asked for a batch."""

    def state_dict(self) -> dict[str, Any]:
        if self._owed is not None:
            return dict(self._owed)
        return {"first": True} if self._read is None else _state_of(self._read)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded_at = self._handed.draws

    def begin_anew(self) -> None:
        self.load_state_dict({"first": True})

    def asked(self, read: Read) -> Any:
        """What the script is to have, where it asks in its loop over batches. Raises what `read` raises."""
        if self._read is None:
            self._first = _state_of(read)
        self._read = read
        if self._owed is None or self._handed.draws == self._loaded_at:  # else in that loop over other batches
            return read()
        state, self._owed = self._owed, None
        return _value_in(self._first if "first" in state else state, read)


class CarriedByEpochs(Carried):
    """In a loop over epochs: what it was at the top of the epoch, by the epoch's place in the loop."""

    def __init__(self, handed: HandedOut) -> None:
        super().__init__(handed)
        self._present: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._present if self._owed is None else self._owed)

    def asked(self, read: Read, place: int) -> Any:
        """The same where an epoch's body begins. Of another epoch, the script has made it by itself since."""
        state, self._owed = self._owed, None
        if state is not None and state.get("place") == place:
            self._present = dict(state)
            return _value_in(state, read)
        self._present = {**_state_of(read), "place": place}
        return read()


class CarriedVariables:
    """Those of a watched script, and the counts of its turns. loops: its loops over epochs, by where they are. unkept:
    told of a variable that cannot be kept, and is needed, with its file and its value."""

    def __init__(
        self,
        handed: HandedOut,
        loops: Mapping[tuple[str, int] | None, EpochLoop],
        unkept: Callable[[LedVariable, str, Any], object],
    ) -> None:
        self._handed, self._loops, self._unkept = handed, loops, unkept
        self._counts: dict[tuple[str, str], Count] = {}
        self._known: dict[tuple[str, str], tuple[LedVariable, Carried]] = {}

    def add(self, name: str, filename: str, variable: LedVariable) -> None:
        """One of a file that is about to run."""
        kind = CarriedByBatches if variable.by_batch else CarriedByEpochs
        self._known[filename, name] = variable, kind(self._handed)

    def keep(self, guard: Guard, turns: Iterable[tuple[str, str]]) -> None:
        """The guard is made: it keeps them from now on, and gives them what they were. turns: file and name of each
        count."""
        self._counts = {place: Count() for place in turns}
        kept: dict[tuple[str, str], Count | Carried] = {place: carried for place, (_, carried) in self._known.items()}
        kept |= self._counts
        named: dict[str, Count | Carried] = {}
        for (filename, name), value in kept.items():
            text = f"{name} of {os.path.basename(filename)}"
            named[text if text not in named else f"{text} {len(named)}"] = value
        guard.keep(**named)

    def count_of(self, name: str, filename: str) -> Count | None:
        """None: there is no guard yet."""
        return self._counts.get((filename, name))

    def by_batch(self, read: Read, name: str, filename: str) -> Any:
        """What the script gives a variable of a loop over batches. Raises what `read` raises: it may not be there."""
        variable, carried = self._known[filename, name]
        assert isinstance(carried, CarriedByBatches)
        value = carried.asked(read)
        if self._handed.guard is not None and _is_lost(value, steers=variable.steers):
            self._unkept(variable, filename, value)
        return value

    def by_epoch(self, read: Read, name: str, filename: str, line: int) -> Any:
        """The same where an epoch's body begins, of a loop that begins at that line."""
        variable, carried = self._known[filename, name]
        assert isinstance(carried, CarriedByEpochs)
        if (loop := self._loops.get((filename, line))) is None:
            return read()
        place = loop.place
        value = carried.asked(read, place)
        if place and _is_lost(value, steers=variable.steers):
            self._unkept(variable, filename, value)
        return value


def _is_lost(value: Any, *, steers: bool) -> bool:
    """Whether a value is one that the script needs as it was, and that is too much to be kept: weights that it has put
    aside, and numbers by which it trains. Other objects keep their state by themselves, or are made anew."""
    if type(value) in _SINGLE or not (steers or (isinstance(value, dict) and _has_tensors(value))):
        return False
    try:
        _encoded(value, _Budget())
    except _TooMuch:
        return True
    except _Unkept:
        return False
    return False


def _has_tensors(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, Tensor) or (isinstance(item, dict) and _has_tensors(item)) for item in value.values())


def _state_of(read: Read) -> dict[str, Any]:
    """A value as a checkpoint has it; empty where it cannot be kept, or is not there."""
    try:
        return {"value": _encoded(read(), _Budget())}
    except (*_ABSENT, _Unkept):
        return {}


def _value_in(state: Mapping[str, Any], read: Read) -> Any:
    """The value that a state tells of; what the script has, where it tells of none. A list or a tensor stays the one
    that the script has: it may have it elsewhere, too."""
    if "value" not in state:
        return read()
    value = _decoded(state["value"])
    try:
        present = read()
    except _ABSENT:
        return value
    match present, value:
        case (dict(), dict()) | (set(), set()):
            present.clear()
            present.update(value)
            return present
        case (list() | deque(), list()):
            present.clear()
            present.extend(value)
            return present
        case Tensor(), Tensor() if (present.shape, present.dtype) == (value.shape, value.dtype):
            return present.copy_(value)
    return value


class _Unkept(Exception):
    """There is something else in it than numbers, texts, and what is made of these."""


class _TooMuch(_Unkept):
    """There is nothing else, but more of it than may be kept at each step, or not in the host's memory."""


class _Budget:
    def __init__(self) -> None:
        self._left = _MOST

    def spend(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise _TooMuch


def _encoded(value: Any, budget: _Budget) -> Any:
    """In plain numbers, texts, lists, tuples and dicts. Raises _Unkept."""
    budget.spend(1)
    kind = type(value)
    if kind in _SINGLE:
        return value
    if kind in (dict, OrderedDict, defaultdict) and {*map(type, value)} <= _KEYS and _TYPE not in value:
        return {key: _encoded(item, budget) for key, item in value.items()}
    if kind in (list, tuple, deque):
        made = [_encoded(item, budget) for item in value]
        return tuple(made) if kind is tuple else made
    if kind is set:
        return {_TYPE: "set", "values": [_encoded(item, budget) for item in value]}
    if kind is Tensor:
        budget.spend(value.numel())
        if value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided:
            raise _TooMuch
        return {_TYPE: str(value.dtype), "shape": [*value.shape], "values": value.flatten().tolist()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        budget.spend(value.size)
        of = "array" if isinstance(value, np.ndarray) else "number"
        return {_TYPE: of, "dtype": value.dtype.name, "shape": [*value.shape], "values": value.flatten().tolist()}
    raise _Unkept


def _decoded(value: Any) -> Any:
    match value:
        case {"type of": "array" | "number" as of, "dtype": dtype, "shape": shape, "values": values}:
            made = np.array(values, dtype=dtype).reshape(shape)
            return made if of == "array" else made[()]
        case {"type of": "set", "values": values}:
            return {*map(_decoded, values)}
        case {"type of": dtype, "shape": shape, "values": values}:
            return torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([_decoded(item) for item in value])
    return value
