"""Samples in quarantine: each is replaced by a neighbour, the same one on every attempt."""

import operator
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

_SECONDS = 20.0  # for reading a batch once more, by a rank that is about to end


class Replacements:
    """Replaces a sample that is left out by the next one that is not. Depends on the position alone.

    listed: pairs of a batch and the samples that are left out from there on; of several that apply, the last one in the
    list is used alone. length: of the data set; its first sample follows its last one.

    in_order: the next one in the epoch's order, not in the data set. A sampler of which it is not known that it gives
    all samples may keep some of them for the validation, or in batches of another shape. So one that it has given
    itself is taken: from the same batch, else from those behind it. Only where the epoch has none left, it is the
    next one in the data set.
    """

    def __init__(self, listed: Sequence[tuple[int, Set[int]]], length: int, *, in_order: bool = False) -> None:
        self.listed = list(listed)
        self._length = length
        self._in_order = in_order

    def instead(self, indices: Any, batch: int, behind: Callable[[], Iterator[Any]] = lambda: iter(())) -> Any:
        """The indices of a batch, with a neighbour in place of each sample that is left out.

        behind: the indices of the batches behind it in its epoch, asked for only where the batch itself has none.
        """
        left_out = next((samples for first, samples in reversed(self.listed) if first <= batch), frozenset())
        if not left_out or len(left_out) >= self._length:
            return indices
        entries = indices if isinstance(indices, (list, tuple)) else [indices]
        others = [self._next_to(entries, number, left_out, behind) for number in range(len(entries))]
        return type(indices)(others) if entries is indices else others[0]

    def _next_to(
        self, entries: Sequence[Any], number: int, left_out: Set[int], behind: Callable[[], Iterator[Any]]
    ) -> Any:
        sample = _index_of(entries[number])
        if sample is None or sample not in left_out:
            return entries[number]
        if self._in_order:
            fit = (entry for entry in [*entries[number:], *entries[:number]] if _may_stand_in(entry, left_out))
            fit_behind = (
                entry
                for batch in behind()
                for entry in (batch if isinstance(batch, (list, tuple)) else [batch])
                if _may_stand_in(entry, left_out)
            )
            if (found := next(fit, None)) is not None or (found := next(fit_behind, None)) is not None:
                return found
        while sample in left_out:
            sample = (sample + 1) % self._length
        return sample


def _index_of(entry: Any) -> int | None:
    """None: no index, but what a sampler of the user's own gives."""
    try:
        return operator.index(entry)
    except TypeError:
        return None


def _may_stand_in(entry: Any, left_out: Set[int]) -> bool:
    return (sample := _index_of(entry)) is not None and sample not in left_out


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
