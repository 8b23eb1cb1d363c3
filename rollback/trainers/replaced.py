"""Methods of a library's objects in whose place ours stand: `Replaced`."""

from collections.abc import Callable
from typing import Any


class Replaced(dict[str, Callable[..., Any]]):
    """The originals, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[str, Any] = {}

    def replace(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """`owner` calls `instead` by that name from now on. A name is replaced in one owner only."""
        self[name], self._owners[name] = getattr(owner, name), owner
        setattr(owner, name, instead)

    def replace_by(self, ours: Any, owner: Any, *names: str) -> None:
        """The same, by what `ours` has of these names."""
        for name in names:
            self.replace(owner, name, getattr(ours, name))

    def put_back(self) -> None:
        for name, owner in self._owners.items():
            delattr(owner, name)
            if getattr(owner, name) != self[name]:  # that was no method of its class
                setattr(owner, name, self[name])
