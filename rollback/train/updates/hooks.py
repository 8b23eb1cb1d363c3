"""Hooks that keep nothing alive."""

import weakref
from collections.abc import Callable
from typing import Any


def weak_hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """This method as a hook of a module, parameter or optimizer, for as long as its object lives.

    The garbage collector does not see a parameter's hooks. One that held a part of the guard would keep all of it, its
    model and its copies in memory until the process ends.
    """
    reference, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(*args: Any) -> Any:
        owner = reference()
        return function(owner, *args) if owner is not None else None

    return hook
