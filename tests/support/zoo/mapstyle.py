"""`DataLoader`s over data sets that are read by index, and their samplers."""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

from zoo.kinds import APART, COUNT, EXACT, FEWER, IDS, REFUSED, RESUMED, SIZE, Fed, Samples, X, kind

DATA = Samples()


def seeded(number: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# torch's own samplers -------------------------------------------------------------------------------------------------


@kind("sequential")
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE)


@kind("shuffle")
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True)


@kind("shuffle, nothing seeded", seeded=False)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True)


@kind("shuffle, own generator")
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True, generator=seeded())


@kind("shuffle, drop_last, samples left over", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(Samples(COUNT + 3), batch_size=SIZE, shuffle=True, drop_last=True)


@kind("with replacement, own generator", trials=FEWER)
def _(again: bool) -> Any:
    sampler = RandomSampler(DATA, replacement=True, generator=seeded())
    return DataLoader(DATA, batch_size=SIZE, sampler=sampler)


@kind("SubsetRandomSampler", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=SubsetRandomSampler(range(0, 2 * COUNT, 2)))


@kind("WeightedRandomSampler", trials=FEWER)
def _(again: bool) -> Any:
    weights = [1.0 + i % 5 for i in range(COUNT)]
    return DataLoader(DATA, batch_size=SIZE, sampler=WeightedRandomSampler(weights, COUNT, generator=seeded()))


@kind("batch_sampler", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), SIZE, drop_last=False))


@kind("batch_size=None", trials=FEWER)
def _(again: bool) -> Any:
    by_batches = BatchSampler(RandomSampler(DATA), SIZE, drop_last=False)

    class ByBatches(Dataset[Any]):
        def __getitem__(self, ids: Any) -> tuple[Tensor, Tensor]:
            return X[ids], torch.tensor(ids)

        def __len__(self) -> int:
            return COUNT

    return DataLoader(ByBatches(), sampler=by_batches, batch_size=None)


def shared(shuffle: bool = True) -> DistributedSampler[Any]:
    """One of two ranks' share."""
    return DistributedSampler(Samples(2 * COUNT), num_replicas=2, rank=1, shuffle=shuffle, seed=4)


@kind("DistributedSampler")
def _(again: bool) -> Any:
    sampler = shared()
    return Fed(DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch)


@kind("DistributedSampler, plain range loop")
def _(again: bool) -> Any:
    sampler = shared()
    loader = DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=sampler)
    return Fed(loader, at_epoch=sampler.set_epoch, counted=True)


@kind("DistributedSampler, set_epoch forgotten")
def _(again: bool) -> Any:
    return DataLoader(Samples(2 * COUNT), batch_size=SIZE, sampler=shared())


# Samplers of users ----------------------------------------------------------------------------------------------------


class ByNumpy(Sampler[int]):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(COUNT).tolist())


@kind("sampler with own numpy generator")
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, sampler=ByNumpy())


@kind("sampler with own random.Random")
def _(again: bool) -> Any:
    class ByPython(ByNumpy):
        def __init__(self) -> None:
            self.rng = random.Random(0)  # type: ignore[assignment]

        def __iter__(self) -> Iterator[int]:
            return iter(self.rng.sample(range(COUNT), COUNT))  # type: ignore[attr-defined]

    return DataLoader(DATA, batch_size=SIZE, sampler=ByPython())


class ByTorch(ByNumpy):
    """Draws while it is iterated."""

    def __init__(self) -> None:
        self.shuffler = seeded(1)

    def __iter__(self) -> Iterator[int]:
        for _ in range(COUNT):
            yield int(torch.randint(COUNT, (), generator=self.shuffler))


@kind("sampler with own torch generator, by another name, unseeded", seeded=False)
def _(again: bool) -> Any:
    sampler = ByTorch()
    sampler.shuffler.manual_seed(int(torch.randint(2**30, ())))
    return DataLoader(DATA, batch_size=SIZE, sampler=sampler)


class ByEpoch(ByNumpy):
    """Keeps the epoch under a name of its own."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self._epoch).permutation(COUNT).tolist())


@kind("sampler that keeps set_epoch as _epoch")
def _(again: bool) -> Any:
    sampler = ByEpoch()
    return Fed(DataLoader(DATA, batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch)


@kind("sampler that keeps set_epoch as _epoch, plain range loop")
def _(again: bool) -> Any:
    sampler = ByEpoch()
    return Fed(DataLoader(DATA, batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch, counted=True)


@kind("sampler that shuffles in set_epoch")
def _(again: bool) -> Any:
    class Shuffled(ByNumpy):
        def __init__(self) -> None:
            self.set_epoch(0)

        def set_epoch(self, epoch: int) -> None:
            self.order = random.Random(epoch).sample(range(COUNT), COUNT)

        def __iter__(self) -> Iterator[int]:
            return iter(self.order)

    sampler = Shuffled()
    return Fed(DataLoader(DATA, batch_size=SIZE, sampler=sampler), at_epoch=sampler.set_epoch)


@kind("sampler that goes on where its last pass ended", REFUSED)
def _(again: bool) -> Any:
    class GoesOn(ByNumpy):
        def __init__(self) -> None:
            self.left: list[int] = []

        def __iter__(self) -> Iterator[int]:
            for _ in range(COUNT):
                if not self.left:
                    self.left = list(range(COUNT + 7))
                yield self.left.pop()

    return DataLoader(Samples(COUNT + 7), batch_size=SIZE, sampler=GoesOn())


@kind("curriculum by number of passes", REFUSED)
def _(again: bool) -> Any:
    class Curriculum(ByNumpy):
        def __init__(self) -> None:
            self.passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            reach = min(COUNT, 10 * self.passes)
            return iter(torch.randint(reach, (COUNT,)).tolist())

    return DataLoader(DATA, batch_size=SIZE, sampler=Curriculum())


@kind("sampler driven by the losses", REFUSED, alone=APART)
def _(again: bool) -> Any:
    class Important(ByNumpy):
        def __init__(self) -> None:
            self.weights = torch.ones(COUNT)

        def __iter__(self) -> Iterator[int]:
            for _ in range(COUNT):
                yield int(torch.multinomial(self.weights, 1))

        def learn(self, ids: list[int]) -> None:
            self.weights[ids] *= 0.5

    sampler = Important()
    return Fed(DataLoader(DATA, batch_size=SIZE, sampler=sampler), after=sampler.learn)


@kind("buckets by length, shuffled", trials=FEWER)
def _(again: bool) -> Any:
    class Buckets(Sampler[list[int]]):
        def __len__(self) -> int:
            return COUNT // SIZE

        def __iter__(self) -> Iterator[list[int]]:
            by_length = sorted(torch.randperm(COUNT).tolist(), key=lambda i: i % 7)
            batches = [by_length[at : at + SIZE] for at in range(0, COUNT, SIZE)]
            random.shuffle(batches)
            yield from batches

    return DataLoader(DATA, batch_sampler=Buckets())


@kind("batch sampler that clears the list it yields")
def _(again: bool) -> Any:
    class Reusing(Sampler[list[int]]):
        def __len__(self) -> int:
            return COUNT // SIZE

        def __iter__(self) -> Iterator[list[int]]:
            batch: list[int] = []
            for index in RandomSampler(DATA):
                batch.append(index)
                if len(batch) == SIZE:
                    yield batch
                    batch.clear()

    return DataLoader(DATA, batch_sampler=Reusing())


@kind("batch sampler that yields from a list it owns", trials=FEWER)
def _(again: bool) -> Any:
    class Owning(Sampler[list[int]]):
        def __init__(self) -> None:
            self.batches = [list(range(at, at + SIZE)) for at in range(0, COUNT, SIZE)]

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batches)

    return DataLoader(DATA, batch_sampler=Owning())


@kind("batch sampler that shuffles the list it owns, over and over", REFUSED)
def _(again: bool) -> Any:
    batches = [list(range(at, at + SIZE)) for at in range(0, COUNT, SIZE)]

    class Stirring(Sampler[list[int]]):
        def __len__(self) -> int:
            return len(batches)

        def __iter__(self) -> Iterator[list[int]]:
            random.shuffle(batches)
            return iter(batches)

    return DataLoader(DATA, batch_sampler=Stirring())


class ByName(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, key: Any) -> tuple[Tensor, int]:
        number = int(key) if isinstance(key, str) else key[0] * 10 + key[1]
        return X[number], number


def keyed(keys: list[Any]) -> Any:
    class Keys(ByNumpy):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Iterator[Any]:
            return (keys[i] for i in torch.randperm(COUNT).tolist())

    return DataLoader(ByName(), batch_size=SIZE, sampler=Keys())


@kind("sampler that yields strings")
def _(again: bool) -> Any:
    return keyed([str(number) for number in range(COUNT)])


@kind("sampler that yields strings, from own generator", REFUSED)
def _(again: bool) -> Any:
    own = np.random.default_rng(2)

    class Keys(ByNumpy):
        def __iter__(self) -> Iterator[Any]:
            return (str(i) for i in own.permutation(COUNT).tolist())

    return DataLoader(ByName(), batch_size=SIZE, sampler=Keys())


@kind("sampler that yields tuples", trials=FEWER)
def _(again: bool) -> Any:
    return keyed([divmod(number, 10) for number in range(COUNT)])


@kind("sampler is a list, shuffled by the script each epoch", REFUSED, alone=EXACT)
def _(again: bool) -> Any:
    order = list(range(COUNT))
    return Fed(DataLoader(DATA, batch_size=SIZE, sampler=order), at_epoch=lambda _: random.shuffle(order))


# Workers and how batches are put together -----------------------------------------------------------------------------


@kind("workers", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2)


@kind("persistent workers, prefetch_factor", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3)


@kind("in_order=False", trials=("stopped", "retried"))
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2, in_order=False)


@kind("other number of workers at resume", trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=SIZE, shuffle=True, num_workers=2 if again else 1)


@kind("other batch size at resume", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(DATA, batch_size=2 if again else SIZE, shuffle=True)


@kind("custom collate", trials=FEWER)
def _(again: bool) -> Any:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "name": [f"{i}" for _, i in samples]}

    loader = DataLoader(DATA, batch_size=SIZE, shuffle=True, collate_fn=collate)
    return Fed(loader, read=lambda batch: (batch["x"], batch["name"]))


@kind("collate that draws (mixup)", trials=FEWER)
def _(again: bool) -> Any:
    def collate(samples: list[Any]) -> Any:
        x, ids = default_collate(samples)
        return x + float(np.random.beta(0.4, 0.4)) * x[torch.randperm(len(x))], ids

    return DataLoader(DATA, batch_size=SIZE, shuffle=True, collate_fn=collate)


class Augmented(Samples):
    """Augments by the global random states, as torchvision's transforms and others do."""

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        x, number = super().__getitem__(index)
        return x + 0.1 * torch.randn(8) + 0.1 * random.random() + 0.1 * float(np.random.rand()), number


@kind("augmented in process")
def _(again: bool) -> Any:
    return DataLoader(Augmented(), batch_size=SIZE, shuffle=True)


@kind("augmented in workers", trials=FEWER, alone=IDS)
def _(again: bool) -> Any:
    return DataLoader(Augmented(), batch_size=SIZE, shuffle=True, num_workers=1)


@kind("augmented in persistent workers, nothing seeded", seeded=False, trials=("stopped",))
def _(again: bool) -> Any:
    return DataLoader(Augmented(), batch_size=SIZE, shuffle=True, num_workers=1, persistent_workers=True)


@kind("augmented in workers, worker_init_fn seeds", trials=("stopped", "retried"))
def _(again: bool) -> Any:
    def seed_worker(worker: int) -> None:
        np.random.seed(torch.initial_seed() % 2**32)
        random.seed(torch.initial_seed())

    return DataLoader(
        Augmented(), batch_size=SIZE, shuffle=True, num_workers=1, worker_init_fn=seed_worker, generator=seeded()
    )


@kind("augmented by get_worker_info().seed and the sample's number", trials=FEWER)
def _(again: bool) -> Any:
    class BySeed(Samples):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            info = get_worker_info()
            assert info is not None
            noise = np.random.default_rng((info.seed - info.id, int(index))).normal(size=8)
            return X[index] + torch.tensor(noise, dtype=torch.float32), int(index)

    return DataLoader(BySeed(), batch_size=SIZE, shuffle=True, num_workers=1)


@kind("augmented by a generator that worker_init_fn makes, in no attribute", REFUSED, trials=("alone",))
def _(again: bool) -> Any:
    made: dict[str, np.random.Generator] = {}

    def make(worker: int) -> None:
        made["noise"] = np.random.default_rng(torch.initial_seed())

    class ByThat(Samples):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return X[index] + torch.tensor(made["noise"].normal(size=8), dtype=torch.float32), int(index)

    return DataLoader(ByThat(), batch_size=SIZE, shuffle=True, num_workers=1, worker_init_fn=make)


class OwnNoise(Samples):
    """Augments by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng: Any = np.random.default_rng(0)

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        if self.rng is None:
            info = get_worker_info()
            assert info is not None
            self.rng = np.random.default_rng(info.seed)
        return X[index] + torch.tensor(self.rng.normal(size=8), dtype=torch.float32), int(index)


@kind("data set with own generator, in process")
def _(again: bool) -> Any:
    return DataLoader(OwnNoise(), batch_size=SIZE, shuffle=True)


@kind("data set with own generator, made in the worker", alone=IDS)
def _(again: bool) -> Any:
    data = OwnNoise()
    data.rng = None
    return DataLoader(data, batch_size=SIZE, shuffle=True, num_workers=2)


# Data sets ------------------------------------------------------------------------------------------------------------


@kind("Subset and ConcatDataset", trials=FEWER)
def _(again: bool) -> Any:
    parts: Iterable[Any] = [Subset(Samples(99), range(1, 53, 2)), Subset(Samples(99), range(70, 80))]
    return DataLoader(ConcatDataset(parts), batch_size=SIZE, shuffle=True)


@kind("TensorDataset", trials=FEWER)
def _(again: bool) -> Any:
    return DataLoader(TensorDataset(X[:COUNT], torch.arange(COUNT)), batch_size=SIZE, shuffle=True)


@kind("random_split, seeded", trials=FEWER)
def _(again: bool) -> Any:
    train, _ = random_split(Samples(2 * COUNT), [COUNT, COUNT], generator=seeded(42))
    return DataLoader(train, batch_size=SIZE, shuffle=True)


@kind("random_split, nothing seeded", seeded=False, stopped=REFUSED, killed=REFUSED)
def _(again: bool) -> Any:
    train, _ = random_split(Samples(2 * COUNT), [COUNT, COUNT])
    return DataLoader(train, batch_size=SIZE, shuffle=True)


@kind("random_split, nothing seeded, augmented by a wrapper", seeded=False, stopped=REFUSED, killed=REFUSED)
def _(again: bool) -> Any:
    train, _ = random_split(Augmented(2 * COUNT), [COUNT, COUNT])
    return DataLoader(ConcatDataset([train]), batch_size=SIZE, shuffle=True)


@kind("samples moved between attempts", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    moved = (
        [(X[(i + 5) % COUNT], (i + 5) % COUNT) for i in range(COUNT)] if again else [(X[i], i) for i in range(COUNT)]
    )
    return DataLoader(moved, batch_size=SIZE, sampler=SequentialSampler(moved))  # type: ignore[arg-type]


@kind("data set grown between attempts", REFUSED, trials=RESUMED)
def _(again: bool) -> Any:
    return DataLoader(Samples(COUNT + 8 if again else COUNT), batch_size=SIZE, shuffle=True)


@kind("data set that reads many at once", trials=FEWER)
def _(again: bool) -> Any:
    class Many(Samples):
        def __getitems__(self, ids: list[int]) -> list[tuple[Tensor, int]]:
            noise = torch.randn(len(ids), 8)
            return [(X[i] + 0.1 * noise[at], i) for at, i in enumerate(ids)]

    return DataLoader(Many(), batch_size=SIZE, shuffle=True)


@kind("data set told the epoch, in workers", trials=FEWER)
def _(again: bool) -> Any:
    class Aged(Samples):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            return X[index] * (1 + 0.1 * self.epoch), int(index)

    data = Aged()
    return Fed(DataLoader(data, batch_size=SIZE, shuffle=True, num_workers=1), at_epoch=data.set_epoch)


@kind("data set that remembers what it has read", REFUSED)
def _(again: bool) -> Any:
    """Repeats are dimmed: an epoch or a replay later, the same sample is another one."""

    class Remembering(Samples):
        def __init__(self) -> None:
            super().__init__()
            self.read: dict[int, int] = {}

        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            self.read[int(index)] = self.read.get(int(index), 0) + 1
            return X[index] / self.read[int(index)], int(index)

    return DataLoader(Remembering(), batch_size=SIZE, shuffle=True)
