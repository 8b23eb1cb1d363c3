"""The cursor of what can only be iterated from the start: a list of batches, a DataLoader of an IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from rollback.errors import RunDoesNotFit
from rollback.train import rng
from rollback.train.cursor.base import Cursor, Indices
from rollback.train.cursor.epochs import EpochSetters
from rollback.train.workers import leave_stopping_to_the_rank, shut_down


class ReiteratedCursor(Cursor):
    """Goes to offset k of an epoch by iterating anew from the epoch's opening and dropping k batches.

    That reads k batches: in a long epoch of a large data set it can take hours. A map-style data set is sought at once,
    and a loader with `state_dict` and `load_state_dict` as fast as it can.

    `iter(loader)` draws from the random states of the process, as without us. What is drawn while batches are read
    comes from a stream split off there, so that batch b is the same whatever the model draws in between; this is the
    one difference from the order of an unguarded run. Besides these random states nothing may decide what comes; worker
    processes that outlive an epoch would, and so a DataLoader's `persistent_workers` is not honoured here.
    """

    kind = "re-iterated"

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader
        leave_stopping_to_the_rank(loader)
        self._epoch_setters = EpochSetters([loader, getattr(loader, "dataset", None)])
        self._opening: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._stream: rng.Stream | None = None

    def _open(self) -> None:
        epochs = self._epoch_setters.at_opening(self.epoch)
        self._opening = {"rng": rng.capture(cuda=False), "epochs": epochs}
        self._begin()

    def _begin(self) -> None:
        if isinstance(self._loader, DataLoader) and self._loader.persistent_workers:
            self._loader._iterator = None
        self._iterator = iter(self._loader)
        self._stream = rng.Stream.split_off()

    def _fetch(self) -> Any:
        assert self._iterator is not None
        assert self._stream is not None
        with self._stream:
            return next(self._iterator)

    def _pass_over(self) -> Indices:
        self._fetch()
        return None

    def _state(self) -> dict[str, Any]:
        return {"opening": self._opening if self.opened else None}

    def _seek(self, state: dict[str, Any]) -> None:
        left, self._opening = self._iterator, state["opening"]
        self._iterator = None
        if self._opening is None:
            self._epoch_setters.leave()
            return
        with rng.preserved():
            rng.restore(self._opening["rng"])
            self._epoch_setters.give(self.epoch, self._opening["epochs"])
            self._begin()
        if self._iterator is left:
            raise self._does_not_fit("iterating it again gives the same half-used iterator")
        for dropped in range(self.offset):
            try:
                self._fetch()
            except StopIteration:
                raise self._does_not_fit(f"iterated again, its epoch ends after {dropped} batches") from None

    def _does_not_fit(self, reason: str) -> RunDoesNotFit:
        return RunDoesNotFit(
            f"cannot go to batch {self.batch} of {type(self._loader).__name__} (epoch {self.epoch}, offset "
            f"{self.offset}): {reason}",
            hint="its __iter__ must begin anew each time, and give the same data from the same random states",
        )

    def describe(self) -> dict[str, Any]:
        try:
            batches = len(self._loader)
        except (TypeError, NotImplementedError):
            batches = None
        return {"kind": self.kind, "loader": type(self._loader).__name__, "batches": batches}

    @property
    def told_epoch(self) -> int | None:
        return self._epoch_setters.told

    def close(self) -> None:
        """Lets go of the loader's iterator, and ends its workers."""
        shut_down(self._iterator)
        if getattr(self._loader, "_iterator", None) is self._iterator is not None:
            self._loader._iterator = None  # workers that were to persist: the loader begins with new ones
        self._iterator = None
