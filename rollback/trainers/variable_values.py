"""What a variable of a script is, as plain data that a checkpoint has, and made of that again.

Plain are numbers, texts, small tensors and arrays of the host, and lists, tuples, sets and dicts of these. Other
objects keep their state by themselves, or are made anew; a few of them are lost, and are named.
"""

import marshal
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain, islice, repeat
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ReadVariable = Callable[[], Any]
"""Reads a variable of a script."""

_NUMBERS, _KEYS = frozenset((type(None), bool, int, float)), frozenset((str, int))
_SINGLE = _NUMBERS | {str}
_DICTS = dict, OrderedDict, defaultdict, Counter
_CONTAINERS = frozenset((*_DICTS, list, tuple, set, deque))
_MADE_BY = None, int, float, str, list, dict, set
_NAMED: dict[str | None, Any] = {kind and kind.__name__: kind for kind in _MADE_BY}
_TYPE, MISSES = "type of", "too much"
"""Keys of such data: what is to be made, and that a value could not be kept."""
ABSENT = Exception
"""What reading a variable raises that is not there, that a property makes, or that is an odd object."""
_MOST = 1000
"""Items that a value may have, and 16 letters are one: each step's end has a copy of it."""
_UNCHANGED = Number, Enum, frozenset, bytes
"""Values, which no object of a new process has by itself."""
_LOOKED_AT = 100
"""Items that are looked at, at each step, of what may have very many."""
_TELLS = frozenset(("avg", "average", "global_avg", "compute", "log_every"))
"""Names under which meters have their mean, or write it."""


def is_lost(value: Any, *, affects_training: bool) -> bool:
    """Whether a value is one that the script needs as it was, and that cannot be kept: weights that it has put
    aside, and what it trains by."""
    if type(value) in _SINGLE:
        return False
    try:
        if affects_training or (isinstance(value, dict) and _has_tensors(value)):
            _encoded(value, _Budget())
    except _Unkept as error:
        return isinstance(error, _Lost) or is_meter(value)
    except ABSENT:  # what has itself in it, or cannot be read
        return True
    return False


def _has_tensors(value: dict[Any, Any]) -> bool:
    return any(isinstance(item, Tensor) or (isinstance(item, dict) and _has_tensors(item)) for item in value.values())


def value_of(read: ReadVariable) -> Any:
    """None also where it is not there."""
    try:
        return read()
    except ABSENT:
        return None


def state_of(read: ReadVariable, *, of_graph: bool = False) -> dict[str, Any]:
    """A value as a checkpoint has it; empty where it cannot be kept, or is not there. of_graph: whether a tensor with a
    graph is its numbers, as where the graph has gone with the backward of its step."""
    try:
        return {"value": _encoded(read(), _Budget(of_graph=of_graph))}
    except ABSENT:
        return {}


def is_same(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states have one value, bit by bit: a NaN is a NaN."""
    return {"value"} <= state.keys() & other.keys() and marshal.dumps(state["value"], 2) == marshal.dumps(
        other["value"], 2
    )


@torch.no_grad()
def put(present: Any, value: Any) -> Any:
    """What the script has, with that content, also in its parts: it may have these objects elsewhere, too. Where that
    cannot be, the value."""
    match present, value:
        case dict(), dict():
            own = [present.get(key) for key in value]
            content = dict(zip(value, _put_each(own, [*value.values()]), strict=True))
            present.clear()
            present.update(content)
        case list(), list():
            present[:] = _put_each([*islice(chain(present, repeat(None)), len(value))], value)
        case set(), set():
            present.clear()
            present.update(value)
        case deque(), deque():
            present.clear()
            present.extend(value)
        case (Tensor(), Tensor()) | (np.ndarray(), np.ndarray()) if _is_like(present, value):
            try:
                present[...] = value
            except (RuntimeError, ValueError):  # as of one number in many places, by expand()
                return value
        case _:
            return value
    return present


def _put_each(parts: list[Any], values: list[Any]) -> list[Any]:
    """The same for parts. One that has several places now, and has had another content in each, is not filled:
    `hidden = [zeros] * 2`, of which each place is set by itself."""
    wanted: dict[int, set[bytes]] = {}
    for part, value in zip(parts, values, strict=True):
        wanted.setdefault(id(part), set()).add(marshal.dumps(_encoded(value, _Budget()), 2))
    return [put(part if len(wanted[id(part)]) == 1 else None, value) for part, value in zip(parts, values, strict=True)]


def _is_like(present: Any, value: Any) -> bool:
    return bool((present.shape, present.dtype) == (value.shape, value.dtype))


class _Unkept(Exception):
    """There is something else in it than numbers, texts, and what is made of these."""


class _Lost(_Unkept):
    """Nothing else brings it back: more of it than may be kept at each step, a tensor that is not in the host's memory,
    another number than those, or a namedtuple and the like, whose class is the script's."""


class _Budget:
    def __init__(self, *, of_graph: bool = False) -> None:
        self.of_graph = of_graph
        self._left = _MOST

    def spend(self, items: int) -> None:
        self._left -= items
        if self._left < 0:
            raise _Lost


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
        if {*map(type, value)} <= _NUMBERS:
            return kind(value)
        return kind([_encoded(item, budget) for item in value])
    if kind in (set, deque):
        values = [_encoded(item, budget) for item in value]
        return {_TYPE: kind.__name__, "most": getattr(value, "maxlen", None), "values": values}
    if kind is Tensor:
        budget.spend(value.numel())
        has_graph = value.requires_grad and not budget.of_graph
        if has_graph or value.device.type != "cpu" or value.layout is not torch.strided or value.is_complex():
            raise _Lost
        values = value.detach().flatten().tolist() if value.ndim else [value.item()]
        return {_TYPE: str(value.dtype), "shape": [*value.shape], "values": values}
    if kind is np.ndarray or isinstance(value, np.generic):
        budget.spend(value.size)
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:  # others are no numbers of Python's
            raise _Lost
        of = "array" if kind is np.ndarray else "number"
        return {_TYPE: of, "dtype": value.dtype.name, "shape": [*value.shape], "values": value.flatten().tolist()}
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    of_dataclass = getattr(kind, "__dataclass_params__", None)
    frozen = of_dataclass is not None and of_dataclass.frozen
    raise _Lost if named or frozen or isinstance(value, _UNCHANGED) else _Unkept


def decoded(value: Any) -> Any:
    match value:
        case {"type of": "array" | "number" as of, "dtype": dtype, "shape": shape, "values": values}:
            made = np.array(values, dtype=dtype).reshape(shape)
            return made if of == "array" else made[()]
        case {"type of": "set", "values": values}:
            return {*map(decoded, values)}
        case {"type of": "deque", "values": values, "most": most}:
            return deque(map(decoded, values), most)
        case {"type of": name, "items": items, "made by": made_by}:
            kind = next(kind for kind in _DICTS if kind.__name__ == name)
            found: Any = defaultdict(_NAMED[made_by]) if kind is defaultdict else kind()
            found.update({decoded(key): decoded(item) for key, item in dict(items).items()})
            return found
        case {"type of": dtype, "shape": shape, "values": values}:
            return torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
        case dict():
            return {key: decoded(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)([decoded(item) for item in value])
    return value


def is_history(value: Any) -> bool:
    """Whether it is a list that has numbers, also as pairs or dicts of them: `history.append((step, accuracy))`. Also a
    dict that has such a list."""
    match value:
        case dict():
            return any(isinstance(item, list | deque) and is_history(item) for item in _first_of(value.values()))
        case list() | deque():
            return bool(value) and _has_numbers(value[0])
    return False


def _has_numbers(value: Any, depth: int = 4) -> bool:
    match value:
        case int() | float() | np.number() | np.ndarray() | Tensor():
            return True
        case dict():
            return _has_numbers([*_first_of(value.values())], depth)
        case list() | tuple():
            return depth > 0 and any(_has_numbers(item, depth - 1) for item in _first_of(value))
    return False


def is_meter(value: Any) -> bool:
    """Whether it adds up what it is told of, as an `AverageMeter` or a metric of torchmetrics: what is in it has no
    name in the script, so nothing of it is put back. Also a list or a dict that has one, as {"train": {"loss": meter}}.
    Not what has a state to be kept by."""
    return any(map(_adds_up, _first_of(_parts(value))))


def _parts(value: Any, depth: int = 2) -> Iterator[Any]:
    """What lies in lists and dicts, so deep."""
    if depth and isinstance(value, dict | list | tuple):
        for item in _first_of(value.values() if isinstance(value, dict) else value):
            yield from _parts(item, depth - 1)
    else:
        yield value


def _adds_up(value: Any) -> bool:
    if type(value) in _SINGLE or isinstance(value, Tensor | np.ndarray):  # their names are many
        return False
    names = {*dir(value)}
    if "update" not in names or _TELLS.isdisjoint(names):
        return False
    return not (value.state_dict() if isinstance(value, nn.Module) else "load_state_dict" in names)


def _first_of(items: Iterable[Any]) -> Iterator[Any]:
    return islice(items, _LOOKED_AT)
