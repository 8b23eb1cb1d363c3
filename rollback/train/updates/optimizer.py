"""Notices optimizer updates: made ones, those that a gradient scaler dropped, and their gradient norms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollback.errors import UsageError
from rollback.train.comm.beat import Gauges
from rollback.train.sharded import local_of
from rollback.train.updates.gradients import GradientNorms, Gradients
from rollback.train.updates.hooks import before_update, watch_method, weak_hook
from rollback.train.updates.wrappers import unwrap


class Updates:
    """The updates between two step ends. It hooks the optimizer, and `step` and `update` of a GradScaler, if there
    is one. model: as the script calls it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: object | None, model: nn.Module) -> None:
        self.on_begin: list[Callable[[bool | None], object]] = []
        """Called as the optimizer, or its scaler, begins: whether the script has written to the gradients since
        backward; None: not known."""
        self.on_forget: list[Callable[[], object]] = []
        self.attempted = False
        """Whether the optimizer, or its scaler, has begun."""
        self.happened = False
        """Whether the optimizer has: where its scaler alone did, that has dropped the update."""
        self.gradients: GradientNorms | None = None
        """Norms of the update's gradients; None: the optimizer has not begun, or there are no gradients."""
        self._found_inf: Tensor | None = None
        """Of a fused optimizer, on its device: above zero if the scaler drops the update."""
        self.in_training_mode = False
        """Whether the model was, as the newest update began."""
        self._optimizer, self._model = optimizer, model
        self._inside = unwrap(model)
        self._sensed = Gradients(optimizer, scaler, model)
        before_update(optimizer, self._before_update)
        self._scale_is_due = False
        if scaler is not None and hasattr(scaler, "step") and hasattr(scaler, "update"):
            watch_method(scaler, "step", weak_hook(self._before_scaled_update))
            watch_method(scaler, "update", weak_hook(self._before_scale))

    @property
    def telltale(self) -> nn.Parameter | None:
        """The parameter by which a backward is noticed (see `backward`): another one once the script has frozen it."""
        return self._sensed.present_telltale()

    @property
    def dropped_by_scaler(self) -> bool:
        return self.attempted and not self.happened

    @property
    def grad_norm(self) -> Tensor | float | None:
        """The norm of the applied gradient before clipping; None: the scaler dropped the update."""
        return self.gradients.total if self.gradients is not None and self.happened else None

    def gauges(self, *, told: bool) -> Gauges:
        """The gauges of this update, for the pulse. told: the script has reported the gradient's norm."""
        norms = self.gradients
        sharded = norms is not None and norms.squares is not None
        return Gauges(
            scale=self._sensed.scale,
            clip_factor=norms.clip_factor if norms else None,
            measured=norms.total if norms and not sharded else None,
            squares=norms.squares if norms and self.happened and not told else None,
            measured_squares=norms.squares if norms else None,
            found_inf=self._found_inf,
        )

    def expect_backward(self, last: bool) -> None:
        """A batch is handed out. last: probably the update's last one. Raises UsageError inside torch's `join`, where a
        rank without batches answers the collectives of others."""
        for item in self._model, self._optimizer:
            if getattr(getattr(item, "__dict__", {}).get("_join_config"), "enable", False):
                raise UsageError(
                    "the loop over the guard runs inside torch's join(), for ranks with different numbers of batches: "
                    "a rank that has none left would answer the model's collectives and not the guard's",
                    hint="take join() out and give all ranks the same number of batches: DistributedSampler does, with "
                    "drop_last=True or without; other loaders can be cut to what the shortest rank has (max_steps=N)",
                )
        self._sensed.expect(last)

    def forget(self) -> None:
        self.happened = self.attempted = self._scale_is_due = False
        self.gradients = self._found_inf = None
        self._sensed.forget()
        for act in self.on_forget:
            act()

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.attempted = self.happened = True
        self._found_inf = getattr(optimizer, "found_inf", None)
        self.gradients = self._sensed.before_step()
        self._begins()

    def _before_scaled_update(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if optimizer is self._optimizer:
            self.attempted = self._scale_is_due = True
            self._sensed.look()
            self._begins()
            # If the scaler drops the update, the optimizer's own hook is not called.
            self.gradients = self._sensed.seen

    def _begins(self) -> None:
        self.in_training_mode = self._inside.training
        for act in self.on_begin:
            act(self._sensed.written)

    def _before_scale(self, *_: Any, **__: Any) -> None:
        self._scale_is_due = False

    def require_scale(self) -> None:
        """Raise UsageError where the gradient scaler was not told that its update is over, and the script goes on. What
        it has found in the gradients is in no checkpoint: a resumed script would end with an assertion of torch, and
        one that is sent back would change the scale by what an undone update had found."""
        if self._scale_is_due and self._sensed.scale is not None:
            raise UsageError(
                "scaler.step(optimizer) was not followed by scaler.update() when the loop took its next batch: no "
                "checkpoint has what the scaler has found in the gradients since its last update()",
                hint="call scaler.update() behind scaler.step(optimizer), in the same pass through the loop's body",
            )


def applies_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it has any that is not zero. Before torch.distributed.checkpoint loads or saves an optimizer without a
    state, it lets it make one by an update of zeros; that is no training."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return any(item.layout is not torch.strided or bool(local_of(item).any()) for item in gradients)
