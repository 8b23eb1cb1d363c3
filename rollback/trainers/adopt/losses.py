"""What the script calls backward() on, and the norm that its clipping finds: kept until the guard is told."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rollback.train.guard import Guard


class UntoldLosses:
    """Of the update in hand. The guard is told each loss once, in their order."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        self._in_backward = False

    def scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        """GradScaler.scale: the loss is what is handed to it, not what it returns."""
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and isinstance(outputs, Tensor):
            self._scaled = weakref.ref(scaled), outputs.detach()
        return scaled

    def backward(self, original: Callable[..., Any], tensors: Any, *given: Any, **others: Any) -> Any:
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
            self._losses.append(tensors.detach() if scaled is None else scaled[1])
        return result

    def clip(
        self, original: Any, guard: Guard, optimizer: Optimizer, parameters: Any, *given: Any, **others: Any
    ) -> Any:
        """clip_grad_norm_: the norm before clipping, where it is that of all gradients, is the update's."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = original(parameters, *given, **others)
        kind = given[1] if len(given) > 1 else others.get("norm_type", 2.0)
        if self.is_norm_of_all(optimizer, parameters, kind):
            self.tell(guard, norm)
        return norm

    def is_norm_of_all(self, optimizer: Optimizer, parameters: list[Tensor], kind: float) -> bool:
        """Whether what is clipped to has the norm by which a guard measures an update: of all gradients, of kind 2."""
        clipped = {id(parameter) for parameter in parameters}
        trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        return bool(self._losses) and float(kind) == 2.0 and all(id(p) in clipped for p in trained)

    def tell(self, guard: Guard, grad_norm: Tensor | None = None) -> None:
        """grad_norm: of the update, before clipping, where that is known."""
        losses, self._losses = self._losses, []
        for loss in losses:
            guard.observe(loss, grad_norm=grad_norm if loss is losses[-1] else None)
