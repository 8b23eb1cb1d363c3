"""Hooks that keep nothing alive, and that copies of the hooked objects have not."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class _WeakHook:
    """See `weak_hook`."""

    def __init__(self, method: Any) -> None:
        self._owner, self._function = weakref.ref(method.__self__), method.__func__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owner = self._owner()
        return self._function(owner, *args, **kwargs) if owner is not None else None

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


class _WatchedMethod:
    """See `watch_method`."""

    def __init__(self, owner: Any, name: str, before: Callable[..., object]) -> None:
        self._owner, self._name, self._before = owner, name, before
        self._original = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(*args, **kwargs)
        return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the owner has no attributes yet when this is made: it gets the method of its own class."""
        return getattr, (self._owner, self._name)


def watch_method(owner: Any, name: str, before: Callable[..., object]) -> None:
    """Call `before`, with the same arguments, before each call of this object's method. Copies of the object, and what
    is loaded of its pickle, tell nothing and call their own method."""
    setattr(owner, name, _WatchedMethod(owner, name, before))
