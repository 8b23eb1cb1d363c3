"""Finds, saves, restores and seeds the random generators that loaders, samplers, data sets and collators hold, and
those of the script's own."""

import copy
import random
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from operator import is_
from types import MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEPTH = 4  # a data set in a subset, its transforms, one of these
_DEEPEST = 16  # of a pipeline, whose parts each hold the one before them
_MOST = 128  # things that hold anything but data, and items of a list
_DATA = frozenset((
    type(None), bool, int, float, complex, str, bytes, dict, Tensor, np.ndarray, np.int32, np.int64, np.float32,
    np.float64,
))  # fmt: skip
_KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
_LISTS = frozenset((list, tuple))
_SMALL = _DATA - {Tensor, np.ndarray, dict}
_MOST_WORDS = 64  # a longer tuple of numbers is kept as bytes
_LONG = 16  # a longer list of data is looked through once, and a longer dict is data
_SAMPLES: dict[int, tuple[int, type, type]] = {}
"""Long lists of data by their ids, as they were when they were looked through: length, types of the first and the last
item. A data set may have all its samples in one, and it is looked into for every batch."""


class Generators:
    """Generators of torch, NumPy and Python among the attributes of `owners` and of their parts: each once, in order.

    The global generators of the process are not among them: `rng` keeps those.
    """

    def __init__(self, *owners: Any, depth: int = _DEPTH) -> None:
        self._owners = owners
        self._found: list[Any] = []
        self._before: dict[int, list[Any]] = {}
        """Those that earlier searches have found, by their number."""
        self._objects: list[tuple[Callable[[], Any], int]] = []
        """That were looked into, each with its number of attributes, without keeping them alive: a data set may have
        let go of one that it opens again."""
        self._alive: list[Any] = []
        """Methods and partial functions that were looked into: nothing else gets the id of one that lives."""
        self._containers: list[tuple[list[Any] | tuple[Any, ...] | dict[Any, Any], int]] = []
        """Lists, tuples and dicts that were looked into, each with its length. Not those of nothing but data that may
        be large: a data set may let go of what it has read before it reads more."""
        seen: set[int] = set()
        waiting = [(owner, depth) for owner in owners]
        while waiting and len(seen) < _MOST:
            thing, left = waiting.pop(0)
            if is_generator(thing):
                self._found += [thing] if all(thing is not known for known in self._found) else []
            elif left and _may_hold(thing) and id(thing) not in seen and (held := self._look_into(thing)):
                seen.add(id(thing))
                waiting += [(item, left - 1) for item in held]
        self._marks = self._present_marks()

    def _look_into(self, thing: Any) -> list[Any]:
        """What it holds that may be a generator, or hold one."""
        if isinstance(thing, MethodType):
            self._alive.append(thing)
            return [thing.__self__]
        if isinstance(thing, partial):
            self._alive.append(thing)
            return [thing.func, *thing.args, *thing.keywords.values()]
        if isinstance(thing, (list, tuple, dict)):
            items = [*thing.values()] if isinstance(thing, dict) else _first_of(thing)
            data = not isinstance(thing, dict) and len(thing) > _LONG and _has_data_only(thing)
        else:
            by_name, data = vars(thing), False
            self._objects.append((_weakly(thing), len(by_name)))
            items = [by_name[name] for name in sorted(by_name)]
        found = [] if data else [item for item in items if type(item) not in _DATA or type(item) in (dict, *_LISTS)]
        if isinstance(thing, (list, tuple, dict)) and (found or _SMALL.issuperset(map(type, items))):
            self._containers.append((thing, len(thing)))
        return found

    def present(self, *owners: Any) -> "Generators":
        """Those of `owners` now: itself where these and all that was looked into hold what they held then, else what a
        new search finds.

        A data set may make its generators when it is first read. It is asked several times in a step."""
        marks = self._present_marks() if all(map(is_, owners, self._owners)) else None
        if marks is not None and marks == self._marks:
            return self
        found = Generators(*owners)
        found._before = {**self._before, len(self): self._found}
        return found

    def _present_marks(self) -> tuple[list[int], list[type]] | None:
        """Ids and types of what all that was looked into holds now; None: one is gone, or holds more or less by now.

        Others tell of another value: what may hold a generator, or is one, is known while it lives."""
        values: list[Any] = []
        for known, count in self._objects:
            if (thing := known()) is None or len(by_name := vars(thing)) != count:
                return None
            values += by_name.values()
        for held, count in self._containers:
            if len(held) != count:
                return None
            values += held.values() if isinstance(held, dict) else _first_of(held)
        return [*map(id, values)], [*map(type, values)]

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, generator: Any) -> bool:
        return any(generator is known for known in self._found)

    def states(self) -> list[Any]:
        """A state for each generator, as a tree that a checkpoint can hold."""
        return [*map(_state, self._found)]

    def restore(self, states: list[Any]) -> bool:
        """Restores what `states` returned; in a process in which further ones have been made since, of those that were
        there then. False: there were never so many, and nothing was done; the caller answers for that
        (`Cursor._require_as_many`)."""
        found = self._found if len(states) == len(self) else self._before.get(len(states))
        if found is None:
            return False
        for generator, state in zip(found, states, strict=True):
            _restore(generator, state)
        return True

    def drawn_since(self, states: list[Any]) -> list[bool]:
        """Of each, whether it is in another state than in these."""
        return [not _are_same(now, before) for now, before in zip(self.states(), states, strict=True)]

    def begin_anew(self) -> None:
        """As each of them was when it was made. That is known of torch's alone."""
        for generator in self._found:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(generator.initial_seed())

    def seed(self, key: str) -> None:
        """Seeds each generator as a pure function of `key`."""
        for number, generator in enumerate(self._found):
            _seed(generator, random.Random(f"{key}/{number}").getrandbits(63))


def _weakly(thing: Any) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # it has slots, and none for this
        return lambda: thing


def _may_hold(thing: Any) -> bool:
    if type(thing) is dict:
        return len(thing) <= _LONG
    kind: Any = type(thing)
    return not _is_data(kind) and (isinstance(thing, (list, tuple)) or hasattr(thing, "__dict__"))


@lru_cache(maxsize=1024)
def _is_data(kind: type) -> bool:
    """Or has no generator, and much to look into: a tokenizer, as most collators of text have one."""
    of_data = (Tensor, np.ndarray, type, ModuleType, str, bytes, Mapping)
    return issubclass(kind, of_data) or hasattr(kind, "convert_tokens_to_ids")


def _has_data_only(items: list[Any] | tuple[Any, ...], depth: int = 0) -> bool:
    """Whether there is nothing in a list, or in lists in it, that could have a generator."""
    held = _first_of(items)
    known = (len(items), type(held[0]), type(held[-1])) if len(items) > _LONG else None
    if known is not None and _SAMPLES.get(id(items)) == known:
        return True
    kinds = {*map(type, held)}
    found = kinds <= _DATA or (
        kinds <= _DATA | _LISTS
        and depth < _DEPTH
        and all(_has_data_only(item, depth + 1) for item in held if type(item) in _LISTS)
    )
    if found and known is not None:
        if len(_SAMPLES) >= _MOST * _MOST:
            _SAMPLES.clear()
        _SAMPLES[id(items)] = known
    return found


def _first_of(items: Any) -> list[Any]:
    """Of a list or tuple. A data set that is one reads samples in a `__getitem__` of its own."""
    return [*(tuple if isinstance(items, tuple) else list).__getitem__(items, slice(_MOST))]


def is_generator(thing: Any) -> bool:
    """Whether it is a random generator that has a state, and none of the process's own."""
    kind = type(thing)
    if not issubclass(kind, _KINDS) or issubclass(kind, random.SystemRandom):
        return False
    of_process = thing is torch.default_generator or thing is getattr(np.random.mtrand, "_rand", None)
    return not of_process and thing is not getattr(random, "_inst", None)


def _state(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return copy.deepcopy(generator.bit_generator.state)
        case np.random.RandomState():
            return generator.get_state(legacy=False)
        case _:
            return generator.getstate()


def _restore(generator: Any, state: Any) -> None:
    match generator:
        case torch.Generator() | np.random.RandomState():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case _:
            generator.setstate(state)


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case torch.Generator():
            generator.manual_seed(seed)
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)


class KeptGenerator:
    """A generator of the script's own, as `rng = numpy.random.default_rng(0)`, as an object with a state of plain
    values."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._packed: tuple[Any, dict[str, Any]] = None, {}
        self._first = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Asked for at every step, and mostly it is as before: many generators have drawn what there was to draw."""
        state = _state(self.generator)
        before, packed = self._packed
        if not _are_same(state, before):
            self._packed = state, (packed := {"state": _packed(state)})
        return packed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _restore(self.generator, _unpacked(state["state"]))

    def begin_anew(self) -> None:
        """As it was when this was made."""
        self.load_state_dict(self._first)


def generators_of_script(variables: Iterable[tuple[str, Any]], *others: Any) -> dict[str, Any]:
    """Those among its variables (`rollback.train.introspection.own_variables`), by their names; of two with one name,
    the second one has a number. Without those that `others` have, as the loader."""
    of_others = Generators(*others)
    found: dict[str, Any] = {}
    for name, thing in variables:
        if is_generator(thing) and thing not in of_others and all(thing is not other for other in found.values()):
            places = (f"{name}{number or ''}" for number in range(len(found) + 1))
            found[next(place for place in places if place not in found)] = thing
    return found


def generators_beside(
    modules: Mapping[str, nn.Module], objects: Mapping[str, object], loader: Any, variables: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """Those that are attributes of modules or optimizers, or variables of the script, by name. Those that the loader
    has are the cursor's."""
    parts: list[tuple[str, Any]] = [
        (f"{owner}.{prefix}" if prefix else owner, part)
        for owner, module in modules.items() for prefix, part in module.named_modules()
    ]  # fmt: skip
    parts += [(name, item) for name, item in objects.items() if isinstance(item, Optimizer)]
    found = {  # what else an attribute refers to may be the loader's, which is kept
        f"{name}.{attribute}": value
        for name, part in parts for attribute, value in vars(part).items() if is_generator(value)
    }  # fmt: skip
    return found | generators_of_script(variables, loader, *found.values())


def outside_of(loader: Any, generators: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are nowhere in a loader with a state of its own, however deep: what is in there is for that state."""
    inside = Generators(loader, depth=_DEEPEST)
    return {name: generator for name, generator in generators.items() if generator not in inside}


def _are_same(state: Any, before: Any) -> bool:
    match state:
        case Tensor():
            return before is not None and state.equal(before)
        case np.ndarray():
            return np.array_equal(state, before)
        case dict():
            return before is not None and all(_are_same(value, before[name]) for name, value in state.items())
        case _:
            return bool(state == before)


def _packed(state: Any) -> Any:
    match state:
        case Tensor():
            return {"torch": state.numpy().tobytes().hex()}
        case np.ndarray():
            return {"dtype": state.dtype.str, "bytes": state.tobytes().hex()}
        case dict():
            return {name: _packed(value) for name, value in state.items()}
        case tuple() if len(state) > _MOST_WORDS:
            return {"words": array("I", state).tobytes().hex()}
        case tuple():
            return tuple(_packed(value) for value in state)
    return state


def _unpacked(packed: Any) -> Any:
    match packed:
        case {"torch": text}:
            return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        case {"dtype": kind, "bytes": text}:
            return np.frombuffer(bytes.fromhex(text), dtype=kind)
        case {"words": text}:
            return tuple(array("I", bytes.fromhex(text)))
        case dict():
            return {name: _unpacked(value) for name, value in packed.items()}
        case tuple():
            return tuple(map(_unpacked, packed))
    return packed
