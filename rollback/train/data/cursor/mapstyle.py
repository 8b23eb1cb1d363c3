"""The cursor of a map-style DataLoader. It goes to a position by index and reads no data on the way.

The order of an epoch is a pure function of the random states at its opening and of the argument of `set_epoch`, so a
checkpoint keeps these. To go to batch b, the order is drawn again and followed up to b. The data are read by a clone of
the user's loader whose batch sampler begins at the position.

With worker processes, each batch is read under random states that are seeded from (base seed, epoch, offset). So random
augmentation, too, is a function of the position alone, for any number of workers and however far they have read ahead.
The generators that a data set or a collator holds as attributes are seeded along with them. Without workers, both draw
from the random states of the process, as in an unguarded run.

The clone keeps the batches in order: with `in_order=False`, "batch b" would mean nothing. A sampler's own `state_dict`
is not used; the sampler is run again from the opening, and the random generators that it holds as attributes are
restored first. If its order depends on anything else, such as the losses it was shown, there is no way back. So the
order is drawn twice at the opening of a run, and a sampler that gives two different orders is refused at once. A replay
that finds other indices than before is refused as well.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

import torch
from torch.utils.data import DataLoader

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.base import Cursor, DrawComparer, Indices, as_indices, first_differs, require_same_last
from rollback.train.data.cursor.description import description_of, length_of, other_length, samplers_of
from rollback.train.data.cursor.digest import digest_of_indices, hex_digest_of
from rollback.train.data.cursor.feed import IndexFeed, SamplerBatch
from rollback.train.data.cursor.generators import Generators
from rollback.train.data.cursor.loader_clone import clone_of
from rollback.train.data.cursor.order import BatchOrder, OneSize, gives_all, order_of, order_of_share, share_of
from rollback.train.data.quarantine import Replacements, unreadable
from rollback.train.data.workers import shut_down

_COMPARED = 16  # batches of the first epoch that are drawn twice from a sampler that is not torch's own


class MapStyleCursor(Cursor):
    """Reads a map-style `DataLoader` by index. The loader itself is never iterated."""

    kind = "map-style"
    leaves_out = True

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._loader = loader
        self._index_sampler: Iterable[Any] = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._generators = Generators(loader.generator, *samplers_of(self._index_sampler))
        self._in_data = Generators(loader.dataset, loader.collate_fn)
        self._opening: dict[str, Any] = {}
        self._base_seed: int | None = None
        self._seeding: torch.Tensor | None = None
        """State of the generator before the base seed is drawn from it. The workers' seeds follow from it."""
        self._unproven = False
        """Whether the batch before is to be read again, to see that the data come back."""
        self._unfit: RunDoesNotFit | None = None
        """What is wrong with the position, if `set_epoch` or another `batch_size` may still put it right."""
        self._owed: list[Any] = []  # states of generators that the first read of this process is yet to make
        self._random = rng.RawRandom()
        self._feed = IndexFeed()
        self._clone: DataLoader[Any] | None = None
        self._clone_epoch = 0
        self._reader: Iterator[Any] | None = None
        self._indices: Indices = None
        self._order_from, self._size = self._what_orders_it(), OneSize(self._index_sampler)
        """What the open epoch's order was made from."""

    def indices(self, *, reading: bool = False) -> Indices:
        if not reading:
            return self._indices
        return as_indices(self._feed.peek()) if self._next is not None else None

    @property
    def _next(self) -> SamplerBatch | None:
        """What the sampler gives for the next batch; None: the epoch has none, or it may be another one yet."""
        return self._feed.next if self.opened and self._unfit is None else None

    def order_digest(self) -> int | None:
        return self._feed.last.digest if self._feed.last is not None else None

    @property
    def at_end(self) -> bool:
        return self.opened and self._unfit is None and self._feed.next is None

    def unreadable(self, samples: Sequence[int]) -> list[int]:
        return unreadable(self._loader.dataset, samples)

    def plan_skips(self, first: int, last: int) -> None:
        window = range(first, last + 1)
        if window not in self._feed.planned:
            self._feed.planned.append(window)
            self._reader = None  # it may be reading what is now planned to be skipped

    def leave_out(self, listed: Sequence[tuple[int, Set[int]]]) -> None:
        if list(listed) != self._feed.replacements.listed:
            self._feed.replacements = self._replacements(listed)
            self._reader = None  # it may be reading what is now to be left out

    def _replacements(self, listed: Sequence[tuple[int, Set[int]]]) -> Replacements:
        """By the data set's length as it is now: it may change with the epoch."""
        length = length_of(self._loader.dataset) or 0
        return Replacements(listed, length, in_order=not gives_all(self._index_sampler, length))

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, **description_of(self._loader)}

    def _count_batches(self) -> int | None:
        return length_of(self._loader)

    def close(self) -> None:
        if self._clone is not None:
            shut_down(self._clone._iterator)
        self._clone = self._reader = None

    def _open(self) -> None:
        epochs = self._epoch_setters.at_opening(self.epoch)
        self._end_workers_of_epoch()
        self._unfit, self._unproven = None, self.batch == 0
        self._opening = {
            "rng": rng.capture(cuda=False),
            "generators": self._generators.states(),
            "epochs": epochs,
            "base_seed": self._base_seed if self._loader.persistent_workers else None,
        }
        if self.batch == 0:
            self._refuse_hidden_state()
        self._begin(self._make_order(), None)

    def _refuse_hidden_state(self) -> None:
        """Draws the order twice, unless the sampler is one of torch's own."""
        if self._trial() != self._trial():
            sampler = getattr(self._index_sampler, "sampler", self._index_sampler)
            raise UsageError(
                f"cannot go back in the order of the {type(sampler).__name__}: drawn twice from the same random "
                "states, it is not the same, so it depends on something else (a counter, or random numbers from where "
                "the guard cannot see)",
                hint="let the sampler draw from the global random states, or from a torch.Generator, numpy Generator "
                "or random.Random that is one of its attributes; what changes with the epoch goes through set_epoch()",
            )

    def _trial(self) -> list[int | None]:
        with rng.preserved():
            order = self._make_order()
            drawn: list[int | None] = []
            try:
                while not order.exact and len(drawn) < _COMPARED:
                    drawn.append(digest_of_indices(order.take()))
            except StopIteration:
                pass
            self._generators.restore(self._opening["generators"])
            if not order.exact:  # a sampler may raise its epoch by itself when it has been drawn to its end
                self._epoch_setters.give(self.epoch, self._opening["epochs"])
            return drawn

    def of_data(self) -> dict[str, Any]:
        here = self._loader.num_workers == 0  # else the workers have copies, and reseed them
        return {"data_generators": self._owed or (self._of_reading().states() if here else [])}

    def _of_reading(self) -> Generators:
        """Those that are there now: some are made when the first batch is read."""
        self._in_data = self._in_data.present(self._loader.dataset, self._loader.collate_fn)
        return self._in_data

    def of_next(self) -> dict[str, Any]:
        return {"next_indices": None if (following := self._next) is None else following.hex_digest}

    def _end_epoch(self) -> None:
        super()._end_epoch()
        self._end_workers_of_epoch()

    def _end_workers_of_epoch(self) -> None:
        """As torch's loader does: new workers for each epoch, with the data set as it is then, unless they persist."""
        if not self._loader.persistent_workers:
            self.close()

    def _fetch(self) -> Any:
        self._refuse_unfit()
        if self._feed.is_planned():  # said to be skipped, and wanted after all
            self._feed.planned.clear()
            self._reader = None
        reader = self._start_reading()
        owed = bool(self._owed) and not self._put_back()  # true only where there are no workers
        before = (self._random.read(), self._of_reading().states()) if self._loader.num_workers == 0 else None
        try:
            data = next(reader)
            if owed and len(self._of_reading()) == len(self._owed):  # it has made them, and has drawn from them
                self._unread(before)
                self._put_back()
                data = next(self._start_reading())
            elif owed and before is not None:
                self._require_as_many(self._of_reading(), self._owed)
        except BaseException as error:
            if not isinstance(error, StopIteration):
                self._unread(before)
            raise
        self._owed, self._indices = [], as_indices(self._feed.pop())
        return data

    def _unread(self, before: tuple[Any, list[Any]] | None) -> None:
        """The next read begins at the position again. before: the random states that it draws from."""
        self._reader = None
        if before is not None:  # no workers draw
            rng.restore(rng.tree_of(*before[0]))
            self._random.forget()
            self._of_reading().restore(before[1])

    def _put_back(self) -> bool:
        """False: the generators whose states are owed are not there yet."""
        self._owed = [] if not self._owed or self._of_reading().restore(self._owed) else self._owed
        return not self._owed

    def _pass_over(self) -> Indices:
        self._refuse_unfit()
        self._prove()  # now: the batch that is passed over might be one that must not be read
        indices = as_indices(self._feed.peek())
        if self._feed.reading and not self._feed.is_planned():
            self._reader = None  # workers are at it: they are told to begin again behind it
            self._feed.reading = 0
        self._feed.pop()
        return indices

    def _state(self) -> dict[str, Any]:
        told = {
            "opening": self._opening if self.opened else None,
            "base_seed": self._base_seed,
            "seeding": self._seeding if self._loader.persistent_workers else None,
            # Between two epochs nothing will draw the order again: the generators are all there is to put back.
            "generators": None if self.opened else self._generators.states(),
            "last_indices": self._feed.last.hex_digest if self.offset and self._feed.last is not None else None,
            **self._order_from,
        }
        if self._unfit is None or self._sought is None:
            return told
        return {name: self._sought.get(name) for name in told}  # nothing has been read since

    def _what_orders_it(self) -> dict[str, Any]:
        """What an order depends on besides the sampler's random states."""
        return {"length": length_of(self._loader.dataset), "share": share_of(self._index_sampler)}

    def _seek(self, state: dict[str, Any]) -> None:
        # In front of a later epoch, or in this process, the script may have set what the order depends on.
        settled = self._epoch_setters.all_read and not (self.epoch or self._opening)
        self._require_as_many(self._generators, (state["opening"] or state)["generators"])
        self._random.forget()
        self._reader, self._indices, self._unfit = None, None, None
        self._base_seed, self._seeding, self._owed = state["base_seed"], state["seeding"], state["data_generators"]
        if self.batch == 0 and self._loader.num_workers == 0:
            self._of_reading().begin_anew()  # what the first read made is not in the state
        with rng.preserved():
            if not self.opened:
                self._generators.restore(state["generators"])
                self._put_back()
                self._epoch_setters.leave()
                return
            self._opening = state["opening"]
            rng.restore(self._opening["rng"])
            self._generators.restore(self._opening["generators"])
            self._epoch_setters.give(self.epoch, self._opening["epochs"])
            order = self._make_order()
        self._put_back()
        self._unproven = True
        try:
            self._begin(order, self._move_to_position(order, state))
            self._compare_next(state)
        except RunDoesNotFit as error:
            if settled:
                raise
            self._unfit = error
        other = other_length(self._index_sampler, self._loader.dataset, state["length"])
        if other and not (self._unfit or self.accepts_other_length):  # in sequence the end alone is another
            self._unfit = self._does_not_fit(other)

    def _refuse_unfit(self) -> None:
        if self._unfit is not None:
            raise self._unfit
        if self._feed.next is not None and self._size.now() != self._size.at_opening:
            raise self._size.changed()

    def _move_to_position(self, order: BatchOrder, state: dict[str, Any]) -> Any:
        """Moves a fresh order to the position and returns the indices of the batch before it.

        Raises RunDoesNotFit if these are not what the checkpoint says. If the data set was changed on purpose, there is
        nothing to compare with.
        """
        if not self.offset:
            return None  # there is none in this epoch: its first one is read again when it has been read
        now = self._order_from
        other_data = self.accepts_other_length and state["length"] != now["length"]
        order.seek(self.offset - 1)
        try:
            last = order.take()
        except StopIteration:
            if other_data:
                return None  # the epoch is over
            raise self._does_not_fit("fewer batches come") from None
        if not other_data:
            checked = last if state["share"] == now["share"] else self._last_of(state["share"])
            if hex_digest_of(checked) != state["last_indices"]:
                raise self._does_not_fit("other indices come before it")
        return last

    def _compare_next(self, state: dict[str, Any]) -> None:
        """Compares the indices of the next batch: a sampler that depends on what it was shown may differ only there."""
        same = all(state[name] == value for name, value in self._order_from.items())
        if same and (told := state.get("next_indices")) is not None and self.of_next()["next_indices"] != told:
            raise self._does_not_fit("other indices come next")

    def _last_of(self, share: list[int | None] | None) -> Any:
        """Indices before the position in the order of another rank, of another number of ranks."""
        if (order := order_of_share(self._index_sampler, share)) is None:
            raise self._does_not_fit("the samples are shared out among the ranks in another way")
        with rng.preserved():
            order.begin()
            order.seek(self.offset - 1)
            return order.take()

    def _begin(self, order: BatchOrder, last: Any) -> None:
        self._reader = None
        key = f"{self._base_seed}/{self.epoch}" if self._loader.num_workers > 0 else None
        self._feed.replacements = self._replacements(self._feed.replacements.listed)
        self._feed.begin(order, last, batch=self.batch, offset=self.offset, key=key)

    def _make_order(self) -> BatchOrder:
        """Draws the epoch's order exactly as the loader does: the same draws, in its sequence, from its generators."""
        loader = self._loader
        lookahead = max(1, loader.num_workers * (loader.prefetch_factor or 0))
        order = order_of(self._index_sampler, lookahead)
        if self._opening["base_seed"] is None:  # else the workers live on, and so does their seed
            self._seeding = (loader.generator or torch.default_generator).get_state()
            self._base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
            if loader.num_workers > 0:  # which asks its sampler for an iterator a second time
                order = order_of(self._index_sampler, lookahead)
        order.begin()
        self._order_from, self._size = self._what_orders_it(), OneSize(self._index_sampler)
        return order

    def _start_reading(self) -> Iterator[Any]:
        self._prove()
        # With workers, which persist in the clone, this drops what they had read ahead, and sends them to the position.
        if self._reader is None:
            self._feed.copies = self._loader.num_workers if self._unproven and self.comparer is not None else 0
            self._reader = iter(self._present_clone())
        return self._reader

    def _present_clone(self) -> DataLoader[Any]:
        if self._clone_epoch != self.epoch:
            self._end_workers_of_epoch()
        if self._clone is None:
            self._clone, self._clone_epoch = clone_of(self._loader, self._feed, self._seeding), self.epoch
        return self._clone

    def _prove(self) -> None:
        """Once at a position that was gone to, or behind its first batch where none comes before it in the epoch; so
        also in a new run. Behind a rollback hardly a batch comes that was drawn before."""
        if not self._unproven or self._feed.last is None or (comparer := self.comparer) is None:
            return
        self._unproven, reader, self._reader = False, self._reader, None  # a copy that is left were a later batch's
        copies = [next(reader) for _ in range(self._loader.num_workers)] if reader is not None else []
        self._reader = reader
        if not comparer.knows(self.batch - 1):
            return
        try:
            self._read_last_again(comparer, copies)
        except RunDoesNotFit as error:
            raise (error if self._indices is None or self.batch > 1 else first_differs(error)) from None

    def _read_last_again(self, comparer: DrawComparer, copies: list[Any]) -> None:
        """Checks that the batch before the position is what it was. A worker reads it under the random states of that
        time, or has: copies. Without workers those states are not known."""
        if self._loader.num_workers > 0:
            if not copies:
                reader = self._reader = self._from_last()
                copies = [next(reader)]
            comparer.check(self.batch - 1, copies[-1])
            return
        states, self._reader = self._of_reading().states(), None
        with rng.preserved():
            require_same_last(self.batch, self._last_under, comparer)
        self._of_reading().restore(states)  # those that this has made are owed

    def _last_under(self, key: str) -> Any:
        generators = self._of_reading()
        rng.seed_all(key)
        generators.seed(key)
        data = next(self._from_last())
        return data if len(self._of_reading()) == len(generators) else self._last_under(key)  # it has made some

    def _from_last(self) -> Iterator[Any]:
        self._feed.repeat_last()
        return iter(self._present_clone())

    def _does_not_fit(self, difference: str) -> RunDoesNotFit:
        return RunDoesNotFit(
            f"cannot go to batch {self.batch} of the data (epoch {self.epoch}, offset {self.offset}): in the order "
            f"made again from the random states at the epoch's opening, {difference} than at the checkpoint",
            hint="is it another data set, batch size, sampler or seed? Another training needs another run directory. "
            "Or the order follows from more than random states and set_epoch(): then give the loader a state_dict",
        )
