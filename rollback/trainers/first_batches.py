"""A DataLoader of which each epoch has its first batches only: for loops that leave the others unread.

A loop could leave its epochs early itself. But then the batches behind that would count, and skip windows fall on them.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader


def first_batches(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """`loader` where it has no more than `count` batches, else a copy that has so many. Everything else is shared."""
    if len(loader) <= count:
        return loader
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    shortened = copy.copy(loader)
    vars(shortened)[name] = ShortenedSampler(getattr(loader, name), count)  # a loader refuses to have it assigned
    return shortened


class ShortenedSampler:
    """The first `count` items of a sampler, which is asked for no more."""

    def __init__(self, sampler: Iterable[Any], count: int) -> None:
        self.sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, self._count)

    def __len__(self) -> int:
        return self._count
