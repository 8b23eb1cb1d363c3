"""Random generators of the script's own, as `rng = numpy.random.default_rng(0)`: found, and kept.

They are variables of the script and of what calls it, or what its own objects, lists and dicts hold. Those that the
loader has are the cursor's.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollback.train.data.cursor.generators import Generators, is_generator

_WORDS = 64  # a longer tuple of numbers is kept as bytes


class KeptGenerator:
    """A generator as an object with a state of plain values."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self._one = Generators(generator)
        self._packed: tuple[Any, dict[str, Any]] = None, {}
        self._first = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Asked for at every step, and mostly it is as before: many generators have drawn what there was to draw."""
        (state,) = self._one.states()
        before, packed = self._packed
        if not _are_same(state, before):
            self._packed = state, (packed := {"state": _packed(state)})
        return packed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._one.restore([_unpacked(state["state"])])

    def begin_anew(self) -> None:
        """As it was when this was made."""
        self.load_state_dict(self._first)


def generators_of_script(variables: Iterable[tuple[str, Any]], *others: Any) -> dict[str, Any]:
    """Those among its variables (`rollback.system.frames.own_variables`), by their names; of two with one name, the
    second one has a number. Without those that `others` have, as the loader."""
    of_others = Generators(*others)
    found: dict[str, Any] = {}

    def note(name: str, thing: Any) -> None:
        if is_generator(thing) and thing not in of_others and all(thing is not other for other in found.values()):
            places = (f"{name}{number or ''}" for number in range(len(found) + 1))
            found[next(place for place in places if place not in found)] = thing

    for name, thing in variables:
        note(name, thing)
    return found


def _are_same(state: Any, before: Any) -> bool:
    if isinstance(state, Tensor):
        return before is not None and state.equal(before)
    return isinstance(state, tuple) and bool(state == before)


def _packed(state: Any) -> Any:
    match state:
        case Tensor():
            return {"torch": state.numpy().tobytes().hex()}
        case np.ndarray():
            return {"dtype": state.dtype.str, "bytes": state.tobytes().hex()}
        case dict():
            return {name: _packed(value) for name, value in state.items()}
        case tuple() if len(state) > _WORDS:
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
