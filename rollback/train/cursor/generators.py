"""The random generators that a sampler keeps for itself: found among its attributes, read and put back."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class Generators:
    """Those of torch, NumPy and Python that `owners` hold as attributes, each once, in an order that does not change.

    Those of the whole process are not among them: they are kept with the random states.
    """

    def __init__(self, owners: Iterable[Any]) -> None:
        self._found: list[Any] = []
        for owner in owners:
            held = {**getattr(owner, "__dict__", {}), "generator": getattr(owner, "generator", None)}
            for _, thing in sorted(held.items()):
                if _is_generator(thing) and all(thing is not known for known in self._found):
                    self._found.append(thing)

    def __len__(self) -> int:
        return len(self._found)

    def states(self) -> list[Any]:
        """Trees that a checkpoint can hold."""
        return [_state(generator) for generator in self._found]

    def restore(self, states: list[Any]) -> None:
        for generator, state in zip(self._found, states, strict=True):
            _restore(generator, state)


def _is_generator(thing: Any) -> bool:
    of_process = thing is torch.default_generator or thing is getattr(np.random.mtrand, "_rand", None)
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
        case torch.Generator():
            generator.set_state(state)
        case np.random.Generator():
            generator.bit_generator.state = state
        case np.random.RandomState():
            generator.set_state(state)
        case _:
            generator.setstate(state)
