"""Other loaders of a watched script than the one that is trained on, as far as is known."""

from collections.abc import Callable
from typing import Any


class OtherBatches:
    """An iterator over one of them. taken: told before a batch is handed out."""

    def __init__(self, taken: Callable[[Any], None], batches: Any, loader: Any) -> None:
        self._taken, self._batches, self._loader = taken, batches, loader

    def __iter__(self) -> "OtherBatches":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken(self._loader)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def described(ours: Any, other: Any) -> str:
    first, second = _size_of(ours), _size_of(other)
    again = " (one that is made anew for each epoch is another one: make it once, before)" if first == second else ""
    return f"one of {first}, one of {second}{again}"


def _size_of(loader: Any) -> str:
    try:
        return f"{len(loader)} batches of a {type(loader.dataset).__name__}"
    except (TypeError, AttributeError):
        return f"a {type(loader).__name__}"
