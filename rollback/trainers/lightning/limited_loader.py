"""A DataLoader of which each epoch has its first batches only: for loops that leave the others unread.

A loop could leave its epochs early itself. But then the batches behind that would count, and skip windows fall on them.

A loop that counts its batches does not ask for one behind the last either, not even to be told that there is none. So
a sampler that says too small a length has no more batches, and one that draws or counts at its end does not get there:
`DataLoader(shuffle=True, generator=...)` draws a permutation there, on which the next epoch depends.
"""

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rollback.train.data.cursor.description import samplers_of

_AS_LONG_AS_THEY_SAY = frozenset(
    (BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
)
"""By exact type: a subclass may do anything."""


def limited_loader(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """`loader` where it makes no difference to an epoch that nobody asks behind `count` batches, else a copy that has
    so many. Everything else is shared."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    if len(loader) <= count and all(map(_ends_plainly, samplers_of(getattr(loader, name)))):
        return loader
    shortened = copy.copy(loader)
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    # A loader refuses to have it assigned.
    vars(shortened)[name] = ShortenedSampler(getattr(loader, name), min(count, len(loader)), ahead)
    return shortened


def _ends_plainly(sampler: Any) -> bool:
    kind = type(sampler)
    return kind in _AS_LONG_AS_THEY_SAY and not (kind is RandomSampler and sampler.generator is not None)


class ShortenedSampler(Sampler[Any]):
    """The first `count` items of a sampler, which is asked for `ahead` more, as by a loader for its workers."""

    def __init__(self, sampler: Iterable[Any], count: int, ahead: int) -> None:
        self.sampler = sampler
        self._count = count
        self._ahead = ahead

    def __iter__(self) -> Iterator[Any]:
        items = iter(self.sampler)
        yield from islice(items, self._count)
        for _ in range(self._ahead):
            next(items, None)

    def __len__(self) -> int:
        return self._count
