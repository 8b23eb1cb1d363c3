"""The order of an epoch's batches, as indices.

An order gives one batch of indices after another and can be moved forward without reading data. For torch's own
samplers the whole epoch is a range or a permutation, and a batch is a slice of it: any offset is reached at once. All
other samplers are run, which costs Python time for each index but reads no data.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from rollback.errors import UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.description import samplers_of


def order_of(index_sampler: Iterable[Any], lookahead: int) -> "BatchOrder":
    """The order of `index_sampler`: a loader's batch sampler or, without batching, its sampler.

    lookahead: number of batches that the loader asks its sampler for before it returns the first one.
    """
    batching, sampler = _taken_apart(index_sampler)
    samples = _SAMPLES.get(type(sampler))
    if samples is not None and (ordered := samples(sampler)) is not None:
        return _Sliced(*ordered, batching)
    return _Iterated(index_sampler, lookahead)


def share_of(index_sampler: Any) -> list[int | None] | None:
    """Which of an epoch's samples this rank reads: its rank, the number of ranks and the batch size.

    None if the sampler is not torch's own DistributedSampler, which shares one order among the ranks in turn.
    """
    batching, sampler = _taken_apart(index_sampler)
    if type(sampler) is not DistributedSampler:
        return None
    return [sampler.rank, sampler.num_replicas, batching.batch_size if batching is not None else None]


def order_of_share(index_sampler: Any, share: list[int | None] | None) -> "BatchOrder | None":
    """The order of another rank, of another number of ranks, over the same samples; None if that is not known."""
    batching, sampler = _taken_apart(index_sampler)
    if type(sampler) is not DistributedSampler or share is None:
        return None
    rank, ranks, batch_size = share
    other: Any = DistributedSampler(
        sampler.dataset, ranks, rank, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
    )
    other.set_epoch(sampler.epoch)
    if batching is not None:
        other = BatchSampler(other, batch_size or 1, batching.drop_last)
    return order_of(other, 1)


class OneSize:
    """The batch size of torch's own batch sampler in one epoch. A script may change it from epoch to epoch."""

    def __init__(self, index_sampler: Any) -> None:
        self.now: Callable[[], int | None] = partial(getattr, _taken_apart(index_sampler)[0], "batch_size", None)
        self.at_opening = self.now()

    def changed(self) -> UsageError:
        """Without a guard the next batch would heed it."""
        return UsageError(
            f"batch_size of the loader's batch sampler was changed from {self.at_opening} to {self.now()} in the midst "
            "of an epoch: the guard counts all batches of an epoch in one size, so that it can go back to each",
            hint="change it between two epochs, in front of the loop over the batches",
        )


def gives_all(index_sampler: Any, length: int) -> bool:
    """Whether it is one of torch's own samplers, over a data set of so many samples: it may give each of them."""
    _, sampler = _taken_apart(index_sampler)
    if type(sampler) not in _SAMPLES:
        return False
    source: Any = sampler.dataset if type(sampler) is DistributedSampler else sampler.data_source
    return len(source) == length


def _taken_apart(index_sampler: Any) -> tuple[BatchSampler | None, Any]:
    if type(index_sampler) is BatchSampler:
        return index_sampler, index_sampler.sampler
    return None, index_sampler


class _Sliced:
    """Batches are slices of a range, or of a permutation that is held as 8 bytes for each sample."""

    exact: ClassVar[bool] = True

    def __init__(
        self, draw: "Callable[[], _Indices]", at_exhaustion: Callable[[], object] | None, batching: BatchSampler | None
    ) -> None:
        self._draw = draw
        self._at_exhaustion = at_exhaustion
        self._batched = batching is not None
        self._size = batching.batch_size if batching is not None else 1
        self._drop_last = batching is not None and batching.drop_last
        self._samples: range | memoryview = range(0)
        self._position = 0

    def begin(self) -> None:
        drawn = self._draw()
        # A slice by torch takes four times as long where nothing of it is in a cache, as behind a step.
        self._samples = drawn if isinstance(drawn, range) else drawn.cpu().numpy().data

    def take(self) -> Any:
        start, end = self._position, self._position + self._size
        length = len(self._samples)
        if end > length:
            self._exhaust()
        if start >= length or (self._drop_last and end > length):
            raise StopIteration
        self._position = end
        indices = [*self._samples[start:end]]
        return indices if self._batched else indices[0]

    def seek(self, offset: int) -> None:
        self._position = offset * self._size

    def _exhaust(self) -> None:
        """Called when the sampler is asked for more than it has. Some samplers then draw once more."""
        if self._at_exhaustion is not None:
            self._at_exhaustion()
            self._at_exhaustion = None


class _Iterated:
    """Batches of indices from the sampler itself.

    At the epoch's opening it draws from the random states of the process, as in an unguarded run. Later it draws from a
    stream that is split off at the opening. Otherwise the order would depend on what the model draws in between, and
    the indices of a batch would not be known before it is reached. A sampler that is known to draw nothing more from
    these states is just asked: to swap them costs as much as all else that is done for a batch.
    """

    exact: ClassVar[bool] = False

    def __init__(self, index_sampler: Iterable[Any], lookahead: int) -> None:
        self._iterator: Iterator[Any] = iter(index_sampler)
        self._lookahead = lookahead
        self._ahead: list[Any] = []
        self._stream: rng.RandomStream | None = None
        self._draws_later = not all(map(_draws_at_its_beginning, samplers_of(index_sampler)))

    def begin(self) -> None:
        for _ in range(self._lookahead):
            try:
                self._ahead.append(self._draw())
            except StopIteration:
                break
        self._ahead.reverse()
        self._stream = rng.RandomStream.split_off()

    def take(self) -> Any:
        if self._ahead:
            return self._ahead.pop()
        if not self._draws_later:
            return self._draw()
        assert self._stream is not None
        with self._stream:
            return self._draw()

    def _draw(self) -> Any:
        """Returns a copy: some samplers fill and return the same list each time."""
        return copy.copy(next(self._iterator))

    def seek(self, offset: int) -> None:
        for _ in range(min(offset, len(self._ahead))):
            self._ahead.pop()
            offset -= 1
        assert self._stream is not None
        with self._stream:
            for _ in range(offset):
                next(self._iterator, None)


BatchOrder = _Sliced | _Iterated
"""One epoch's batches of indices. It must be made and begun under the random states of the epoch's opening.

exact: whether the order is known to follow from these states; of torch's own samplers only. begin: draws what the
sampler draws when its first index is asked for. take: the indices of the next batch (without batching: the next index);
StopIteration at the end. seek: moves so many full batches forward, directly after `begin`.
"""

_DRAW_AT_THEIR_BEGINNING = frozenset(
    f"{module}.{name}" for module, names in (
        ("torch.utils.data.sampler", ("BatchSampler", "RandomSampler", "SequentialSampler")),
        ("accelerate.data_loader", ("BatchSamplerShard", "SeedableRandomSampler")),
    ) for name in names
)  # fmt: skip
"""Samplers that draw from the random states of the process for their first index only. By exact type, as below."""


def _draws_at_its_beginning(sampler: Any) -> bool:
    kind = type(sampler)
    known = f"{kind.__module__}.{kind.__qualname__}" in _DRAW_AT_THEIR_BEGINNING
    return known and getattr(sampler, "generator", None) is not torch.default_generator


_Indices = range | torch.Tensor
_Samples = tuple[Callable[[], _Indices], Callable[[], object] | None]
"""Draws the epoch's samples; is called when the sampler is asked for more than it has."""


def _sequential(sampler: SequentialSampler) -> _Samples:
    return (lambda: range(len(sampler.data_source))), None


def _random(sampler: RandomSampler) -> _Samples | None:
    length = len(sampler.data_source)
    if sampler.replacement or length == 0 or sampler.num_samples != length:
        return None
    if (generator := sampler.generator) is not None:
        # At its end the sampler draws one more permutation, of which it uses nothing: the next epoch depends on it.
        again = partial(torch.randperm, length, generator=generator)
        return again, again

    def draw() -> torch.Tensor:
        own = torch.Generator()
        own.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return torch.randperm(length, generator=own)

    return draw, None


def _distributed(sampler: DistributedSampler[Any]) -> _Samples | None:
    length = len(sampler.dataset)  # type: ignore[arg-type]
    if length == 0 or (sampler.drop_last and sampler.total_size > length):
        return None
    every = range(sampler.rank, sampler.total_size, sampler.num_replicas)
    if not sampler.shuffle and sampler.total_size <= length:
        return (lambda: every), None

    def draw() -> torch.Tensor:
        # Padding begins again at the first sample, as often as it takes: position i is sample i modulo the length.
        mine = torch.arange(every.start, every.stop, every.step) % length
        if not sampler.shuffle:
            return mine
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        return torch.randperm(length, generator=generator)[mine]

    return draw, None


_SAMPLES: dict[type, Callable[[Any], _Samples | None]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    DistributedSampler: _distributed,
}
"""Keyed by exact type: a subclass may do anything."""
