"""Hooks that keep nothing alive, and that copies of the hooked objects have not; and what is called in front of an
update."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class _WeakHook:
    """Calls a method for as long as its object lives; then nothing."""

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


class _UpdateHook(_WeakHook):
    """See `before_update`."""

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if closure is None:
            if (owner := self._owner()) is not None:
                self._function(owner, optimizer)
            return None
        first, act = True, super().__call__  # an optimizer may keep its closure, which then keeps nothing else alive

        def closure_then_act(*given: Any, **others: Any) -> Any:
            nonlocal first
            result = closure(*given, **others)
            if first:
                first = False
                act(optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_then_act, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_act}


class _WatchedMethod:
    """In the place of a method: calls `before`, then the method."""

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


def before_update(optimizer: Optimizer, method: Callable[[Optimizer], object]) -> RemovableHandle:
    """Call `method(optimizer)` once for each step, when the gradients of its update are there, for as long as the
    method's object lives.

    With a closure (Lightning hands one over to every optimizer, LBFGS needs one) the step itself runs forward and
    backward: when it begins, the gradients are still those of the update before. They are the update's own once the
    closure has run. LBFGS runs it several times: what it found first is the gradient where the update began.
    """
    return optimizer.register_step_pre_hook(_UpdateHook(method))
