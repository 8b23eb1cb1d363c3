"""Hooks that keep nothing alive."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class _WeakHook:
    """See `weak_hook`."""

    def __init__(self, method: Any) -> None:
        self._owner, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return self._function(owner, *args) if owner is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        """A module is saved with its hooks, and copied. Its copy tells the guard nothing, and can be loaded where there
        is no guard: this is something of Python's own that does nothing."""
        return getattr, (contextlib.nullcontext(), "__exit__")


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """This method as a hook of a module, parameter or optimizer, for as long as its object lives.

    The garbage collector does not see a parameter's hooks. One that held a part of the guard would keep all of it, its
    model and its copies in memory until the process ends.
    """
    return _WeakHook(method)
