"""Samples that are left out of batches: an innocent neighbour takes the place of each, the same on every attempt."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence, Set
from typing import Any

_SECONDS = 20.0  # for reading a batch once more, by a rank that is about to end


class Neighbours:
    """Puts the next sample that is not left out in the place of one that is. A function of the position alone.

    listed: from which batch on which samples are left out, and no others; where two hold, the later one in the list
    does. length: of the data set, whose first sample follows its last.
    """

    def __init__(self, listed: Sequence[tuple[int, Set[int]]], length: int) -> None:
        self.listed = list(listed)
        self._length = length

    def instead(self, indices: Any, batch: int) -> Any:
        """The indices of a batch with neighbours in the place of samples that are left out of it."""
        left_out = next((samples for first, samples in reversed(self.listed) if first <= batch), frozenset())
        if not left_out or len(left_out) >= self._length:
            return indices
        if isinstance(indices, (list, tuple)):
            return type(indices)(self._instead_of(entry, left_out) for entry in indices)
        return self._instead_of(indices, left_out)

    def _instead_of(self, entry: Any, left_out: Set[int]) -> Any:
        try:
            sample = operator.index(entry)
        except TypeError:
            return entry  # no index: what a sampler of the user's own gives
        if sample not in left_out:
            return entry
        while sample in left_out:
            sample = (sample + 1) % self._length
        return sample


def unreadable(dataset: Any, samples: Sequence[int]) -> list[int]:
    """Those of the samples that raise when they are read singly."""
    read_many, found = getattr(dataset, "__getitems__", None), []
    until = time.monotonic() + _SECONDS
    for sample in samples:
        if time.monotonic() > until:
            break
        try:
            read_many([sample]) if read_many else dataset[sample]
        except Exception:  # noqa: BLE001 - the user's code, which has just raised
            found.append(sample)
    return found
