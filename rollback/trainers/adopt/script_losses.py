"""What the script calls backward() on: the loss of its batch."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Scaled(NamedTuple):
    tensor: "weakref.ref[Tensor]"
    loss: Tensor
    scale: Callable[[Tensor], Tensor]
    """By which it was scaled."""


class ScriptLosses:
    """Told as they come. The norm of the gradients the guard measures by itself, before they are clipped."""

    def __init__(self) -> None:
        self._scaled: list[_Scaled] = []
        self._in_backward = False

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """GradScaler.scale: the loss is what is handed to it, not what it returns."""
        scaled = original(scaler, outputs)
        pairs = zip(scaled, outputs, strict=True) if isinstance(outputs, (list, tuple)) else ((scaled, outputs),)
        # One that nobody has any more was scaled for nothing, or its loss was told by a guard of a library's loop.
        self._scaled = [item for item in self._scaled if item.tensor() is not None]
        for tensor, loss in pairs:
            if isinstance(tensor, Tensor) and isinstance(loss, Tensor):
                self._scaled.append(_Scaled(weakref.ref(tensor), loss.detach(), partial(original, scaler)))
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
            observe(self._loss_of(tensors))
        return result

    def _loss_of(self, root: Tensor) -> Tensor:
        """What backward was called on, without the scaler's factor: also of a sum of scaled losses, or a part."""
        if not self._scaled:
            return root.detach()
        for scaled in self._scaled:
            if scaled.tensor() is root:
                self._scaled = [item for item in self._scaled if item is not scaled]
                return scaled.loss
        factor = self._scaled[-1].scale(torch.ones((), device=root.device))
        self._scaled.clear()
        return root.detach().float() / factor
