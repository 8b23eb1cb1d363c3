"""The clone of a user's map-style loader, which reads from any position on. Its workers get a data set that is read
under random states of the position."""

from collections.abc import Iterable
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


def _seed(dataset: Any, key: str) -> None:
    rng.seed_all(key)
    Generators(dataset).seed(key)  # looked for each time: some are made when the first sample is read


class KeyedDataset:
    """Reads `dataset` for a `Keyed` request. First it seeds Python, NumPy, torch and the data set's own generators.

    For other code in the worker (`get_worker_info().dataset`) it behaves as the user's data set: attributes are read
    from and written to that, and `isinstance` sees its class.
    """

    __slots__ = ("_dataset",)

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "_dataset", dataset)

    def __getitem__(self, request: Any) -> Any:
        if type(request) is not Keyed:
            return self._dataset[request]
        _seed(self._dataset, request.key)
        return self._dataset[request.indices]

    def __getitems__(self, request: Any) -> Any:
        indices = request
        if type(request) is Keyed:
            _seed(self._dataset, request.key)
            indices = request.indices
        read_many = getattr(self._dataset, "__getitems__", None)
        return read_many(indices) if read_many else [self._dataset[index] for index in indices]

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
        return KeyedDataset, (self._dataset,)


def clone_of(loader: DataLoader[Any], feed: Iterable[Any], seeding: torch.Tensor | None) -> DataLoader[Any]:
    """A loader that reads what `feed` gives, and is otherwise as `loader`. Its workers persist; the caller ends them.

    seeding: state of the generator from which `loader` would draw its base seed. So workers get the seeds of an
    unguarded run, and no other generator is drawn from.
    """
    dataset: Any = loader.dataset
    in_workers: dict[str, Any] = {}
    if loader.num_workers > 0:
        dataset = KeyedDataset(dataset)
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
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=LeavesStoppingToTheRank(loader.worker_init_fn),
        generator=generator,
        **batches,
        **in_workers,
    )
