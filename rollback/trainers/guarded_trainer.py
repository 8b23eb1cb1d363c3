"""A Trainer of a library under guard: methods of its objects, in whose place ours stand."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from rollback.errors import UsageError
from rollback.train.guard import Guard
from rollback.train.start import attach


class GuardedTrainer:
    """One training of one Trainer; each library has a class of its own. entry: the Trainer's method that trains. guard:
    once that is under way."""

    entry: ClassVar[str]
    guard: Guard

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        self._trainer, self._settings = trainer, settings
        self._originals: dict[str, Callable[..., Any]] = {}
        self._owners: dict[str, Any] = {}

    @classmethod
    def require_unprotected(cls, trainer: Any) -> None:
        if isinstance(getattr(getattr(trainer, cls.entry), "__self__", None), cls):
            raise UsageError("this Trainer has been given to rollback.protect before", hint="call it once")

    def _require_first(self) -> None:
        if hasattr(self, "guard"):
            raise UsageError(
                f"trainer.{self.entry}() a second time: rollback.protect guards one training",
                hint="train with another Trainer in a launch of its own: rollback launch --run DIR",
            )

    def _replace(self, owner: Any, *names: str, by: Any = None) -> None:
        """`owner` calls what `by` has of these names from now on, by default this object. A name is replaced in one
        owner only."""
        for name in names:
            self._replace_one(owner, name, getattr(self if by is None else by, name))

    def _replace_one(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._originals[name], self._owners[name] = getattr(owner, name), owner
        setattr(owner, name, instead)

    def uninstall(self) -> None:
        """The Trainer trains as if it had never been protected."""
        for name, owner in self._owners.items():
            delattr(owner, name)
            if getattr(owner, name) != self._originals[name]:  # that was no method of its class
                setattr(owner, name, self._originals[name])


@contextlib.contextmanager
def refusing(*, status: int = 0) -> Iterator[None]:
    """A UsageError ends this rank. status: see `attach.refuse`."""
    try:
        yield
    except UsageError as error:
        attach.refuse(error, status=status)


def numbered(name: str, items: Iterable[Any]) -> dict[str, Any]:
    """Each by the name that a guard keeps it by: `scheduler`, `scheduler_2`."""
    return {f"{name}_{number}" if number > 1 else name: item for number, item in enumerate(items, 1)}
