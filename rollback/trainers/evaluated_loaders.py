"""Loaders of a trainer's evaluations whose workers persist: only the first pass over one draws a seed for them.

So the training's random states depend on whether an evaluation was the first one over its loader. A process that goes
on behind that one makes the loader anew, and one that has gone back to before it has the workers still.

And what such workers draw, as masks for words, goes on from pass to pass in random states that no checkpoint has. So
each batch is read under random states of its own: those of its place, in this pass of all that count.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from rollback.train.advice.unkept_state import keeps_pass_over
from rollback.train.data import rng
from rollback.train.data.cursor.loader_clone import Keyed, KeyedCollate, KeyedDataset
from rollback.train.data.workers import shut_down


class EvaluatedLoaders:
    """How many passes over each of them the training as it counts has had; `loaders`: those that may have had one
    already."""

    def __init__(self, loaders: Mapping[str, DataLoader[Any]] = MappingProxyType({})) -> None:
        self._seed = str(torch.initial_seed())
        self._passes = {name: 1 for name, loader in loaders.items() if loader._iterator is not None}

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self._seed, "passes": dict(self._passes)}

    def load_state_dict(self, kept: dict[str, Any] | list[str]) -> None:
        if isinstance(kept, list):  # an earlier version kept the names alone
            kept = {"seed": self._seed, "passes": dict.fromkeys(kept, 1)}
        self._seed, self._passes = kept["seed"], dict(kept["passes"])

    def begin(self, name: str, loader: DataLoader[Any]) -> None:
        """A pass over this loader is about to begin: it is to draw if it is the first one that counts, and else not."""
        if not loader.persistent_workers:
            return
        keeps_pass_over(loader)
        passes = self._passes.get(name, 0)
        self._passes[name] = passes + 1
        is_new = _read_by_pass(loader, f"{self._seed}/{name}", passes)
        if is_new or not passes:
            shut_down(loader._iterator)
            loader._iterator = None
        if passes and loader._iterator is None:
            with rng.preserved():
                iter(loader)


class _ReadByPass(KeyedDataset):
    """Workers that live on read it under random states of the batch and the pass, whose number is in memory that
    they share: what they still read of a pass that was broken off is dropped."""

    __slots__ = ("_pass_key", "_pass_number")

    def __init__(self, dataset: Any, collate: KeyedCollate, key: str, number: torch.Tensor) -> None:
        super().__init__(dataset, collate)
        object.__setattr__(self, "_pass_key", key)
        object.__setattr__(self, "_pass_number", number)

    def _begun(self, request: Any, read: Any) -> Any:
        if type(request) is Keyed or get_worker_info() is None:  # the script itself may look at a sample
            return super()._begun(request, read)
        return super()._begun(Keyed(f"{self._pass_key}/{self._pass_number.item()}/{request}", request), read)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReadByPass, (self._dataset, self._collate, self._pass_key, self._pass_number)


def _read_by_pass(loader: DataLoader[Any], key: str, number: int) -> bool:
    """Have the loader's next pass read as this one. Whether it needs other workers for that than it may have.

    What is only read in order has no places, and stays as it is.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        return False
    if type(dataset) is _ReadByPass and dataset._pass_key == key:
        dataset._pass_number.fill_(number)
        return False
    if type(dataset) is _ReadByPass:
        dataset = dataset._dataset
    collate = loader.collate_fn
    known = collate if type(collate) is KeyedCollate else KeyedCollate(collate)
    shared: torch.Tensor = torch.tensor(number).share_memory_()  # type: ignore[no-untyped-call]
    vars(loader).update(dataset=_ReadByPass(dataset, known, key, shared), collate_fn=known)  # it refuses assignments
    return True
