"""The random states as bytes: what `rng.capture` has as a tree, read in microseconds at every step's end.

Making Python's and NumPy's states into objects takes ten times as long as all the rest. Both lie in memory as 624 words
of the Mersenne twister and the number of the next one, and are read from there. That they lie there is proved before it
is believed: see `_python_reader`.
"""

import ctypes
import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollback.train.data.rng import numpy_state

_WORDS = 624
_TWISTER = 4 * (_WORDS + 1)
"""Bytes of a Mersenne twister: its words, and the number of the next one. Python has that number first."""
_TORCH = ctypes.c_char * torch.default_generator.get_state().nbytes
"""Read so, it takes half as long as by NumPy, of which nothing is in a cache behind a step."""


class RawRandom:
    """Reads the random states of this process. `read` returns numbers for JSON and bytes; `tree_of` turns both into
    what `rng.capture` would have returned at that moment. Call `forget` behind each `rng.restore`. Raises UsageError as
    `rng.cpu_states` does."""

    def __init__(self) -> None:
        self._python = _python_reader()
        self._source: object = None
        self._numpy: tuple[bytes, list[Any]] = b"", []

    def read(self) -> tuple[dict[str, Any], list[bytes]]:
        """Numbers, and the words of torch, Python, NumPy (where it is imported) and the GPUs (where they are used).

        The state of a GPU's generator is kept by the host, so nobody waits for the GPU.
        """
        state = torch.default_generator.get_state()
        told: dict[str, Any] = {"gauss_next": random._inst.gauss_next}  # type: ignore[attr-defined]
        parts = [_TORCH.from_address(state.data_ptr()).raw, self._python()]
        if numpy := sys.modules.get("numpy"):
            if (source := numpy.random.get_bit_generator()) is not self._source:
                numpy_state()  # raises where there is another kind of generator, in whose place there is less memory
                self._source, self._words = source, _twister_at(source.ctypes.state_address)
            words = self._words.raw
            before, rest = self._numpy
            if words != before or not rest or rest[1]:  # without a number in hand only a draw makes one, or a restore
                rest = _rest_of(numpy)
                self._numpy = words, rest
            told["numpy"] = rest
            parts.append(words)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            on_gpus = [generator.get_state() for generator in torch.cuda.default_generators]
            told["cuda"], told["device"] = len(on_gpus), torch.cuda.current_device()
            parts += [state.numpy().tobytes() for state in on_gpus]
        return told, parts

    def forget(self) -> None:
        """The states were restored."""
        self._numpy = b"", []


def _rest_of(numpy: Any) -> list[Any]:
    """What NumPy's state has beside the words: a number in hand, drawn and not given out yet, or none."""
    state = numpy.random.get_state(legacy=False)
    return [str(state["bit_generator"]), int(state["has_gauss"]), float(state["gauss"])]


def tree_of(told: dict[str, Any], parts: list[bytes]) -> dict[str, Any]:
    """The states as `rng.capture` returns them."""
    tree: dict[str, Any] = {
        "python": {"version": 3, "words": _int64(parts[1][4:] + parts[1][:4]), "gauss_next": told["gauss_next"]},
        "numpy": None,
        "torch": _uint8(parts[0]),
        "cuda": [_uint8(state) for state in parts[len(parts) - told.get("cuda", 0) :]],
    }
    if "device" in told:
        tree["device"] = told["device"]
    if (rest := told.get("numpy")) is not None:
        algorithm, has_gauss, gauss = rest
        words = _int64(parts[2])
        tree["numpy"] = {
            "algorithm": algorithm, "words": words[:_WORDS].clone(), "position": int(words[_WORDS]),
            "has_gauss": has_gauss, "gauss": gauss,
        }  # fmt: skip
    return tree


def _uint8(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _int64(words: bytes) -> Tensor:
    return torch.frombuffer(array("q", array("I", words)), dtype=torch.int64)


def _twister_at(address: int) -> "ctypes.Array[ctypes.c_char]":
    """A Mersenne twister's memory: whoever keeps this keeps what owns it."""
    return (ctypes.c_char * _TWISTER).from_address(address)


def _python_reader() -> Callable[[], bytes]:
    """Reads Python's words, the number of the next one first: from memory, if they are found to be there."""
    from_memory = partial(bytes, _twister_at(id(random._inst) + object.__basicsize__))

    def by_asking() -> bytes:
        *words, following = random.getstate()[1]
        return array("I", [following, *words]).tobytes()

    there = type(random._inst) is random.Random and type(random._inst).__mro__[1].__basicsize__ >= _TWISTER
    return from_memory if there and from_memory() == by_asking() else by_asking
