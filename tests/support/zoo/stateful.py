"""torchdata's loaders and nodes, and hand-written loaders with a state of their own."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from zoo.iterable import Shards, Stream
from zoo.kinds import BATCHES, COUNT, EXACT, FEWER, REFUSED, RESUMED, SIZE, Fed, Samples, X, kind, rows
from zoo.mapstyle import DATA, Augmented, seeded

# StatefulDataLoader ---------------------------------------------------------------------------------------------------


@kind("StatefulDataLoader", trials=FEWER)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE)


@kind("StatefulDataLoader, shuffle")
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True)


@kind("StatefulDataLoader, shuffle, nothing seeded", seeded=False, trials=FEWER)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True)


@kind("StatefulDataLoader, shuffle, own generator")
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True, generator=seeded())


@kind("StatefulDataLoader, workers", trials=FEWER)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2)


@kind("StatefulDataLoader, persistent workers, snapshot_every_n_steps=3", trials=(*RESUMED, "retried"))
def _(again: bool) -> Any:
    return StatefulDataLoader(
        DATA, batch_size=SIZE, shuffle=True, num_workers=2, persistent_workers=True, snapshot_every_n_steps=3
    )


@kind("StatefulDataLoader, augmented in process")
def _(again: bool) -> Any:
    return StatefulDataLoader(Augmented(), batch_size=SIZE, shuffle=True)


@kind("StatefulDataLoader, augmented in workers", trials=("stopped", "retried"))
def _(again: bool) -> Any:
    """torchdata does not keep the workers' random states."""
    return StatefulDataLoader(Augmented(), batch_size=SIZE, shuffle=True, num_workers=1)


@kind("StatefulDataLoader, other number of workers at resume", trials=RESUMED)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=1 if again else 2)


@kind("StatefulDataLoader, workers instead of none at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2 if again else 0)


@kind("StatefulDataLoader, other batch size at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return StatefulDataLoader(DATA, batch_size=2 if again else SIZE, shuffle=True)


@kind("StatefulDataLoader, samples moved between attempts", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    order = [(i + 5) % COUNT for i in range(COUNT)] if again else list(range(COUNT))
    return StatefulDataLoader([(X[i], i) for i in order], batch_size=SIZE)


@kind("StatefulDataLoader, StatefulDistributedSampler")
def _(again: bool) -> Any:
    data = Samples(2 * COUNT)
    sampler = StatefulDistributedSampler(data, num_replicas=2, rank=0)
    return Fed(StatefulDataLoader(data, batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch)


@kind("StatefulDataLoader, iterable without state", trials=FEWER)
def _(again: bool) -> Any:
    return StatefulDataLoader(Stream(), batch_size=SIZE)


@kind("StatefulDataLoader, iterable shared out to workers", trials=("alone", "stopped"))
def _(again: bool) -> Any:
    return StatefulDataLoader(Shards(), batch_size=SIZE, num_workers=2)


class Remembering(IterableDataset[Any]):
    """Keeps its position, and begins anew when it has come to the end, as torchdata's documentation has it."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        mine = range(first, COUNT, every)
        while self.at < len(mine):
            number = mine[self.at]
            self.at += 1
            yield X[number], number
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@kind("StatefulDataLoader, stateful iterable")
def _(again: bool) -> Any:
    return StatefulDataLoader(Remembering(), batch_size=SIZE)


@kind("StatefulDataLoader, stateful iterable in workers", trials=("stopped", "retried"))
def _(again: bool) -> Any:
    return StatefulDataLoader(Remembering(), batch_size=SIZE, num_workers=2)


@kind("StatefulDataLoader, stateful iterable in workers, snapshot_every_n_steps=4", trials=("stopped", "retried"))
def _(again: bool) -> Any:
    return StatefulDataLoader(Remembering(), batch_size=SIZE, num_workers=2, snapshot_every_n_steps=4)


class Resumable(Sampler[int]):
    """Keeps its position, as torchdata's documentation has it."""

    at = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        while self.at < COUNT:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@kind("StatefulDataLoader, stateful sampler, augmented in workers", REFUSED, trials=("alone",))
def _(again: bool) -> Any:
    return StatefulDataLoader(
        Augmented(), batch_size=SIZE, sampler=Resumable(), num_workers=2, snapshot_every_n_steps=3
    )


@kind("StatefulDataLoader, iterable that counts its own epochs", REFUSED)
def _(again: bool) -> Any:
    class Counting(Stream):
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, int]]:
            self.passes += 1
            order = np.random.default_rng(self.passes).permutation(COUNT).tolist()
            return ((X[i], i) for i in order)

    return StatefulDataLoader(Counting(), batch_size=SIZE)


# torchdata.nodes ------------------------------------------------------------------------------------------------------


def pipeline(sampler: Any) -> Any:
    node: Any = nodes.MapStyleWrapper(DATA, sampler)
    return nodes.Mapper(nodes.Batcher(node, SIZE), default_collate)


@kind("nodes")
def _(again: bool) -> Any:
    return nodes.Loader(pipeline(SequentialSampler(DATA)))


@kind("nodes, shuffle")
def _(again: bool) -> Any:
    return nodes.Loader(pipeline(RandomSampler(DATA)))


@kind("nodes, shuffle, own generator")
def _(again: bool) -> Any:
    """torchdata moves along the sampler anew, with whatever its generator holds by then: we put that back first."""
    return nodes.Loader(pipeline(RandomSampler(DATA, generator=seeded())))


@kind("nodes, restart_on_stop_iteration=False")
def _(again: bool) -> Any:
    return nodes.Loader(pipeline(RandomSampler(DATA)), restart_on_stop_iteration=False)


@kind("nodes, threads and prefetching")
def _(again: bool) -> Any:
    node: Any = nodes.SamplerWrapper(RandomSampler(DATA))
    node = nodes.ParallelMapper(node, DATA.__getitem__, num_workers=2, method="thread")
    node = nodes.Mapper(nodes.Batcher(node, SIZE), default_collate)
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=3))


@kind("nodes, processes that draw", REFUSED, trials=("alone",))
def _(again: bool) -> Any:
    node: Any = nodes.SamplerWrapper(SequentialSampler(DATA))
    node = nodes.ParallelMapper(node, Augmented().__getitem__, num_workers=1, method="process")
    return nodes.Loader(nodes.Mapper(nodes.Batcher(node, SIZE), default_collate))


@kind("nodes, MultiNodeWeightedSampler")
def _(again: bool) -> Any:
    parts = {
        name: nodes.MapStyleWrapper(_Part(first), SequentialSampler(range(COUNT)))
        for name, first in (("one", 0), ("other", COUNT))
    }
    mixed = nodes.MultiNodeWeightedSampler(parts, {"one": 0.7, "other": 0.3}, seed=3)
    return nodes.Loader(nodes.Mapper(nodes.Batcher(mixed, SIZE), default_collate))


class _Part(Samples):
    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        return X[self.first + index], self.first + index


# Hand-written ---------------------------------------------------------------------------------------------------------


class Reader:
    """Keeps its position; its `__iter__` goes on from there, and from the beginning after the end."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < BATCHES:
            self.at += 1
            yield rows(range((self.at - 1) * SIZE, self.at * SIZE))
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@kind("hand-written, with state", trials=FEWER)
def _(again: bool) -> Any:
    return Reader()


@kind("hand-written, __next__ on itself")
def _(again: bool) -> Any:
    class Itself(Reader):
        def __iter__(self) -> Any:
            if self.at == BATCHES:
                self.at = 0
            return self

        def __next__(self) -> Any:
            if self.at == BATCHES:
                raise StopIteration
            self.at += 1
            return rows(range((self.at - 1) * SIZE, self.at * SIZE))

    return Itself()


@kind("hand-written, begins anew when a finished state is loaded")
def _(again: bool) -> Any:
    class Resetting(Reader):
        start = 0

        def __iter__(self) -> Iterator[Any]:
            start, self.start = self.start, 0
            for self.at in range(start + 1, BATCHES + 1):
                yield rows(range((self.at - 1) * SIZE, self.at * SIZE))

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.start = self.at = state["at"] % BATCHES

    return Resetting()


@kind("hand-written, order of the epoch in its state")
def _(again: bool) -> Any:
    class Ordered(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)
            self.order: list[int] = []

        def __iter__(self) -> Iterator[Any]:
            if self.at == 0:
                self.order = self.rng.permutation(COUNT).tolist()
            while self.at < BATCHES:
                self.at += 1
                yield rows(self.order[(self.at - 1) * SIZE : self.at * SIZE])
            self.at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "order": self.order, "rng": json.dumps(self.rng.bit_generator.state)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at, self.order = state["at"], state["order"]
            self.rng.bit_generator.state = json.loads(state["rng"])

    return Ordered()


@kind("hand-written, its generator not in its state")
def _(again: bool) -> Any:
    class Forgetful(Reader):
        def __init__(self) -> None:
            super().__init__()
            self.rng = np.random.default_rng(0)

        def __iter__(self) -> Iterator[Any]:
            while self.at < BATCHES:
                self.at += 1
                yield rows(self.rng.integers(COUNT, size=SIZE).tolist())
            self.at = 0

    return Forgetful()


@kind("hand-written, reads a batch ahead of its state", REFUSED, alone=EXACT)
def _(again: bool) -> Any:
    class Ahead(Reader):
        def __iter__(self) -> Iterator[Any]:
            inner = super().__iter__()
            held = next(inner)
            for following in inner:
                yield held
                held = following
            yield held

    return Ahead()


@kind("hand-written, its state does nothing", REFUSED, alone=EXACT)
def _(again: bool) -> Any:
    class Pretending(Reader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    return Pretending()
