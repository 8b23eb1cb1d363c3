"""What a script iterates in place of its loaders: of the one that is trained on, and of others, as far as is known."""

from collections.abc import Callable, Iterator
from typing import Any

from rollback.trainers.adopt.epoch_loop import EpochMoved


class ScriptPass:
    """The batches of one pass. begin: called with the first one, for what `draw` is given then. go_on: asked where
    there is no further one, for what `draw` is given from there; None: the script is told of the end.

    No generator: behind an error that it has raised, one is at its end. A script that catches such an error, to leave
    out a sample that cannot be read, would take that for the end of the epoch.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[Any, ...]],
        draw: Callable[..., Any],
        go_on: Callable[[], tuple[Any, ...] | None] = lambda: None,
    ) -> None:
        self._begin, self._draw, self._go_on = begin, draw, go_on
        self._begun: tuple[Any, ...] | None = None
        self._over = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        try:
            if self._begun is None:
                self._begun = self._begin()
            return self._drawn(self._begun)
        except (StopIteration, EpochMoved):
            self._over = True
            raise

    def _drawn(self, begun: tuple[Any, ...]) -> Any:
        while True:
            try:
                return self._draw(*begun)
            except StopIteration:
                if (further := self._go_on()) is None:
                    raise
            self._begun = begun = further


class OtherBatches:
    """An iterator over a loader that is not trained on, with all attributes that it has: a script may end its workers.
    taken: told of the loader behind each batch that is taken."""

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
