"""`DataLoader`s over `IterableDataset`s, wrappers around loaders, lists, generators, callables."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from zoo.kinds import APART, COUNT, EXACT, FEWER, IDS, REFUSED, RESUMED, SIZE, STEPS, Fed, Samples, X, kind, rows
from zoo.mapstyle import DATA, shared

# DataLoaders of iterable data sets ------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __init__(self, numbers: range = range(COUNT)) -> None:
        self.numbers: Any = numbers

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return ((X[i], i) for i in self.numbers)


class Shards(Stream):
    """Each worker reads its own share, as the documentation has it."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        return ((X[i], i) for i in self.numbers[first::every])


@kind("iterable")
def _(again: bool) -> Any:
    return DataLoader(Stream(), batch_size=SIZE)


@kind("iterable, batch_size=None", trials=FEWER)
def _(again: bool) -> Any:
    class Batches(Stream):
        def __iter__(self) -> Iterator[Any]:
            return (rows(range(at, at + SIZE)) for at in range(0, COUNT, SIZE))

    return DataLoader(Batches(), batch_size=None)


@kind("iterable, last batch short, length known")
def _(again: bool) -> Any:
    class Sized(Stream):
        def __len__(self) -> int:
            return len(self.numbers)

    return DataLoader(Sized(range(COUNT - 2)), batch_size=SIZE)


@kind("ChainDataset", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(ChainDataset([Stream(range(26)), Stream(range(60, 70))]), batch_size=SIZE)


@kind("iterable shared out to workers", trials=("alone", *RESUMED))
def _(again: bool) -> Any:
    return DataLoader(Shards(), batch_size=SIZE, num_workers=2)


@kind("iterable, persistent workers", trials=("alone", "retried"), alone=IDS)
def _(again: bool) -> Any:
    return DataLoader(Shards(), batch_size=SIZE, num_workers=1, persistent_workers=True)


@kind("iterable, other number of workers at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(Shards(), batch_size=SIZE, num_workers=1 if again else 2)


@kind("iterable, other batch size at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(Stream(), batch_size=3 if again else SIZE)


@kind("iterable that begins at another place at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(Stream(range(2, COUNT + 2) if again else range(COUNT)), batch_size=SIZE)


@kind("iterable told the epoch")
def _(again: bool) -> Any:
    class Aged(Stream):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            order = np.random.default_rng(self.epoch).permutation(COUNT).tolist()
            return ((X[i], i) for i in order)

    data = Aged()
    return Fed(DataLoader(data, batch_size=SIZE), at_epoch=data.set_epoch)


@kind("iterable that counts its own epochs", REFUSED)
def _(again: bool) -> Any:
    class Counting(Stream):
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            self.passes += 1
            order = np.random.default_rng(self.passes).permutation(COUNT).tolist()
            return ((X[i], i) for i in order)

    return DataLoader(Counting(), batch_size=SIZE)


@kind("iterable that goes on where it was", REFUSED)
def _(again: bool) -> Any:
    class GoesOn(Stream):
        at = 0

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            for _ in range(COUNT):
                self.at = (self.at + 1) % (COUNT + 7)
                yield X[self.at], self.at

    return DataLoader(GoesOn(), batch_size=SIZE)


@kind("iterable with own generator")
def _(again: bool) -> Any:
    class OwnOrder(Stream):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            return ((X[i], i) for i in self.rng.permutation(COUNT).tolist())

    return DataLoader(OwnOrder(), batch_size=SIZE)


class Buffered(Stream):
    """A shuffle buffer that draws from the global random states while it is read."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        held = list(range(10))
        for i in range(10, COUNT + 10):
            place = random.randrange(len(held))
            yield X[held[place]], held[place]
            held[place] = i


@kind("iterable with a shuffle buffer", alone=APART)
def _(again: bool) -> Any:
    return DataLoader(Buffered(), batch_size=SIZE)


# Wrappers and subclasses ----------------------------------------------------------------------------------------------


class Wrapper:
    """`for b in loader: yield b.to(device)`."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for x, ids in self.loader:
            yield x.to("cpu"), ids


@kind("wrapper over DistributedSampler", alone=IDS)
def _(again: bool) -> Any:
    sampler = shared()
    loader = DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=sampler)
    return Fed(Wrapper(loader), at_epoch=sampler.set_epoch)


@kind("wrapper over DistributedSampler, plain range loop", alone=IDS)
def _(again: bool) -> Any:
    sampler = shared()
    loader = DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=sampler)
    return Fed(Wrapper(loader), at_epoch=sampler.set_epoch, counted=True)


@kind("wrapper over shuffle, no length", alone=APART)
def _(again: bool) -> Any:
    class Unsized:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            yield from self.loader

    return Unsized(DataLoader(DATA, batch_size=SIZE, shuffle=True))


@kind("wrapper that counts its own epochs", REFUSED)
def _(again: bool) -> Any:
    class Counting(Wrapper):
        def __init__(self) -> None:
            self.sampler = shared()
            super().__init__(DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=self.sampler))
            self.passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.sampler.set_epoch(self.passes)
            self.passes += 1
            yield from self.loader

    return Counting()


class Moving(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, ids in super().__iter__():
            yield x.to("cpu"), ids


@kind("DataLoader subclass with its own __iter__", alone=IDS)
def _(again: bool) -> Any:
    sampler = shared()
    return Fed(Moving(Samples(2 * COUNT), batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch)


@kind("DataLoader subclass with its own __iter__, workers, nothing seeded", seeded=False, trials=("stopped",))
def _(again: bool) -> Any:
    return Moving(DATA, batch_size=SIZE, shuffle=True, num_workers=1)


@kind("two loaders side by side", alone=APART)
def _(again: bool) -> Any:
    class Both:
        def __init__(self) -> None:
            self.one = DataLoader(Samples(COUNT // 2), batch_size=2, shuffle=True)
            self.other = DataLoader(Samples(2 * COUNT), batch_size=2, shuffle=True)

        def __iter__(self) -> Iterator[Any]:
            for (x, ids), (more, others) in zip(self.one, self.other, strict=False):
                yield torch.cat([x, more]), torch.cat([ids, others])

    return Both()


@kind("endless: yield next(self.iterator)", REFUSED)
def _(again: bool) -> Any:
    class Endless:
        def __init__(self) -> None:
            self.loader = DataLoader(DATA, batch_size=SIZE, shuffle=True)
            self.iterator = iter(self.loader)

        def __iter__(self) -> Iterator[Any]:
            while True:
                try:
                    yield next(self.iterator)
                except StopIteration:
                    self.iterator = iter(self.loader)

    return Fed(Endless(), steps=STEPS)


@kind("endless: yield from loader, over and over", alone=APART)
def _(again: bool) -> Any:
    class Forever:
        def __init__(self) -> None:
            self.loader = DataLoader(DATA, batch_size=SIZE, shuffle=True)

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from self.loader

    return Fed(Forever(), steps=STEPS)


@kind("endless: generator of a loader", REFUSED)
def _(again: bool) -> Any:
    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    return Fed(cycle(DataLoader(DATA, batch_size=SIZE, shuffle=True)), steps=STEPS)


@kind("a loader's iterator", REFUSED)
def _(again: bool) -> Any:
    return Fed(iter(DataLoader(Samples(STEPS * SIZE + 8), batch_size=SIZE)), steps=STEPS)


# Lists, generators, callables -----------------------------------------------------------------------------------------


def batches_in_order() -> list[Any]:
    return [rows(range(at, at + SIZE)) for at in range(0, COUNT, SIZE)]


@kind("list")
def _(again: bool) -> Any:
    return batches_in_order()


@kind("list, in another order at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return batches_in_order()[::-1] if again else batches_in_order()


@kind("list, shuffled by the script each epoch", REFUSED, alone=EXACT)
def _(again: bool) -> Any:
    batches = batches_in_order()
    return Fed(batches, at_epoch=lambda _: random.shuffle(batches))


@kind("list, nothing seeded", seeded=False, stopped=REFUSED, killed=REFUSED)
def _(again: bool) -> Any:
    order = torch.randperm(2 * COUNT)[:COUNT]
    return [rows(order[at : at + SIZE]) for at in range(0, COUNT, SIZE)]


@kind("generator that walks through data", REFUSED)
def _(again: bool) -> Any:
    return Fed((rows(range(at, at + SIZE)) for at in range(0, 3 * COUNT, SIZE)), steps=STEPS)


def get_batch(size: int = SIZE) -> Any:
    """nanoGPT's."""
    return rows(torch.randint(COUNT, (size,)))


@kind("callable", alone=APART)
def _(again: bool) -> Any:
    return Fed(get_batch, steps=STEPS)


@kind("callable, nothing seeded", seeded=False, trials=FEWER, alone=APART)
def _(again: bool) -> Any:
    return Fed(get_batch, steps=STEPS)


@kind("generator that draws for ever", alone=APART)
def _(again: bool) -> Any:
    def draw() -> Iterator[Any]:
        while True:
            yield get_batch()

    return Fed(draw(), steps=STEPS)


@kind("callable, other batch size at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return Fed(lambda: get_batch(2 if again else SIZE), steps=STEPS)


@kind("callable, other data at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return Fed(lambda: rows(torch.randint(COUNT, (SIZE,)) + 5 * again), steps=STEPS)


@kind("callable with own numpy generator", REFUSED)
def _(again: bool) -> Any:
    rng = np.random.default_rng(0)
    return Fed(lambda: rows(rng.integers(COUNT, size=SIZE).tolist()), steps=STEPS)


@kind("callable with own torch generator", REFUSED)
def _(again: bool) -> Any:
    own = torch.Generator().manual_seed(0)
    return Fed(lambda: rows(torch.randint(COUNT, (SIZE,), generator=own)), steps=STEPS)


@kind("callable that counts, and draws", REFUSED, alone=APART)
def _(again: bool) -> Any:
    """The counter moves on every third call only, so that two calls do not show it."""
    calls = itertools.count()
    return Fed(lambda: rows(torch.randint(COUNT, (SIZE,)) + next(calls) // 3 % 50), steps=STEPS)


class Opaque:
    """A batch that gives its tensors to whoever asks, and shows none."""

    __slots__ = ("_rows",)

    def __init__(self, ids: list[int]) -> None:
        self._rows = rows(ids)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._rows


@kind("opaque objects from a generator that walks", REFUSED)
def _(again: bool) -> Any:
    walk = (Opaque(list(range(at, at + SIZE))) for at in range(0, 3 * COUNT, SIZE))
    return Fed(walk, steps=STEPS, read=Opaque.tensors)


@kind("opaque objects from a callable", alone=APART)
def _(again: bool) -> Any:
    return Fed(lambda: Opaque(torch.randint(COUNT, (SIZE,)).tolist()), steps=STEPS, read=Opaque.tensors)


class Bag:
    """A batch as an object with attributes, such as torch_geometric's or transformers' BatchEncoding."""

    def __init__(self, ids: list[int]) -> None:
        self.x, self.ids = rows(ids)


@kind("objects with tensors from a callable", alone=APART)
def _(again: bool) -> Any:
    return Fed(lambda: Bag(torch.randint(COUNT, (SIZE,)).tolist()), steps=STEPS, read=lambda bag: (bag.x, bag.ids))


@kind("objects with tensors from a generator that walks", REFUSED)
def _(again: bool) -> Any:
    walk = (Bag(list(range(at, at + SIZE))) for at in range(0, 3 * COUNT, SIZE))
    return Fed(walk, steps=STEPS, read=lambda bag: (bag.x, bag.ids))


@kind("opaque objects from a loader", trials=FEWER)
def _(again: bool) -> Any:
    """Sought by index: the indices tell what the batch is."""
    loader = DataLoader(DATA, batch_size=SIZE, shuffle=True, collate_fn=lambda all_: Opaque([i for _, i in all_]))
    return Fed(loader, read=Opaque.tensors)
