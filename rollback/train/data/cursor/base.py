"""The base of all cursors: a position in the data stream that can be saved and restored."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, ClassVar, Protocol, TypeVar

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.cursor.epoch_setters import EpochSetters
from rollback.train.data.cursor.generators import Generators
from rollback.wording import AdviceText, counted

_T = TypeVar("_T")
Indices = tuple[int, ...] | None
"""The dataset indices of one batch on this rank, in order; None where the loader has none."""


class DrawComparer(Protocol):
    """Knows the digests of earlier batches. A cursor that must draw batches again to reach a position checks them."""

    def knows(self, batch: int) -> bool:
        """Whether the digest of batch number `batch` is known."""

    def check(self, batch: int, data: Any) -> None:
        """Raises RunDoesNotFit if `data` is not the batch that had this number before."""


def require_same_last(batch: int, last_under: Callable[[str], Any], comparer: DrawComparer) -> None:
    """The batch before number `batch` is what it was, though the random states that it was read under are not known.

    last_under: reads it under random states that are made of a key.

    It is read twice under one made-up state and once under another. If the first two differ, the data depend on
    something that cannot be restored: RunDoesNotFit. If only the third differs, random states matter and nothing can be
    compared.
    """
    read = [last_under(key) for key in ("one", "one", "other")]
    first, again, other = (Digest(data).value for data in read)
    if first != again:
        raise RunDoesNotFit(
            f"cannot go on at batch {batch} of the data: read twice under the same random states, the batch before it "
            "is not the same, so the data set depends on something that does not come back",
            hint="let data set and collate_fn draw from the global random states, or from a generator that is one of "
            "their attributes, not of a closure's or the loader's own; and let a sample follow from its index and the "
            "epoch, not from a count of what was read; or go on with the data as they are now by --accept-data-change",
        )
    if first == other:
        comparer.check(batch - 1, read[0])


def first_differs(error: RunDoesNotFit) -> UsageError:
    """Of a new run, which can be refused at its start."""
    return UsageError(
        "the first batch of this run is another one when it is read again: the data depend on what does not come back "
        "behind a crash or rollback",
        hint=error.hint,
    )


def as_indices(batch: Any) -> Indices:
    """What a sampler gave for one batch, as plain integers; None if it is anything else."""
    entries = batch if isinstance(batch, (list, tuple)) else [batch]
    try:
        return tuple(map(operator.index, entries))
    except TypeError:
        return None


class Cursor(ABC):
    """A position in the data stream of one loader, on one rank.

    Batches count from 0. A new cursor stands before batch 0, with no epoch open. The caller opens an epoch, fetches or
    skips batches until StopIteration, and opens the next epoch:

        cursor.open_epoch()
        while True:
            try:
                batch = cursor.next()          # or cursor.skip()
            except StopIteration:
                cursor.open_epoch()

    `state_dict` describes the position behind the last batch that was returned or skipped. Batches that workers have
    read ahead do not count. `load_state_dict` goes to that position, forwards or back, in this process or a new one.
    """

    kind: ClassVar[str]
    leaves_out: ClassVar[bool] = False
    """Whether `leave_out` works."""
    has_epochs: ClassVar[bool] = True
    """Whether the data have epochs; False for a stream without an end."""
    reads_ahead: ClassVar[bool] = False
    """Whether `at_end` has to read a batch to know. Ranks may then get different answers."""

    def __init__(self, *told_epochs: Any) -> None:
        """told_epochs: objects in which parts with a `set_epoch` are looked for."""
        self._epoch_setters = EpochSetters(*told_epochs)
        self.accepts_other_length = False
        """Whether the data set may have another length than when the state was taken. The operator says so."""
        self.comparer: DrawComparer | None = None
        self.epoch = 0
        """The epoch of the next batch."""
        self.offset = 0
        """Batches of this epoch that were returned or skipped."""
        self.batch = 0
        """Batches of all epochs that were returned or skipped since the run began. The same on all ranks."""
        self.opened = False
        """Whether `epoch` has been opened. False before the first batch and after each StopIteration."""
        self._sought: dict[str, Any] | None = None
        """The state of the last `load_state_dict`, until a batch is returned or skipped."""
        self._opening: dict[str, Any] | None = None
        """The random states (`rng`) at the epoch's opening, for kinds whose data depend on them."""
        self._opening_digest: tuple[Any, int] = (None, 0)
        self._counted: tuple[int, int | None] | None = None
        """An epoch, and its number of batches: it may be another one in each, as with buckets of lengths."""

    def open_epoch(self) -> None:
        """Begins `epoch` at its first batch. The user's own `set_epoch` for it was called before.

        Draws from the random states of the process exactly what the loader would have drawn. If `load_state_dict` has
        just gone to the beginning of this epoch, it is open already: its order is not drawn a second time.
        """
        if self._sought is not None and self.opened and self.offset == 0:
            return
        self._sought, self.offset = None, 0
        self._open()
        self.opened = True

    def begin_pass(self) -> None:
        """To be called where the script's loop over an epoch begins, after its own `set_epoch`.

        A position that was restored before that call is restored again: not every sampler lets its epoch be read, so
        the order that was made at the restore may belong to another epoch.
        """
        if self._sought is not None and self.opened:
            self._seek(self._sought)

    def next(self) -> Any:
        """Returns the batch at the position. StopIteration at the epoch's end: then `epoch` is one more, and not open.

        If reading the batch raises, the position stays before it: the batch can be read again or skipped.
        """
        return self._move_on(self._fetch)

    def skip(self) -> Indices:
        """Skips the batch at the position and returns the dataset indices that this rank would have read.

        Reads no data if the data set is map-style. Raises StopIteration at the epoch's end, as `next` does.
        """
        return self._move_on(self._pass_over)

    @property
    def epoch_batches(self) -> int | None:
        """Number of batches of the open epoch, else of the one before; None if it is not known beforehand."""
        if self._counted is None or (self.opened and self._counted[0] != self.epoch):
            self._counted = self.epoch, self._count_batches()
        return self._counted[1]

    def _count_batches(self) -> int | None:
        """By the loader's own word. Asked once in each epoch: a sampler may have to make its batches to know."""
        batches: int | None = self.describe().get("batches")
        return batches

    @property
    def epoch_end(self) -> int | None:
        """Number of the first batch behind the epoch of the batch returned last; None as in `epoch_batches`."""
        left = self.epoch_batches
        return None if left is None else self.batch - self.offset + (left if self.opened else 0)

    @property
    def at_end(self) -> bool:
        """Whether the open epoch has no further batch. Kinds that are read in order may read one batch ahead to know.

        Ask between two updates only: nothing else may draw random numbers before the next batch is fetched.
        """
        return self.opened and self.epoch_batches is not None and self.offset >= self.epoch_batches

    def is_last(self) -> bool:
        """As `at_end`, but may be asked while the batch returned last is being trained on."""
        return self.at_end

    @property
    def told_epoch(self) -> int | None:
        """The script's last argument to `set_epoch` since we called it; None if it has not called it, or has none."""
        return self._epoch_setters.told

    def end_epoch(self) -> None:
        """Ends the epoch with its rest unread. For a script that leaves its loop by `break`."""
        self._check_open()
        self._end_epoch()

    def plan_skips(self, first: int, last: int) -> None:  # noqa: B027 - most kinds read nothing ahead
        """Announces that batches `first` to `last` (inclusive) will be skipped, so that no worker reads them.

        A hint that saves work: `skip` must still be called for each batch, and works without the hint.
        """

    def leave_out(self, listed: Sequence[tuple[int, Set[int]]]) -> None:  # noqa: B027 - most kinds have no indices
        """From a batch on, `next` returns a neighbour in place of each of these samples. Earlier lists no longer hold.

        listed: pairs of a batch that is still to come and the samples from there on; see `Replacements`. Nothing if
        the data are not map-style.
        """

    def indices(self, *, reading: bool = False) -> Indices:
        """Dataset indices of the batch last returned by `next`; with `reading`, of the batch that it failed to read.
        None if the loader has none."""
        return None

    def opening_digest(self) -> int:
        """Hash of the epoch, its first batch and the random states at its opening; 0 if the data do not depend on them.

        An epoch that is opened under other random states has another order, and that is no error: after a rollback
        over an epoch's start in a plain loop, what the script drew between the epochs is not drawn again. Nor is it one
        if the epoch begins at another batch: the script may have left the one before at another place.
        """
        if self._opening_digest[0] is not self._opening:
            place = f"{self.epoch}/{self.batch - self.offset}"
            digest = rng.digest_of(self._opening["rng"], place) if self._opening is not None else 0
            self._opening_digest = self._opening, digest
        return self._opening_digest[1]

    @property
    def ahead(self) -> Any:
        """The batch at the position if it was read ahead; else None."""
        return None

    def order_digest(self) -> int | None:
        """Hash of what the sampler gave for the batch last returned by `next`; None without a sampler."""
        return None

    def remarks(self) -> Iterable[AdviceText]:
        """What the user should know about this loader."""
        return ()

    def unreadable(self, samples: Sequence[int]) -> list[int]:
        """Those of `samples` that raise when read again one by one; empty if that cannot be tried."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """The position as a tree of JSON values and CPU tensors. Later batches do not change it."""
        return {**self.position(), **self.of_data(), **self.of_next()}

    def of_data(self) -> dict[str, Any]:
        """What `state_dict` tells of the data themselves: whoever reads them changes it."""
        return {}

    def of_next(self) -> dict[str, Any]:
        """What `state_dict` tells of the next batch, for which the sampler is asked."""
        return {}

    def position(self) -> dict[str, Any]:
        """The rest of `state_dict`. While a batch is trained on it stays the same, and kinds that do not read ahead may
        be asked."""
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "offset": self.offset,
            "batch": self.batch,
            "opened": self.opened,
            **self._state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the position that `state_dict` described. Leaves the random states of the process as they are.

        Raises RunDoesNotFit if the state is of another kind of loader, or the data no longer come in that order.
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
        """JSON that identifies the data. It is kept with the run, so that a changed data set is refused."""

    def close(self) -> None:  # noqa: B027 - most kinds hold nothing
        """Ends the worker processes that the cursor started. The cursor can be used again afterwards."""

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
        """Goes to the position of `state`; `epoch`, `offset`, `batch` and `opened` are set already."""

    def _require_as_many(self, generators: Generators, states: list[Any]) -> None:
        """Raises RunDoesNotFit where there are more generators than states of theirs, or fewer, unless the operator
        accepts other data: which of them was which, nobody could tell."""
        if len(states) != len(generators) and not self.accepts_other_length:
            raise RunDoesNotFit(
                f"cannot go to batch {self.batch} of the data: at the checkpoint sampler and data set held "
                f"{counted(len(states), 'random generator')} (of torch, NumPy or Python), and hold {len(generators)} "
                "now, so that they would draw other numbers",
                hint="put back what has changed in them, and make all generators with the data set, none when a sample "
                "is first read; or start a new run directory, or go on with the data as they are now by "
                "--accept-data-change",
            )

    def _check_open(self) -> None:
        if not self.opened:
            raise RuntimeError("no epoch is open: call open_epoch() first")

    def _move_on(self, over: Callable[[], _T]) -> _T:
        """Moves past one batch: `over` fetches or skips it."""
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


def cannot_ask_again(name: str) -> UsageError:
    """For an iterator that has raised, where the script has caught that or the batch was passed over."""
    return UsageError(
        f"reading a batch of '{name}' has raised, and its iterator does not outlive that: what comes next would not be "
        "the next batch, or would pass for the end of the data",
        hint="do not catch it: the same command reads the batch again; or let the data pass over what they cannot read",
    )
