"""The cursor of a loader that keeps its own position (torchdata's StatefulDataLoader, a streaming data set)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from rollback.train import rng
from rollback.train.cursor.base import Cursor, Indices
from rollback.train.workers import leave_stopping_to_the_rank, shut_down


class StatefulCursor(Cursor):
    """Position and exactness are the loader's: what its `state_dict` leaves out, no one can put back.

    The contract is torchdata's: `state_dict` is true after each batch handed out, and after `load_state_dict` the next
    `iter(loader)` goes on from there (at an epoch's end: begins the next one). The random states at the epoch's opening
    are put back around that `iter`, for loaders that seed themselves there. `skip` reads a batch and drops it. The
    state must be a tree of JSON values and tensors, since a checkpoint holds nothing else.
    """

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader
        leave_stopping_to_the_rank(loader)
        self._opening: dict[str, Any] | None = None
        self._iterator: Iterator[Any] | None = None
        self._beginning: Any = None
        """The loader's state at the beginning of the first epoch, where this process has seen it."""

    def _open(self) -> None:
        self._opening = rng.capture(cuda=False)
        self._iterator = iter(self._loader)
        if self.batch == 0:
            with rng.preserved():
                self._beginning = copy.deepcopy(self._loader.state_dict())

    def _fetch(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator)

    def _pass_over(self) -> Indices:
        self._fetch()
        return None

    def _state(self) -> dict[str, Any]:
        # torchdata's loader begins an epoch, with draws from the random states, when it is asked before its first one.
        begun = self.opened or self.epoch > 0
        return {
            "opening": self._opening if self.opened else None,
            "loader": self._loader.state_dict() if begun else None,
        }

    def _seek(self, state: dict[str, Any]) -> None:
        self._iterator = None
        if state["loader"] is None:
            self._opening = None
            if self._beginning is not None:  # what has been read here is to be read again
                with rng.preserved():
                    self._loader.load_state_dict(copy.deepcopy(self._beginning))
            return
        with rng.preserved():
            self._loader.load_state_dict(state["loader"])
            self._opening = state["opening"]
            if self._opening is not None:
                rng.restore(self._opening)
                self._iterator = iter(self._loader)

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "loader": type(self._loader).__name__}

    def close(self) -> None:
        """Lets go of the loader's iterator, and ends its workers."""
        shut_down(self._iterator)
        if getattr(self._loader, "_iterator", None) is self._iterator is not None:
            self._loader._iterator = None  # workers that were to persist: the loader begins with new ones
        self._iterator = None
