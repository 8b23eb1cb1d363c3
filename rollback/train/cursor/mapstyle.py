"""The cursor of a map-style DataLoader: sought by index, never drained.

The order of an epoch is a pure function of the random states at its opening (and of what `set_epoch` was given), so
these are what a checkpoint keeps. Going to batch b makes the order anew and moves along it; the data are read by a
clone of the user's loader whose batch sampler begins at the position.

With worker processes each batch is read under random states seeded from (base seed, epoch, offset), so that random
augmentation, too, is a function of the position alone, whatever the number of workers and however far they have read
ahead. Without workers it draws from the random states of the process, as ever. A data set that keeps a generator of
its own (`self.rng = np.random.default_generator()`) is outside of both.

The clone keeps the batches in order (`in_order=False` would make "batch b" mean nothing). A sampler's own
`state_dict` is not used: the sampler is run again from the opening. One whose order depends on anything else, such as
the losses it was shown, cannot be sought; a replay that finds other indices than before is refused, never passed on.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
import xxhash
from torch.utils.data import DataLoader

from rollback.errors import RunDoesNotFit
from rollback.train import rng
from rollback.train.cursor.base import Cursor, Indices
from rollback.train.cursor.epochs import EpochSetters
from rollback.train.cursor.order import Order, order_of, order_of_share, share_of
from rollback.train.cursor.quarantine import Neighbours, unreadable
from rollback.train.cursor.workers import Keyed, KeyedDataset
from rollback.train.workers import LeavesStoppingToTheRank, shut_down


class MapStyleCursor(Cursor):
    """See the module's docstring. `loader` itself is never iterated."""

    kind = "map-style"
    leaves_out = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__()
        self._loader = loader
        self._index_sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        samplers = _samplers(self._index_sampler)
        self._generators = _generators([loader, *samplers])
        self._epoch_setters = EpochSetters([*samplers, loader.dataset])
        self._opening: dict[str, Any] = {}
        self._base_seed: int | None = None
        self._feed = _Feed()
        self._clone: DataLoader[Any] | None = None
        self._clone_epoch = 0
        self._reader: Iterator[Any] | None = None
        self._indices: Indices = None

    def indices(self) -> Indices:
        return self._indices

    def in_hand(self, reading: bool) -> Indices:
        try:
            return _as_indices(self._feed.peek()) if reading else self._indices
        except StopIteration:
            return None

    def unreadable(self, samples: Sequence[int]) -> list[int]:
        return unreadable(self._loader.dataset, samples)

    def plan_skips(self, first: int, last: int) -> None:
        window = range(first, last + 1)
        if window not in self._feed.planned:
            self._feed.planned.append(window)
            self._reader = None  # it may be reading what is now planned to be skipped

    def leave_out(self, listed: Sequence[tuple[int, Set[int]]]) -> None:
        if list(listed) != self._feed.neighbours.listed:
            self._feed.neighbours = Neighbours(listed, _length(self._loader.dataset) or 0)
            self._reader = None  # it may be reading what is now to be left out

    def describe(self) -> dict[str, Any]:
        batching = self._loader.batch_sampler
        sampler = getattr(self._index_sampler, "sampler", self._index_sampler)
        return {
            "kind": self.kind,
            "length": _length(self._loader.dataset),
            "batch_size": getattr(batching, "batch_size", None),
            "drop_last": getattr(batching, "drop_last", None),
            "sampler": type(sampler).__name__,
            "batches": _length(self._loader),
        }

    def close(self) -> None:
        if self._clone is not None:
            shut_down(self._clone._iterator)
        self._clone = self._reader = None

    def _open(self) -> None:
        epochs = self._epoch_setters.at_opening(self.epoch)
        self._end_workers_of_epoch()
        self._opening = {
            "rng": rng.capture(cuda=False),
            "generators": _states(self._generators),
            "epochs": epochs,
            "base_seed": self._base_seed if self._loader.persistent_workers else None,
        }
        self._begin(self._make_order(), None)

    def _end_epoch(self) -> None:
        super()._end_epoch()
        self._end_workers_of_epoch()

    def _end_workers_of_epoch(self) -> None:
        """As the loader itself: new workers each epoch, with the data set as it is then, unless they persist."""
        if not self._loader.persistent_workers:
            self.close()

    def _fetch(self) -> Any:
        if self._feed.is_planned():  # said to be skipped, and wanted after all
            self._feed.planned.clear()
            self._reader = None
        reader = self._start_reading() if self._reader is None else self._reader
        try:
            data = next(reader)
        except StopIteration:
            raise
        except BaseException:
            self._reader = None  # it is a batch further than we are: the next read begins at the position again
            raise
        self._indices = _as_indices(self._feed.pop())
        return data

    def _pass_over(self) -> Indices:
        indices = _as_indices(self._feed.peek())
        if self._feed.reading and not self._feed.is_planned():
            self._reader = None  # workers are at it: they are told to begin again behind it
            self._feed.reading = 0
        self._feed.pop()
        return indices

    def _state(self) -> dict[str, Any]:
        return {
            "opening": self._opening if self.opened else None,
            "base_seed": self._base_seed,
            # Between two epochs nothing will draw the order again: the generators are all there is to put back.
            "generators": None if self.opened else _states(self._generators),
            "last_indices": _fingerprint(self._feed.last) if self.offset else None,
            "length": _length(self._loader.dataset),
            "share": share_of(self._index_sampler),
        }

    def _seek(self, state: dict[str, Any]) -> None:
        kept = state["opening"] or state
        if len(kept["generators"]) != len(self._generators):
            raise self._does_not_fit("other generators take part")
        self._reader, self._indices = None, None
        self._base_seed = state["base_seed"]
        with rng.preserved():
            if not self.opened:
                _set_states(self._generators, state["generators"])
                self._epoch_setters.leave()
                return
            self._opening = state["opening"]
            rng.restore(self._opening["rng"])
            _set_states(self._generators, self._opening["generators"])
            self._epoch_setters.give(self.epoch, self._opening["epochs"])
            order = self._make_order()
        self._begin(order, self._move_to_position(order, state))

    def _move_to_position(self, order: Order, state: dict[str, Any]) -> Any:
        """Move a fresh order to the position; what comes before it there, once that is known to be what came before.

        Where the data set is of another length by intent, there is nothing to compare with.
        """
        if not self.offset:
            return None
        other_data = self.accepts_other_length and state["length"] != _length(self._loader.dataset)
        order.seek(self.offset - 1)
        try:
            last = order.take()
        except StopIteration:
            if other_data:
                return None  # the epoch is over
            raise self._does_not_fit("fewer batches come") from None
        if not other_data:
            checked = last if state["share"] == share_of(self._index_sampler) else self._last_of(state["share"])
            if _fingerprint(checked) != state["last_indices"]:
                raise self._does_not_fit("other indices come before it")
        return last

    def _last_of(self, share: list[int | None] | None) -> Any:
        """What another share of the same data has before the position."""
        order = order_of_share(self._index_sampler, share)
        if order is None:
            raise self._does_not_fit("the samples are shared out among the ranks in another way")
        with rng.preserved():
            order.begin()
            order.seek(self.offset - 1)
            return order.take()

    def _begin(self, order: Order, last: Any) -> None:
        self._reader = None
        key = f"{self._base_seed}/{self.epoch}" if self._loader.num_workers > 0 else None
        self._feed.begin(order, last, batch=self.batch, offset=self.offset, key=key)

    def _make_order(self) -> Order:
        """Draws the epoch's order as the loader does: what it draws, when, and from which generator."""
        loader = self._loader
        lookahead = max(1, loader.num_workers * (loader.prefetch_factor or 0))
        order = order_of(self._index_sampler, lookahead)
        if self._opening["base_seed"] is None:  # else the workers live on, and so does their seed
            drawn = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            self._base_seed = int(drawn.item())
            if loader.num_workers > 0:  # which asks its sampler for an iterator a second time
                order = order_of(self._index_sampler, lookahead)
        order.begin()
        return order

    def _start_reading(self) -> Iterator[Any]:
        if self._clone_epoch != self.epoch:
            self._end_workers_of_epoch()
        if self._clone is None:
            self._clone = self._make_clone()
            self._clone_epoch = self.epoch
        # With workers this drops what they had read ahead and sets them to work at the position. They are not started
        # anew, as the clone's workers always persist: only the cursor ends them.
        self._reader = iter(self._clone)
        return self._reader

    def _make_clone(self) -> DataLoader[Any]:
        loader = self._loader
        dataset: Any = loader.dataset
        in_workers: dict[str, Any] = {}
        if loader.num_workers > 0:
            dataset = KeyedDataset(dataset)
            in_workers = {
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": True,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        batches: dict[str, Any] = {"batch_sampler": self._feed}
        if loader.batch_sampler is None:
            batches = {"sampler": self._feed, "batch_size": None}
        return DataLoader(
            dataset,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            pin_memory_device=loader.pin_memory_device,
            timeout=loader.timeout,
            worker_init_fn=LeavesStoppingToTheRank(loader.worker_init_fn),
            generator=torch.Generator(),  # the seed it draws for itself is not used, and costs no one a draw
            **batches,
            **in_workers,
        )

    def _does_not_fit(self, difference: str) -> RunDoesNotFit:
        return RunDoesNotFit(
            f"cannot go to batch {self.batch} of the data (epoch {self.epoch}, offset {self.offset}): in the order "
            f"made again from the random states at the epoch's opening, {difference} than at the checkpoint",
            hint="the data set, the batch size or the sampler has changed, or the sampler's order depends on more than "
            "random states and set_epoch(): then give the loader a state_dict/load_state_dict of its own",
        )


class _Feed:
    """What the clone reads from as its batch sampler: the order from the position on.

    `pending` holds the batches of indices that have left the order but not yet been handed out or passed over; the
    first is the one at the position. The first `reading` of them have been given to the reader, or withheld from it
    because they are planned to be skipped.

    It does not know the cursor: the clone's iterator must be freed with the last reference to the cursor, not by
    the cycle collector, which could run in a forked worker and would there shut down the workers of its parent.
    """

    def __init__(self) -> None:
        self._order: Order | None = None
        self._key: str | None = None
        self._batch = self._offset = 0
        self._pending: deque[Any] = deque()
        self.reading = 0
        self.planned: list[range] = []
        self.neighbours = Neighbours([], 0)
        self.last: Any = None
        """The batch of indices before the position, as the sampler gave it."""

    def begin(self, order: Order, last: Any, *, batch: int, offset: int, key: str | None) -> None:
        """Goes to a position. `key` names the epoch's random states in workers; None without workers."""
        self._order, self.last = order, last
        self._batch, self._offset, self._key = batch, offset, key
        self._pending.clear()
        self.reading = 0

    def __iter__(self) -> _Feed:
        self.reading = 0
        return self

    def __next__(self) -> Any:
        while True:
            ahead = self.reading
            indices = self.peek(ahead)
            self.reading += 1
            if not self.is_planned(ahead):
                return indices if self._key is None else Keyed(f"{self._key}/{self._offset + ahead}", indices)

    def peek(self, ahead: int = 0) -> Any:
        """The indices of the batch `ahead` of the position. StopIteration where the epoch has no such batch."""
        assert self._order is not None
        if ahead == len(self._pending):
            self._pending.append(self._order.take())
        return self.neighbours.instead(self._pending[ahead], self._batch + ahead)

    def pop(self) -> Any:
        """Moves the position past the first pending batch, and gives its indices."""
        taken = self.peek()
        self.last = self._pending.popleft()
        self.reading = max(0, self.reading - 1)
        self._batch += 1
        self._offset += 1
        return taken

    def is_planned(self, ahead: int = 0) -> bool:
        """Whether the batch `ahead` of the position is to be skipped."""
        return any(self._batch + ahead in window for window in self.planned)


def _samplers(index_sampler: Any) -> list[Any]:
    """The sampler and those that it wraps, outermost first."""
    found: list[Any] = []
    pending = [index_sampler]
    while pending:
        sampler = pending.pop()
        if sampler is None or any(sampler is known for known in found):
            continue
        found.append(sampler)
        pending += [getattr(sampler, "batch_sampler", None), getattr(sampler, "sampler", None)]
    return found


def _generators(owners: list[Any]) -> list[torch.Generator]:
    """The torch generators that these own, each once. The process's own is among the random states already."""
    found: list[torch.Generator] = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        known = [torch.default_generator, *found]
        if isinstance(generator, torch.Generator) and all(generator is not one for one in known):
            found.append(generator)
    return found


def _states(generators: list[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _set_states(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _as_indices(batch: Any) -> Indices:
    """What a sampler gave for one batch as plain integers; None where it is anything else."""
    entries = batch if isinstance(batch, (list, tuple)) else [batch]
    try:
        return tuple(operator.index(entry) for entry in entries)
    except TypeError:
        return None


def _fingerprint(batch: Any) -> str | None:
    indices = _as_indices(batch)
    return None if indices is None else xxhash.xxh3_64_hexdigest(repr(indices).encode())


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None
