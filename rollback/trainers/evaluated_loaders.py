"""Loaders of a trainer's evaluations whose workers persist: only the first pass over one draws a seed for them.

So the training's random states depend on whether an evaluation was the first one over its loader. A process that goes
on behind that one makes the loader anew, and one that has gone back to before it has the workers still.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch.utils.data import DataLoader

from rollback.train.data import rng
from rollback.train.data.workers import shut_down
from rollback.train.state.unkept import keeps_pass_over


class EvaluatedLoaders:
    """Which of them the training as it counts has had a pass over; `loaders`: those that have had one already."""

    def __init__(self, loaders: Mapping[str, DataLoader[Any]] = MappingProxyType({})) -> None:
        self._names = {name for name, loader in loaders.items() if loader._iterator is not None}

    def state_dict(self) -> list[str]:
        return sorted(self._names)

    def load_state_dict(self, names: list[str]) -> None:
        self._names = set(names)

    def begin(self, name: str, loader: DataLoader[Any]) -> None:
        """A pass over this loader is about to begin: it is to draw if it is the first one that counts, and else not."""
        if not loader.persistent_workers:
            return
        keeps_pass_over(loader)
        if name not in self._names:
            shut_down(loader._iterator)
            loader._iterator = None
        elif loader._iterator is None:
            with rng.preserved():
                iter(loader)
        self._names.add(name)
