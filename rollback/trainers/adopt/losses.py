"""What the script calls backward() on: the loss of its batch."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


class ScriptLosses:
    """Told as they come. The norm of the gradients the guard measures by itself, before they are clipped."""

    def __init__(self) -> None:
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._in_backward = False

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """GradScaler.scale: the loss is what is handed to it, not what it returns."""
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
            self._scaled = weakref.ref(scaled), outputs.detach()
        return scaled

    def backward(
        self, original: Callable[..., Any], observe: Callable[[Tensor], None], tensors: Any, *given: Any, **others: Any
    ) -> Any:
        """torch.autograd.backward, by which all calls of backward go; one inside another is no loss."""
        if self._in_backward:
            return original(tensors, *given, **others)
        self._in_backward = True
        try:
            result = original(tensors, *given, **others)
        finally:
            self._in_backward = False
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            scaled = self._scaled if self._scaled is not None and self._scaled[0]() is tensors else None
            observe(tensors.detach() if scaled is None else scaled[1])
        return result
