"""The cursor of a loader that is always iterated from its start: a list of batches, an IterableDataset's loader."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor.digest import Digest
from rollback.train.data.cursor.inorder import InOrderCursor


class ReiteratedCursor(InOrderCursor):
    """Goes to offset k of an epoch by iterating again from the epoch's opening and dropping k batches.

    That reads k batches, which can take hours in a long epoch of a large data set. A map-style data set, or a loader
    with `state_dict` and `load_state_dict`, needs no such reading.

    `iter(loader)` draws from the random states of the process, as in an unguarded run. Reading batches draws from a
    stream that is split off there, so batch b is the same whatever the model draws in between. This is the one
    difference from an unguarded run. The batches must depend on these random states alone. Workers that outlive an
    epoch would carry states of their own, so a DataLoader's `persistent_workers` has no effect here. To find hidden
    state early, the first batch of a run is read twice from the same random states; if the two differ, UsageError.
    """

    kind = "re-iterated"
    tells_length = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._stream: rng.RandomStream | None = None
        self._left: Iterator[Any] | None = None

    def _open(self) -> None:
        if self.batch == 0:
            self._refuse_hidden_state()
        epochs = self._epoch_setters.at_opening(self.epoch)
        self._opening = {"rng": rng.capture(cuda=False), "epochs": epochs, "generators": self.generators.states()}
        self._ahead = None
        self._begin()

    def _refuse_hidden_state(self) -> None:
        first, second = self._trial(), self._trial()
        if first.value != second.value:
            raise UsageError(
                f"cannot go back in the batches of a {type(self._loader).__name__}: iterated twice from the same "
                "random states, the first batch is not the same, so it depends on something else (a position, a "
                "counter or a random generator of its own)",
                hint="let its __iter__ begin anew each time and draw from the global random states of Python, NumPy or "
                "torch alone; or give it a state_dict and load_state_dict. Of a wrapper that counts its passes, as "
                "Lightning Fabric's does, hand over the DataLoader inside (with a DistributedSampler), and call "
                "sampler.set_epoch(epoch) and fabric.to_device(batch) in the loops",
            )

    def _trial(self) -> Digest:
        states = self.generators.states()
        with rng.preserved():
            self._begin()
            try:
                return Digest(self._read())
            except Exception:  # noqa: BLE001 - a sample that cannot be read is seen to where it is read in earnest
                return Digest(())
            finally:
                self._let_go(self._iterator)
                self._iterator = None
                self.generators.restore(states)

    def _begin(self) -> None:
        if isinstance(self._loader, DataLoader) and self._loader.persistent_workers:
            self._loader._iterator = None
        self._iterator = iter(self._loader)
        self._stream = rng.RandomStream.split_off()

    def _read(self) -> Any:
        assert self._iterator is not None
        assert self._stream is not None
        with self._stream:
            return next(self._iterator)

    def _state(self) -> dict[str, Any]:
        # Between two epochs there is no opening to go by: what the next one is drawn from is put back as it is now.
        return {
            "opening": self._opening if self.opened else None,
            "generators": None if self.opened else self.generators.states(),
        }

    def _give_up_iterator(self) -> None:
        self._let_go(self._iterator)
        self._leave_iterator()

    def _leave_iterator(self) -> None:
        self._left = self._left if self._iterator is None else self._iterator
        self._iterator = self._ahead = None

    def _seek(self, state: dict[str, Any]) -> None:
        self._leave_iterator()
        self._opening = state["opening"]
        self._require_as_many(self.generators, (self._opening or state)["generators"])
        if self._opening is None:
            self.generators.restore(state["generators"])
            self._epoch_setters.leave()

    def _resume(self) -> None:
        assert self._opening is not None
        with rng.preserved():
            rng.restore(self._opening["rng"])
            self.generators.restore(self._opening["generators"])
            self._epoch_setters.give(self.epoch, self._opening["epochs"])
            self._begin()
        if self._iterator is self._left:
            raise self._does_not_fit("iterating it again gives the same half-used iterator")
        self._left = None
        for dropped in range(self.offset):
            try:
                data = self._read()
            except StopIteration:
                raise self._does_not_fit(f"iterated again, its epoch ends after {dropped} batches") from None
            if self.comparer is not None:
                self.comparer.check(self.batch - self.offset + dropped, data)

    def _does_not_fit(self, reason: str) -> RunDoesNotFit:
        return RunDoesNotFit(
            f"cannot go to batch {self.batch} of {type(self._loader).__name__} (epoch {self.epoch}, offset "
            f"{self.offset}): {reason}",
            hint="its __iter__ must begin anew each time, and give the same data from the same random states",
        )
