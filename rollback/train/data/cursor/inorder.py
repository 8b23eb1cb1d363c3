"""What the cursors of loaders have in common that are read in order: one batch after another, by an iterator."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from rollback.train.data import rng
from rollback.train.data.cursor.base import Cursor, Indices
from rollback.train.data.cursor.description import length_of
from rollback.train.data.cursor.generators import Generators
from rollback.train.data.workers import leave_stopping_to_the_rank, shut_down


class InOrderCursor(Cursor):
    """Reads `loader` by its iterator.

    Going to a position is put off until the first batch is asked for, since what it takes is made by `iter(loader)`
    under the epoch that the script sets before its loop begins.

    Such a loader may have no length, or one that is an estimate. A checkpoint behind an epoch's last batch would resume
    in an epoch that is over, and a loader that begins the next epoch when it is loaded there would have that one taken
    for the old. So where `at_end` is asked, one batch is read ahead; it is handed out next, and the position, the
    loader's state and the random states of the process are until then those before it was read. What a checkpoint's
    next batch was is thus on record before anybody resumes from it.

    Where that is asked in the middle of a step, the model draws before the batch is handed out. What such a batch draws
    comes from a stream split off there, and the random states of the process stay the model's.
    """

    tells_length: ClassVar[bool] = False
    """Whether the loader's length, where it has one, is that of an epoch."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loader = loader
        leave_stopping_to_the_rank(loader)
        self.generators = Generators(loader)
        self._iterator: Iterator[Any] | None = None
        self._ahead: _Ahead | None = None

    @property
    def reads_ahead(self) -> bool:
        return True

    @property
    def at_end(self) -> bool:
        return self._is_over(in_step=False)

    def is_last(self) -> bool:
        return self._is_over(in_step=True)

    def _is_over(self, *, in_step: bool) -> bool:
        if not self.opened or self.offset == 0:
            return False
        if self._ahead is None:
            self._ahead = _Ahead(self, in_step=in_step)
        return isinstance(self._ahead.error, StopIteration)

    @property
    def ahead(self) -> Any:
        return self._ahead.data if self._ahead is not None else None

    def close(self) -> None:
        """Lets go of the loader's iterator, and ends its workers."""
        self._let_go(self._iterator)
        self._iterator = self._ahead = None

    def read(self) -> Any:
        """The next batch from the iterator."""
        if self._iterator is None:
            self._resume()
        return self._read()

    def loader_state(self) -> Any:
        """The loader's own, where it is needed to come back to the position."""
        return None

    def describe(self) -> dict[str, Any]:
        batches = {"batches": length_of(self._loader)} if self.tells_length else {}
        reading = {}
        if isinstance(self._loader, DataLoader):  # with other workers or another batch size its batches are other ones
            reading = {"batch_size": self._loader.batch_size, "workers": self._loader.num_workers}
        return {"kind": self.kind, "loader": type(self._loader).__name__, **batches, **reading}

    @abstractmethod
    def _resume(self) -> None:
        """Makes the iterator that goes on at the position that was sought."""

    @abstractmethod
    def _read(self) -> Any: ...

    def _fetch(self) -> Any:
        ahead, self._ahead = self._ahead, None
        return self.read() if ahead is None else ahead.take()

    def _pass_over(self) -> Indices:
        data = self._fetch()
        if self.witness is not None:
            self.witness.check(self.batch, data)
        return None

    def _let_go(self, iterator: Iterator[Any] | None) -> None:
        shut_down(iterator)
        if iterator is not None and getattr(self._loader, "_iterator", None) is iterator:
            self._loader._iterator = None  # workers that were to persist: the loader begins with new ones


class _Ahead:
    """A batch that was read before it was asked for, or what reading it raised.

    in_step: while the one before it is trained on. stream: the random states that it was read under then, if they were
    not those of the process.
    """

    def __init__(self, cursor: InOrderCursor, *, in_step: bool) -> None:
        self.state, self.generators = copy.deepcopy(cursor.loader_state()), cursor.generators.states()
        self.error: BaseException | None = None
        self.data: Any = None
        self._stream = rng.RandomStream.split_off() if in_step else rng.RandomStream.of_process()
        self.stream = self._stream.state_dict() if in_step else None
        try:
            with self._stream:
                self.data = cursor.read()
        except (Exception, StopIteration) as error:  # noqa: BLE001 - raised where the batch is asked for
            self.error = error

    def take(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.stream is None:
            self._stream.hand_over()
        return self.data
