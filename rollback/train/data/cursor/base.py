"""What every cursor is: a position in the data stream that can be read, written down and gone back to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

from rollback.errors import RunDoesNotFit
from rollback.train.data import rng
from rollback.train.data.cursor.epochs import EpochSetters

_T = TypeVar("_T")
Indices = tuple[int, ...] | None
"""The dataset indices of one batch on this rank, in order; None where the loader has none."""


class Witness(Protocol):
    """Knows what batches were when they were drawn before: those that a cursor draws again on its way to a position."""

    def knows(self, batch: int) -> bool:
        """Whether there is anything to compare batch number `batch` with."""

    def check(self, batch: int, data: Any) -> None:
        """Raises RunDoesNotFit where it was another one."""


class Cursor(ABC):
    """A position in the data stream of one loader, on one rank.

    Batches count from 0. A cursor begins before batch 0 with no epoch open. Whoever drives it opens an epoch, asks
    for batches or passes over them until StopIteration, and opens the next:

        cursor.open_epoch()
        while True:
            try:
                batch = cursor.next()          # or cursor.skip()
            except StopIteration:
                cursor.open_epoch()

    `state_dict` describes the position after the batches handed out or passed over; batches that workers have read
    ahead do not count. `load_state_dict` goes there, forwards or back, in the same process or a fresh one.
    """

    kind: ClassVar[str]
    leaves_out: ClassVar[bool] = False
    """Whether it can leave samples out: `leave_out`."""
    has_epochs: ClassVar[bool] = True
    """Whether the data begin anew; False for a stream that merely goes on."""

    def __init__(self, *told_epochs: Any) -> None:
        """told_epochs: that of which parts may have a `set_epoch`."""
        self._epoch_setters = EpochSetters(*told_epochs)
        self.accepts_other_length = False
        """Whether the data set may have another length than it had when a state was taken: the operator's word."""
        self.witness: Witness | None = None
        self.epoch = 0
        """The epoch of the next batch."""
        self.offset = 0
        """Batches of this epoch already handed out or passed over."""
        self.batch = 0
        """Batches of all epochs handed out or passed over since the run began: the position, the same on all ranks."""
        self.opened = False
        """Whether `epoch` has been begun. False before the first batch, and after each StopIteration."""
        self._sought: dict[str, Any] | None = None
        """The state that was gone to, until a batch is handed out or passed over from there."""
        self._opening: dict[str, Any] | None = None
        """The random states (`rng`) under which the epoch was opened, for kinds whose data depend on them."""
        self._opening_digest: tuple[Any, int] = (None, 0)

    def open_epoch(self) -> None:
        """Begins `epoch` at its first batch, after the user's own `set_epoch` for it.

        Draws from the random states of the process what the loader itself would have drawn. An epoch that
        `load_state_dict` has just gone back to the beginning of is open already: it is not begun (and its order not
        drawn) a second time.
        """
        if self._sought is not None and self.opened and self.offset == 0:
            return
        self._sought, self.offset = None, 0
        self._open()
        self.opened = True

    def begin_pass(self) -> None:
        """The script's loop over an epoch begins, after its own `set_epoch`. A position gone to before is gone to anew.

        Not every sampler and wrapper lets its epoch be read, so the order that was made before may be another epoch's.
        """
        if self._sought is not None and self.opened:
            self._seek(self._sought)

    def next(self) -> Any:
        """The batch at the position. StopIteration at the epoch's end: then no epoch is open and `epoch` is one more.

        If reading the batch raises, the position stays before it: it can be read again or passed over.
        """
        return self._move_on(self._fetch)

    def skip(self) -> Indices:
        """Passes over the batch at the position and tells which dataset indices this rank would have read.

        Reads no data where the data set is map-style. StopIteration at the epoch's end, as `next`.
        """
        return self._move_on(self._pass_over)

    @property
    def reads_ahead(self) -> bool:
        """Whether `at_end` is found out by reading, so that ranks may come to different answers."""
        return False

    @cached_property
    def epoch_batches(self) -> int | None:
        """How many batches an epoch has; None where that cannot be told beforehand."""
        batches: int | None = self.describe().get("batches")
        return batches

    @property
    def epoch_end(self) -> int | None:
        """The batch behind the last one of the epoch of the batch handed out last; None as in `epoch_batches`."""
        left = self.epoch_batches
        return None if left is None else self.batch - self.offset + (left if self.opened else 0)

    @property
    def at_end(self) -> bool:
        """Whether the open epoch has no further batch. Kinds that are read in order may read one ahead to know.

        To be asked between two updates, where nothing else draws before the next batch is asked for.
        """
        return self.opened and self.epoch_batches is not None and self.offset >= self.epoch_batches

    def is_last(self) -> bool:
        """The same, asked while the batch handed out last is trained on."""
        return self.at_end

    @property
    def told_epoch(self) -> int | None:
        """What the script has called `set_epoch` with since we last did; None where it has not, or has nothing to."""
        return self._epoch_setters.told

    def end_epoch(self) -> None:
        """Leaves the rest of the epoch unread, as a script does that breaks off its loop."""
        self._check_open()
        self._end_epoch()

    def plan_skips(self, first: int, last: int) -> None:  # noqa: B027 - most kinds read nothing ahead
        """Announces that batches `first` to `last` (inclusive) will be passed over, so that no worker reads them.

        Only a hint that saves work: `skip` must still be called for each, and works without it.
        """

    def leave_out(self, listed: Sequence[tuple[int, Set[int]]]) -> None:  # noqa: B027 - most kinds have no indices
        """From a batch on leave these samples, and no others, out of what `next` returns; a neighbour is there instead.

        listed: batches that are yet to come at the position, and samples; see `Neighbours`. Nothing where the data are
        not map-style.
        """

    def indices(self) -> Indices:
        """The dataset indices of the batch last returned by `next`, where the loader has any."""
        return None

    def opening_digest(self) -> int:
        """A hash of the epoch and the random states under which it was opened; 0 where nothing depends on them.

        An epoch that is opened under others has another order, and that is nobody's fault: after a rollback over its
        start in a plain loop, what the script drew between the epochs is not drawn again.
        """
        if self._opening_digest[0] is not self._opening:
            digest = rng.digest_of(self._opening["rng"], self.epoch) if self._opening is not None else 0
            self._opening_digest = self._opening, digest
        return self._opening_digest[1]

    @property
    def ahead(self) -> Any:
        """The batch at the position where it was read before it was asked for; None where none was."""
        return None

    def order_digest(self) -> int | None:
        """A hash of what the sampler gave for the batch last returned by `next`, where there is a sampler."""
        return None

    def remarks(self) -> Iterable[tuple[str, str]]:
        """What a user should know of this loader and has not been told yet: a code and a sentence for each."""
        return ()

    def in_hand(self, reading: bool) -> Indices:
        """The dataset indices of the batch last returned by `next`; with `reading`, of the one it failed to read."""
        return None if reading else self.indices()

    def unreadable(self, samples: Sequence[int]) -> list[int]:
        """Those of `samples` that raise when they are read once more, singly; none where that cannot be tried."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The position, as a tree of JSON values and CPU tensors that later batches do not change."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "offset": self.offset,
            "batch": self.batch,
            "opened": self.opened,
            **self._state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position that `state_dict` described; the random states of the process stay as they are.

        RunDoesNotFit where the state is that of another kind of loader, or the data are no longer in that order.
        """
        if state["kind"] != self.kind:
            raise RunDoesNotFit(
                f"cannot go to batch {state['batch']} of the data: the checkpoint was taken with a loader of kind "
                f"'{state['kind']}', this one is '{self.kind}'",
                hint="hand the guard the same kind of loader as before, or start a new run directory",
            )
        self.epoch, self.offset, self.batch = state["epoch"], state["offset"], state["batch"]
        self.opened = state["opened"]
        self._sought = state
        self._seek(state)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """JSON that identifies the data: kept with the run, so that a changed data set is refused."""

    def close(self) -> None:  # noqa: B027 - most kinds hold nothing
        """Ends what the cursor started (worker processes). It can be used again afterwards."""

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _fetch(self) -> Any: ...

    @abstractmethod
    def _pass_over(self) -> Indices: ...

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _seek(self, state: dict[str, Any]) -> None:
        """Goes where `state` says; `epoch`, `offset`, `batch` and `opened` are set already."""

    def _check_open(self) -> None:
        if not self.opened:
            raise RuntimeError("no epoch is open: call open_epoch() first")

    def _move_on(self, over: Callable[[], _T]) -> _T:
        """Fetch the batch at the position, or pass over it."""
        self._check_open()
        try:
            found = over()
        except StopIteration:
            self._end_epoch()
            raise
        self._sought = None
        self.offset += 1
        self.batch += 1
        return found

    def _end_epoch(self) -> None:
        self._sought = None
        self.epoch += 1
        self.offset = 0
        self.opened = False
