"""What a script's loops carry from turn to turn, made what it was where the training stands.

A temperature, a mean of losses, a patience: only the script can set its variables. So where a loop may have come to
another place in the data, by a resume or a rollback, the script asks for them (`rollback.source.steering`), and
checkpoints have them as values of the script.
"""

import marshal
import os
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollback.source.led_variables import LedVariable
from rollback.train.guard import Guard
from rollback.train.state.kept_values import ToldAtEnd
from rollback.trainers.adopt.counts import Count
from rollback.trainers.adopt.enumeration import HandedOut
from rollback.trainers.adopt.epochs import EpochLoop
from rollback.trainers.adopt.meters import is_meter

Read = Callable[[], Any]

_SINGLE, _KEYS = frozenset((type(None), bool, int, float, str)), frozenset((str, int))
_DICTS = dict, OrderedDict, defaultdict, Counter
_CONTAINERS = frozenset((*_DICTS, list, tuple, set, deque))
_MADE_BY = None, int, float, str, list, dict, set
_NAMED: dict[str | None, Any] = {kind and kind.__name__: kind for kind in _MADE_BY}
_TYPE, _MISSES = "type of", "too much"
_ABSENT = Exception
"""What reading a variable raises that is not there, or that a property makes."""
_MOST = 1000
"""Items that a value may have, and 16 letters are one: each step's end has a copy of it."""


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
        self.missed = self.missed or _MISSES in state
        if "value" not in state:
            return ()
        try:
            present = read()
        except _ABSENT as error:
            if self._attribute and not _is_missing(error, self._attribute):
                self.missed = True
                return ()
            return (_decoded(state["value"]),)
        if _is_same(self._told(read).get("value", _Unkept), state["value"]):  # it may be a buffer of a module, too
            return ()
        value = _decoded(state["value"])
        return () if self._in_place and _put(present, value) is present else (value,)

    def _told(self, read: Read) -> dict[str, Any]:
        return _state_of(read)


class CarriedByBatches(Carried):
    """In a training loop: what it is at each time."""

    def __init__(self, handed: HandedOut, *, in_place: bool = False, attribute: str = "") -> None:
        super().__init__(handed, in_place=in_place, attribute=attribute)
        self._read: Read | None = None
        self._first: dict[str, Any] = {}
        """As the script of this process had it first."""
        self._loaded_at = 0
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
        try:
            value = read()
        except _ABSENT:
            return {}
        match value:
            case bool() | int() | float() | np.number():
                return _state_of(lambda: value)
            case Tensor() if value.numel() == 1:
                return _state_of(lambda: value) or {_MISSES: True}
            case Tensor() | np.ndarray() | [int() | float(), *_] | deque():
                return {_MISSES: True}
        return {_MISSES: True} if is_meter(value) else {}


class CarriedByEpochs(Carried):
    """In a loop over epochs: what it was at the top of the epoch, by the epoch's place in the loop."""

    def __init__(self, handed: HandedOut, *, in_place: bool = False, attribute: str = "") -> None:
        super().__init__(handed, in_place=in_place, attribute=attribute)
        self._present: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._present if self._owed is None else self._owed)

    def asked(self, read: Read, place: int) -> tuple[Any, ...]:
        """The same where an epoch's body begins. Of another epoch, the script has made it by itself since."""
        state, self._owed = self._owed, None
        if state is not None and state.get("place") == place:
            self._present = dict(state)
            return self._given(state, read)
        self._present = {**_state_of(read), "place": place}
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
        self._counts: dict[tuple[str, str], Count] = {}
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
        try:
            value = read()
        except _ABSENT:
            value = None
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
        try:
            value = read()
        except _ABSENT:
            return
        if _is_lost(value, steers=(variable := self._known[filename, name][0]).steers):
            self._lost.add((filename, name))
            if not self._is_models(value):
                self._unkept(variable, filename, value)


def _is_lost(value: Any, *, steers: bool) -> bool:
    """Whether a value is one that the script needs as it was, and that is too much to be kept: weights that it has put
    aside, and numbers by which it trains. Other objects keep their state by themselves, or are made anew."""
    if type(value) in _SINGLE or not (steers or (isinstance(value, dict) and _has_tensors(value))):
        return False
    try:
        _encoded(value, _Budget())
    except _Unkept as error:
        return isinstance(error, _TooMuch) or is_meter(value)
    return False


def _has_tensors(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, Tensor) or (isinstance(item, dict) and _has_tensors(item)) for item in value.values())


def _state_of(read: Read) -> dict[str, Any]:
    """A value as a checkpoint has it; empty where it cannot be kept, or is not there."""
    try:
        return {"value": _encoded(read(), _Budget())}
    except _ABSENT:
        return {}


def _is_same(told: Any, other: Any) -> bool:
    """Bit by bit: a NaN is a NaN. told: _Unkept where nothing is."""
    return told is not _Unkept and marshal.dumps(told, 2) == marshal.dumps(other, 2)


def _is_missing(error: Exception, name: str) -> bool:
    """Whether an object is there that lacks this attribute alone."""
    return isinstance(error, AttributeError) and error.name == name and error.obj is not None


@torch.no_grad()
def _put(present: Any, value: Any) -> Any:
    """What the script has, with that content, also in its parts: it may have these objects elsewhere, too. Where that
    cannot be, the value."""
    match present, value:
        case dict(), dict():
            content = {key: _put(present.get(key), item) for key, item in value.items()}
            present.clear()
            present.update(content)
        case list(), list():
            present[:] = [_put(*pair) for pair in zip(chain(present, repeat(None)), value, strict=False)]
        case set(), set():
            present.clear()
            present.update(value)
        case deque(), deque():
            present.clear()
            present.extend(value)
        case Tensor(), Tensor() if (present.shape, present.dtype) == (value.shape, value.dtype):
            present.copy_(value)
        case np.ndarray(), np.ndarray() if (present.shape, present.dtype) == (value.shape, value.dtype):
            present[...] = value
        case _:
            return value
    return present


class _Unkept(Exception):
    """There is something else in it than numbers, texts, and what is made of these."""


class _TooMuch(_Unkept):
    """There is nothing else, but more than may be kept at each step, not in the host's memory, or a namedtuple."""


class _Budget:
    def __init__(self) -> None:
        self._left = _MOST

    def spend(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise _TooMuch


def _encoded(value: Any, budget: _Budget) -> Any:
    """In plain numbers, texts, lists, tuples and dicts. Raises _Unkept."""
    kind = type(value)
    if kind in _SINGLE:
        budget.spend(len(value) >> 4 if kind is str else 0)
        return value
    budget.spend(len(value) if kind in _CONTAINERS else 1)
    if kind in _DICTS and {*map(type, value)} <= _SINGLE | {tuple} and _TYPE not in value:
        pairs = [(_encoded(key, budget), _encoded(item, budget)) for key, item in value.items()]
        items = dict(pairs) if {*map(type, value)} <= _KEYS else pairs
        if kind is dict and items is not pairs:
            return items
        made_by = getattr(value, "default_factory", None)
        if made_by not in _MADE_BY:
            raise _Unkept
        return {_TYPE: kind.__name__, "made by": made_by and made_by.__name__, "items": items}
    if kind in (list, tuple):
        return kind([_encoded(item, budget) for item in value])
    if kind in (set, deque):
        values = [_encoded(item, budget) for item in value]
        return {_TYPE: kind.__name__, "most": getattr(value, "maxlen", None), "values": values}
    if kind is Tensor:
        budget.spend(value.numel())
        if value.requires_grad or value.device.type != "cpu" or value.layout is not torch.strided:
            raise _TooMuch
        if value.is_complex():
            raise _Unkept
        return {_TYPE: str(value.dtype), "shape": [*value.shape], "values": value.flatten().tolist()}
    if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biuf":
        budget.spend(value.size)
        of = "array" if kind is np.ndarray else "number"
        return {_TYPE: of, "dtype": value.dtype.name, "shape": [*value.shape], "values": value.flatten().tolist()}
    fields = isinstance(value, tuple) or (is_dataclass(value) and kind.__dataclass_params__.frozen)
    raise _TooMuch if fields else _Unkept  # a class of the script's, whose values are made anew


def _decoded(value: Any) -> Any:
    match value:
        case {"type of": "array" | "number" as of, "dtype": dtype, "shape": shape, "values": values}:
            made = np.array(values, dtype=dtype).reshape(shape)
            return made if of == "array" else made[()]
        case {"type of": "set", "values": values}:
            return {*map(_decoded, values)}
        case {"type of": "deque", "values": values, "most": most}:
            return deque(map(_decoded, values), most)
        case {"type of": name, "items": items, "made by": made_by}:
            kind = next(kind for kind in _DICTS if kind.__name__ == name)
            found: Any = defaultdict(_NAMED[made_by]) if kind is defaultdict else kind()
            found.update({_decoded(key): _decoded(item) for key, item in dict(items).items()})
            return found
        case {"type of": dtype, "shape": shape, "values": values}:
            return torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        case dict():
            return {key: _decoded(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([_decoded(item) for item in value])
    return value
