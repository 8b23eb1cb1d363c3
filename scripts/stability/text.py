"""The text that the runs are trained on: what every Python has on its disk.

Code is the standard library's own source, as in `stdlib_text`. Prose is the language reference that `help()` shows
(`pydoc_data.topics`): the same bytes and another language, for the data shift that is healthy. Both are the same on all
machines with the same version of Python.
"""

from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics

import numpy as np

from stdlib_text import StdlibText

CONTEXT = 32  # bytes that a prediction sees at most
SAMPLES = 12  # in a batch
HELD_OUT = 256  # samples for validation


@dataclass
class Batches:
    """All batches of a run in the order in which they are handed out; troubles of the data change them."""

    inputs: np.ndarray
    """(batches, SAMPLES, CONTEXT), bytes."""
    targets: np.ndarray
    """The same shape: the byte after each of `inputs`."""
    weights: np.ndarray
    """(batches, SAMPLES), of each sample's loss."""

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.inputs[index].astype(np.int64), self.targets[index].astype(np.int64), self.weights[index]


def batches(count: int, seed: int) -> Batches:
    """Clean batches of code, in an order that the seed decides."""
    chosen = np.random.default_rng(seed).permutation(len(code()))[: count * SAMPLES]
    return batches_of(code()[chosen])


def batches_of(windows: np.ndarray) -> Batches:
    """windows: (samples, CONTEXT + 1), a whole number of batches."""
    shaped = windows.reshape(-1, SAMPLES, CONTEXT + 1)
    weights = np.ones(shaped.shape[:2], dtype=np.float32)
    return Batches(shaped[..., :-1].copy(), shaped[..., 1:].copy(), weights)


@cache
def code(*, held_out: bool = False) -> np.ndarray:
    """Windows of source code, (samples, CONTEXT + 1)."""
    rows = StdlibText(held_out=held_out).windows
    each = rows.shape[1] // (CONTEXT + 1)
    windows = rows[:, : each * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    return windows[:HELD_OUT] if held_out else windows


@cache
def prose(*, held_out: bool = False) -> np.ndarray:
    """Windows of prose, (samples, CONTEXT + 1), in a fixed order; the first ones are held out."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    count = len(text) // (CONTEXT + 1)
    windows = np.frombuffer(text[: count * (CONTEXT + 1)], dtype=np.uint8).reshape(count, CONTEXT + 1)
    windows = windows[np.random.default_rng(0).permutation(count)]
    return windows[:HELD_OUT] if held_out else windows[HELD_OUT:]
