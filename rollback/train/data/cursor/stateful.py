"""The cursor of a loader that saves its own position: torchdata's StatefulDataLoader, a streaming data set; and what
the state of a stream of Hugging Face's leaves out."""

import copy
import inspect
from operator import or_
from typing import Any

from torch.utils.data import DataLoader

from rollback.errors import UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.base import cannot_ask_again
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.cursor.inorder import InOrderCursor
from rollback.train.data.cursor.nodes import nodes_of, reading_nothing_ahead, require_no_drawing_threads

_HF_MODULE = "datasets.iterable_dataset"
_TORCHDATA_S = "torchdata", "StatefulDataLoader"
_HF_NO_EPOCH = -1  # a state of another epoch than the present one is not used
_HF_MOST_PARTS = 1000  # data sets within a data set


class StatefulCursor(InOrderCursor):
    """The loader itself goes to the position. What its `state_dict` leaves out cannot be restored.

    The contract is torchdata's. `state_dict` is valid after each batch. After `load_state_dict`, the next
    `iter(loader)` goes on from there, or at an epoch's end begins the next epoch. During that `iter` the random states
    of the epoch's opening are restored, for loaders that seed themselves there. A generator function runs only when its
    first batch is fetched, so they are restored for that batch too, unless its batches were seen to draw random numbers
    themselves. `skip` reads a batch and drops it. The state must be a tree of JSON values and tensors, because a
    checkpoint holds nothing else. To ask for it before every batch would cost too much. So where reading has raised and
    the iterator is known not to outlive that, `next` raises UsageError from then on.
    """

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._beginning: Any = None
        """The loader's state at the beginning of the first epoch; None if this process began later."""
        self._to_load: Any = None
        """The state to be loaded before the loader is iterated again."""
        self._unbegun = False
        """Whether the iterator is a generator for a resumed epoch and has not run yet."""
        self._draws: bool | None = None
        """Whether a generator's last batch drew from the random states of the process. First batches do not count."""
        self._drawn_from = [False] * len(self.generators)
        """The same of each of its own generators, of all batches of the epoch but the first one."""
        self._is_lost = False
        """Whether reading has raised, and the iterator has not the same batch for who asks again."""
        self._hf_stream = HuggingFaceStream.of(loader)
        self._has_moved = False
        """Whether the loader has been sent to a position."""
        self._rehearsed_at = rehearsed_at(loader)
        """The batch of a new run for which the loader is sent back once, to see that it can be; None: for none."""
        self._stream: Any = None
        """The random states under which the batch at the position was read ahead in a step; else None."""

    def loader_state(self) -> Any:
        return self._loader.state_dict() if self._to_load is None else self._to_load

    def _open(self) -> None:
        told = self._epoch_setters.told is not None
        epochs = self._epoch_setters.at_opening(self.epoch)
        self._ahead, self._is_lost = None, False
        self._drawn_from = [False] * len(self.generators)
        if self._hf_stream is not None and self._has_moved:
            self._to_load = None
            self._hf_stream.begin_anew()
        resumed = self._to_load is not None
        self._load()
        if resumed and told:  # the state is of the epoch before, and may say so
            self._epoch_setters.insist(epochs)
        self._opening = {"rng": rng.capture(cuda=False), "epochs": epochs, "generators": self.generators.states()}
        self._iterator = iter(self._loader)
        if resumed and told:  # torchdata's loader has loaded it only now
            self._epoch_setters.insist(epochs)
        if self.batch == 0:
            with rng.preserved():
                self._beginning = copy.deepcopy(self._loader.state_dict())

    def _load(self) -> None:
        state, self._to_load = self._to_load, None
        if state is not None:
            with rng.preserved():
                self._loader.load_state_dict(copy.deepcopy(state))

    def _fetch(self) -> Any:
        at = self._rehearsed_at
        if self.accepts_other_length or (self.epoch, self.offset, self.batch) != (0, at, at):
            return super()._fetch()
        state, states = self.state_dict(), rng.capture(cuda=False)
        before = Digest(super()._fetch()).value
        self._let_go(self._iterator)
        self._seek(state)
        rng.restore(states)
        data = super()._fetch()
        if Digest(data).value != before:
            raise UsageError(
                f"cannot go back in the batches of a {type(self._loader).__name__}: sent to batch {self.batch} by its "
                "own state, it gives another one than before, so its worker processes draw random numbers, or keep "
                "something else, that this state has not",
                hint="let them draw from the sample's index, as by random.Random(index); or take num_workers=0; or "
                "torch's DataLoader; or go on with the data as they come by --accept-data-change",
            )
        return data

    def _give_up_iterator(self) -> None:
        self._is_lost = isinstance(self._loader, DataLoader) or inspect.isgenerator(self._iterator)

    def _read(self) -> Any:
        if self._is_lost:
            raise cannot_ask_again(type(self._loader).__name__)
        stream, self._stream = self._stream, None
        if stream is None:
            data = self._read_in_process()
            require_no_drawing_threads(self._loader, self.batch)
            return data
        with rng.preserved():
            rng.restore(stream)
            return self._read_in_process()

    def _read_in_process(self) -> Any:
        assert self._iterator is not None
        if not self._unbegun:
            if self.offset == 0 or not inspect.isgenerator(self._iterator):
                return next(self._iterator)
            before, own = rng.cpu_states(), self.generators.states()
            data = next(self._iterator)
            self._draws = rng.drawn_since(before)
            self._drawn_from = [*map(or_, self._drawn_from, self.generators.drawn_since(own))]
            return data
        self._unbegun = False
        assert self._opening is not None
        with rng.preserved():
            rng.restore(self._opening["rng"])
            return next(self._iterator)

    def _state(self) -> dict[str, Any]:
        # torchdata's loader begins an epoch, with draws from the random states, when it is asked before its first one.
        begun = self.opened or self.epoch > 0
        state = (self._ahead.state if self._ahead else self.loader_state()) if begun else None
        generators = self._ahead.generators if self._ahead else self.generators.states()
        return {
            "opening": self._opening if self.opened else None,
            "loader": state,
            "draws": self._draws,
            "drawn_from": self._drawn_from,
            "generators": generators,
            "stream": self._ahead.stream if self._ahead else self._stream,
        }

    def _seek(self, state: dict[str, Any]) -> None:
        self._iterator, self._ahead, self._unbegun, self._is_lost = None, None, False, False
        self._has_moved = True
        self._require_as_many(self.generators, state["generators"])
        self._opening, self._draws = state["opening"], state["draws"]
        self._stream = state.get("stream")  # checkpoints had none once
        # Where no epoch had begun, what has been read here is to be read again.
        self._to_load = self._beginning if state["loader"] is None else state["loader"]
        self.generators.restore(state["generators"])
        drawn_from = state.get("drawn_from", ())  # as above
        as_many = len(drawn_from) == len(self.generators)
        self._drawn_from = [*drawn_from] if as_many else [False] * len(self.generators)
        if self._opening is None:
            self._epoch_setters.leave()

    def _resume(self) -> None:
        assert self._opening is not None
        self._epoch_setters.give(self.epoch, self._opening["epochs"])
        at_position = self.generators.states()
        self.generators.restore(self._opening["generators"])
        self._load()  # which has its own word about those that its state tells
        with rng.preserved(), reading_nothing_ahead(self._loader):
            rng.restore(self._opening["rng"])
            self._iterator = iter(self._loader)
        self._unbegun = self.offset > 0 and not self._draws and inspect.isgenerator(self._iterator)
        # A generator function is yet to draw from those that it draws from where an epoch begins.
        kept = zip(self._drawn_from, at_position, self.generators.states(), strict=True)
        self.generators.restore([then if drawn or not self._unbegun else now for drawn, then, now in kept])


def rehearsed_at(loader: Any) -> int | None:
    """A batch whose worker process has read before, in front of which torchdata's loader or nodes have just taken a
    snapshot of their workers: from an older one these would read again all that they have read, and draw the same.
    None where there are no such processes. A loader of the script's own may be fit to be sent by a new process alone.
    """
    if any((kind.__module__.partition(".")[0], kind.__name__) == _TORCHDATA_S for kind in type(loader).__mro__):
        workers, every = loader.num_workers, getattr(loader, "snapshot_every_n_steps", 1)
    else:
        workers = max(
            (node.num_workers for node in nodes_of(loader) if getattr(node, "method", "") == "process"), default=0
        )
        every = 1
    return -(-workers // every) * every or None


class HuggingFaceStream:
    """What the state of a streaming data set of Hugging Face's `datasets` does not tell. It is in `loader`, or that
    itself.

    Its `load_state_dict` holds for every later pass over the same epoch, so where the script tells it no epoch by
    `set_epoch`, each later epoch would begin in the middle as well. And what its shuffle buffer holds is lost.
    """

    def __init__(self, dataset: Any, loader: Any) -> None:
        self._dataset = dataset
        self._in_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        self._workers_persist = isinstance(loader, DataLoader) and loader.persistent_workers

    @classmethod
    def of(cls, loader: Any) -> "HuggingFaceStream | None":
        dataset = loader.dataset if isinstance(loader, DataLoader) else loader
        known = any(
            (kind.__module__, kind.__name__) == (_HF_MODULE, "IterableDataset") for kind in type(dataset).__mro__
        )
        return cls(dataset, loader) if known else None

    def loses_its_place(self) -> bool:
        """Whether its state is of no use: it leaves out a shuffle buffer, or holds in workers that live on."""
        return self._workers_persist or self._has_buffer()

    def _has_buffer(self) -> bool:
        waiting, seen = [getattr(self._dataset, "_ex_iterable", None)], 0
        while waiting and seen < _HF_MOST_PARTS:
            part, seen = waiting.pop(), seen + 1
            if type(part).__name__ == "BufferShuffledExamplesIterable":
                return True
            inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
            waiting += [item for item in inner if item is not None]
        return False

    def begin_anew(self) -> None:
        """The next pass is to begin at the beginning, whatever state was loaded before. New workers do so anyway."""
        if not self._in_workers:
            self._dataset.load_state_dict({**self._dataset.state_dict(), "epoch": _HF_NO_EPOCH})
