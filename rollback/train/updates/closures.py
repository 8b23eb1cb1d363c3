"""When an optimizer is about to apply gradients: before its step, or in it, where the script hands over a closure.

With a closure (Lightning does so for every optimizer, LBFGS needs one) the step itself runs forward and backward: when
it begins, the gradients are still those of the update before. They are the update's own once the closure has run. LBFGS
runs it several times, along the way: what it found first is the gradient where the update began.
"""

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def before_update(optimizer: Optimizer, method: Any) -> RemovableHandle:
    """Call `method(optimizer)` once for each step, when the gradients of its update are there, for as long as the
    method's object lives."""
    reference, act = weakref.ref(method.__self__), method.__func__

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if (owner := reference()) is None:
            return None
        if closure is None:
            act(owner, optimizer)
            return None
        first = True

        def closure_then_act(*given: Any, **others: Any) -> Any:
            nonlocal first
            result = closure(*given, **others)
            if first:
                first = False
                act(owner, optimizer)
            return result

        if len(args) > 1:
            return (args[0], closure_then_act, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_act}

    return optimizer.register_step_pre_hook(before_step)
