"""What the state of a streaming data set of Hugging Face's `datasets` does not tell.

Its `load_state_dict` holds for every later pass over the same epoch, so where the script tells it no epoch by
`set_epoch`, each later epoch would begin in the middle as well. And what its shuffle buffer holds is lost.
"""

from typing import Any

from torch.utils.data import DataLoader

_MODULE = "datasets.iterable_dataset"
_NO_EPOCH = -1  # a state of another epoch than the present one is not used
_MOST = 1000  # data sets within a data set


class HuggingFaceStream:
    """Such a data set in `loader`, which may be the data set itself."""

    def __init__(self, dataset: Any, loader: Any) -> None:
        self._dataset = dataset
        self._in_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        self._workers_persist = isinstance(loader, DataLoader) and loader.persistent_workers

    @classmethod
    def of(cls, loader: Any) -> "HuggingFaceStream | None":
        dataset = loader.dataset if isinstance(loader, DataLoader) else loader
        known = any((kind.__module__, kind.__name__) == (_MODULE, "IterableDataset") for kind in type(dataset).__mro__)
        return cls(dataset, loader) if known else None

    def loses_its_place(self) -> bool:
        """Whether its state is of no use: it leaves out a shuffle buffer, or holds in workers that live on."""
        return self._workers_persist or self._has_buffer()

    def _has_buffer(self) -> bool:
        waiting, seen = [getattr(self._dataset, "_ex_iterable", None)], 0
        while waiting and seen < _MOST:
            part, seen = waiting.pop(), seen + 1
            if type(part).__name__ == "BufferShuffledExamplesIterable":
                return True
            inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
            waiting += [item for item in inner if item is not None]
        return False

    def begin_anew(self) -> None:
        """The next pass is to begin at the beginning, whatever state was loaded before. New workers do so anyway."""
        if not self._in_workers:
            self._dataset.load_state_dict({**self._dataset.state_dict(), "epoch": _NO_EPOCH})
