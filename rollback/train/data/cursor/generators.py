"""Finds, saves, restores and seeds the random generators that loaders, samplers and data sets hold."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_DEPTH = 4  # a data set in a subset, its transforms, one of these
_MOST = 128  # objects looked into


class Generators:
    """Generators of torch, NumPy and Python among the attributes of `owners` and of their parts: each once, in order.

    The global generators of the process are not among them: `rng` keeps those.
    """

    def __init__(self, *owners: Any) -> None:
        self._found: list[Any] = []
        seen: list[Any] = []
        waiting = [(owner, 0) for owner in owners]
        while waiting and len(seen) < _MOST:
            thing, depth = waiting.pop(0)
            if _is_generator(thing):
                self._found += [thing] if all(thing is not known for known in self._found) else []
            elif _may_hold(thing) and all(thing is not known for known in seen):
                seen.append(thing)
                waiting += [(held, depth + 1) for held in _attributes(thing)] if depth < _DEPTH else []

    def __len__(self) -> int:
        return len(self._found)

    def states(self) -> list[Any]:
        """A state for each generator, as a tree that a checkpoint can hold."""
        return [_state(generator) for generator in self._found]

    def restore(self, states: list[Any]) -> None:
        """Restores what `states` returned. Does nothing if the number of generators has changed."""
        if len(states) == len(self._found):
            for generator, state in zip(self._found, states, strict=True):
                _restore(generator, state)

    def seed(self, key: str) -> None:
        """Seeds each generator as a pure function of `key`."""
        for number, generator in enumerate(self._found):
            _seed(generator, random.Random(f"{key}/{number}").getrandbits(63))


def _may_hold(thing: Any) -> bool:
    return not isinstance(thing, (torch.Tensor, np.ndarray, type, str, bytes, Mapping)) and (
        hasattr(thing, "__dict__") or isinstance(thing, (list, tuple))
    )


def _attributes(thing: Any) -> list[Any]:
    if isinstance(thing, (list, tuple)):
        held = list(thing[:_MOST])
    else:
        held = [value for _, value in sorted(vars(thing).items())]
    return [value for value in held if _is_generator(value) or _may_hold(value)]


def _is_generator(thing: Any) -> bool:
    of_process = thing is torch.default_generator or thing is getattr(np.random.mtrand, "_rand", None)
    of_process = of_process or thing is getattr(random, "_inst", None)
    return not of_process and isinstance(
        thing, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    )


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
