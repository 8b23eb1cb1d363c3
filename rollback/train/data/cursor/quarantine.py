"""Samples in quarantine: each is replaced by a neighbour, the same one on every attempt."""

import operator
import time
from collections.abc import Sequence, Set
from typing import Any

_SECONDS = 20.0  # for reading a batch once more, by a rank that is about to end


class Neighbours:
    """Replaces a sample that is left out by the next one that is not. Depends on the position alone.

    listed: pairs of a batch and the samples that are left out from there on; of several that apply, the last one in the
    list is used alone. length: of the data set; its first sample follows its last one.
    """

    def __init__(self, listed: Sequence[tuple[int, Set[int]]], length: int) -> None:
        self.listed = list(listed)
        self._length = length

    def instead(self, indices: Any, batch: int) -> Any:
        """The indices of a batch, with a neighbour in place of each sample that is left out."""
        if not self.listed:
            return indices
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
    """Those of the samples that raise when read one by one."""
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
