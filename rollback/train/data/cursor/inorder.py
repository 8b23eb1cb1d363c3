"""The common part of the cursors that read a loader in order, through its iterator."""

import copy
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from rollback.train.data import rng
from rollback.train.data.cursor.base import Cursor, Indices
from rollback.train.data.cursor.description import length_of
from rollback.train.data.cursor.generators import Generators
from rollback.train.data.cursor.nodes import nodes_in_step
from rollback.train.data.workers import leave_stopping_to_the_rank, shut_down


class InOrderCursor(Cursor):
    """Reads `loader` through its iterator.

    Going to a position is put off until the first batch is fetched, because `iter(loader)` must run under the epoch
    that the script sets before its loop begins.

    Such a loader may have no length, or an estimated one. A checkpoint behind an epoch's last batch would resume in an
    epoch that is over; if the loader begins the next epoch on loading, that one would be taken for the old. So `at_end`
    reads one batch ahead. `next` returns that batch, and until then the position, the loader's state and the random
    states of the process are those from before it was read. So the batch that follows a checkpoint is on record before
    anybody resumes from it.

    With `in_order=False` a DataLoader hands out the batches of its workers as they are ready, and no position could be
    gone back to. So its workers are waited for in turn, as under a map-style loader.

    What reading raises may be caught by the script, which then gets the same batch again.

    If `is_last` is asked in the middle of a step, the model draws before the batch is returned. Such a batch is drawn
    from a stream that is split off, and the random states of the process remain the model's.
    """

    reads_ahead = True
    tells_length: ClassVar[bool] = False
    """Whether the loader's length, if it has one, is the number of batches of an epoch."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loader = loader
        if isinstance(loader, DataLoader):
            loader.in_order = True
        leave_stopping_to_the_rank(loader)
        self.generators = Generators(loader, *nodes_in_step(loader))
        self._iterator: Iterator[Any] | None = None
        self._ahead: _ReadAhead | None = None

    @property
    def at_end(self) -> bool:
        return self._is_over(in_step=False)

    def is_last(self) -> bool:
        return self._is_over(in_step=True)

    def _is_over(self, *, in_step: bool) -> bool:
        if not self.opened or self.offset == 0:
            return False
        if self._ahead is None:
            self._ahead = _ReadAhead(self, in_step=in_step)
        return isinstance(self._ahead.error, StopIteration)

    @property
    def ahead(self) -> Any:
        return self._ahead.data if self._ahead is not None else None

    def close(self) -> None:
        """Drops the loader's iterator and ends its workers."""
        self._let_go(self._iterator)
        self._iterator = self._ahead = None

    def read(self) -> Any:
        """The next batch from the iterator."""
        if self._iterator is None:
            self._resume()
        return self._read()

    def loader_state(self) -> Any:
        """The loader's own state, if the position cannot be restored without it; else None."""
        return None

    def describe(self) -> dict[str, Any]:
        batches = {"batches": length_of(self._loader)} if self.tells_length else {}
        reading = {}
        if isinstance(self._loader, DataLoader):  # with other workers or another batch size its batches are other ones
            reading = {"batch_size": self._loader.batch_size, "workers": self._loader.num_workers}
        return {"kind": self.kind, "loader": type(self._loader).__name__, **batches, **reading}

    @abstractmethod
    def _resume(self) -> None:
        """Makes the iterator for the position that was restored."""

    @abstractmethod
    def _read(self) -> Any: ...

    @abstractmethod
    def _give_up_iterator(self) -> None:
        """Reading has raised. Most iterators are at their end then, or have lost a part of the batch: the next read is
        not to go on with such a one."""

    def _fetch(self) -> Any:
        ahead, self._ahead = self._ahead, None
        try:
            return self.read() if ahead is None else ahead.take()
        except StopIteration:
            raise
        except Exception:
            self._give_up_iterator()
            raise

    def _pass_over(self) -> Indices:
        data = self._fetch()
        if self.comparer is not None:
            self.comparer.check(self.batch, data)
        return None

    def _let_go(self, iterator: Iterator[Any] | None) -> None:
        shut_down(iterator)
        if iterator is not None and getattr(self._loader, "_iterator", None) is iterator:
            self._loader._iterator = None  # workers that were to persist: the loader begins with new ones


class _ReadAhead:
    """A batch that was read ahead, or the exception that reading it raised.

    in_step: whether the batch before it is still being trained on. stream: the random states under which it was read
    then; None if they were those of the process.
    """

    def __init__(self, cursor: InOrderCursor, *, in_step: bool) -> None:
        self.state, self.generators = copy.deepcopy(cursor.loader_state()), cursor.generators.states()
        self.error: BaseException | None = None
        self.data: Any = None
        self._stream = rng.RandomStream.split_off() if in_step else rng.RandomStream(rng.cpu_states())
        self.stream = self._stream.state_dict() if in_step else None
        try:
            with self._stream:
                self.data = cursor.read()
        except Exception as error:  # noqa: BLE001 - raised where the batch is asked for
            self.error = error

    def take(self) -> Any:
        if self.error is not None:
            raise self.error
        if self.stream is None:
            self._stream.hand_over()
        return self.data
