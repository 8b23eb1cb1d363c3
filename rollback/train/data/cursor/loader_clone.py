"""The clone of a user's map-style loader, which reads from any position on. Its workers get a data set that is read
under random states of the position."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from rollback.train.data import rng
from rollback.train.data.cursor.generators import Generators
from rollback.train.data.workers import LeavesStoppingToTheRank


class Keyed(NamedTuple):
    """A request to a worker: the indices of a batch (or one index) and the key of its random states."""

    key: str
    indices: Any


class KeyedDataset:
    """Reads `dataset` for a `Keyed` request. First it seeds Python, NumPy, torch and the generators of the data set and
    of `collate`.

    For other code in the worker (`get_worker_info().dataset`) it behaves as the user's data set: attributes are read
    from and written to that, and `isinstance` sees its class.
    """

    __slots__ = ("_collate", "_dataset")

    def __init__(self, dataset: Any, collate: "KeyedCollate") -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_collate", collate)

    def __getitem__(self, request: Any) -> Any:
        return self._dataset[self._begun(request, self.__getitem__)]

    def __getitems__(self, request: Any) -> Any:
        indices = self._begun(request, self.__getitems__)
        read_many = getattr(self._dataset, "__getitems__", None)
        return read_many(indices) if read_many else [self._dataset[index] for index in indices]

    def _begun(self, request: Any, read: Callable[[Any], Any]) -> Any:
        if type(request) is not Keyed:
            return request
        rng.seed_all(request.key)
        found = self._generators()  # looked for each time: the first read makes some
        found.seed(request.key)
        self._collate.read_again = partial(read, request)
        self._collate.are_more = lambda: len(self._generators()) != len(found)
        return request.indices

    def _generators(self) -> Generators:
        return Generators(self._dataset, self._collate._collate)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._dataset, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedDataset, (self._dataset, self._collate)


class KeyedCollate:
    """Calls `collate`, and has its attributes. Where that or the reading of the samples has made random generators, as
    a first call does, nothing had seeded them: then it is called once more, with samples that are read once more."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self.read_again: Callable[[], Any] | None = None
        self.are_more: Callable[[], bool] = lambda: False

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        return self._collate(self.read_again()) if self.read_again is not None and self.are_more() else batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collate, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedCollate, (self._collate,)


def clone_of(loader: DataLoader[Any], feed: Iterable[Any], seeding: torch.Tensor | None) -> DataLoader[Any]:
    """A loader that reads what `feed` gives, and is otherwise as `loader`. Its workers persist; the caller ends them.

    seeding: state of the generator from which `loader` would draw its base seed. So workers get the seeds of an
    unguarded run, and no other generator is drawn from.
    """
    dataset: Any = loader.dataset
    collate: Any = loader.collate_fn
    in_workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        collate = KeyedCollate(collate)
        dataset = KeyedDataset(dataset, collate)
        in_workers = {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": True,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    batches: dict[str, Any] = {"batch_sampler": feed}
    if loader.batch_sampler is None:
        batches = {"sampler": feed, "batch_size": None}
    generator = torch.Generator()
    if seeding is not None:
        generator.set_state(seeding)
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=LeavesStoppingToTheRank(loader.worker_init_fn),
        generator=generator,
        **batches,
        **in_workers,
    )
