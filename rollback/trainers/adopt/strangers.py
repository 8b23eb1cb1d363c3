"""Batches of other loaders than the one that is trained on, as far as is known."""

from collections.abc import Callable
from typing import Any


class StrangeBatches:
    """An iterator over such a loader. taken: called for each batch that the script takes of it."""

    def __init__(self, taken: Callable[[], None], batches: Any) -> None:
        self._taken, self._batches = taken, batches

    def __iter__(self) -> "StrangeBatches":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken()
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def described(loader: Any) -> str:
    """In words, for a message."""
    try:
        return f"{len(loader)} batches of a {type(loader.dataset).__name__}"
    except (TypeError, AttributeError):
        return f"a {type(loader).__name__}"
