"""Noticing optimizer updates: that one happened, that a gradient scaler dropped one, and how large its gradient was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollback.errors import UsageError


class Updates:
    """What happened between two step ends. Hooks the optimizer, and `step` of a GradScaler if one is handed over.

    The gradient norm is measured at the optimizer's pre-step hook (after unscaling and clipping, global L2 over all
    parameters, on the device, not waited for) unless the script gives it to `observe`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: object | None) -> None:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise UsageError(
                f"the optimizer, a {type(optimizer).__name__}, has no register_step_pre_hook",
                hint="hand over a torch.optim.Optimizer; a wrapper usually has the real one in an attribute",
            )
        self.happened = False
        self.attempted = False
        self.grad_norm: Tensor | None = None
        self.measuring = True
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(self._before_step)
        if scaler is not None and hasattr(scaler, "step"):
            self._count_attempts(scaler)

    @property
    def dropped_by_scaler(self) -> bool:
        return self.attempted and not self.happened

    def forget(self) -> None:
        self.happened = self.attempted = False
        self.grad_norm = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.happened = True
        if self.measuring:
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if gradients:
                self.grad_norm = torch.nn.utils.get_total_norm(gradients)

    def _count_attempts(self, scaler: Any) -> None:
        original: Callable[..., Any] = scaler.step

        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self.attempted |= optimizer is self._optimizer
            return original(optimizer, *args, **kwargs)

        scaler.step = step
