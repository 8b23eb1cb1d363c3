"""Gradient norms, tensor by tensor: measured where backward ends and looked at again where the optimizer begins.

Clipping comes in between, and it wipes out the traces: one NaN in the total norm makes every gradient NaN, an infinite
norm makes every one zero. So the norms are taken right after backward, and what the optimizer is given is only
compared with them: if it is the same tensors scaled by one factor, a single small tensor (the *telltale*) tells that
factor. Only if they were changed in some other way are they measured once more. Nothing waits for the device.

    backward   hook of the telltale's accumulation -> at the end of backward, before DDP averages: the telltale's norm
               -> after DDP has averaged: all norms, unscaled
    pre-step   hook of the optimizer -> unchanged, scaled, or measured again

Norms are accumulated in double precision where that is free (CUDA); on the CPU, where it costs twenty times as much,
only once single precision has overflowed, which can be seen there without waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rollback.train.sharded import copies_of, is_sharded, local_of
from rollback.train.updates.hooks import weak_hook

_TELLTALE_SIZE = 1 << 16  # elements; a norm of so few costs microseconds


@dataclass(frozen=True)
class GradientNorms:
    """Norms of one update's gradients, unscaled, on their device.

    parameters: those that had a gradient. each: their norms. total: what the norm over all is in the gradients' own
    type, Inf where it overflows. kept: factor by which the optimizer's gradients are smaller than these (clipping);
    None if they had to be measured again. own: norm of the telltale on this rank alone; None if not seen. Where
    gradients are sharded, `each` and `total` are of this rank's parts, and `squares` is as in `GaugeFields`.
    """

    parameters: list[nn.Parameter]
    each: Tensor
    total: Tensor
    kept: Tensor | None
    own: Tensor | None
    squares: Tensor | None = None


class Gradients:
    """The gradients of one rank's update in progress. Nothing here is collective.

    seen: the norms at the end of the update's last backward, None if there was none or it was not `expect`ed.
    written: whether the gradients were changed since, as `look` found; None where that is not known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: object | None) -> None:
        self._optimizer = optimizer
        self._scaler = scaler
        self._averaged = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.telltale = _choose_telltale(self._parameters())
        self._queued = False
        self._awaited = True
        self._own: Tensor | None = None
        self.seen: GradientNorms | None = None
        self.written: bool | None = None
        self._marks: list[tuple[int, int]] = []
        self._found: list[tuple[int, int]] = []
        if self.telltale is not None:
            hook = weak_hook(self._backward_reached_telltale)
            self.telltale.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def scale(self) -> Tensor | None:
        """The factor that GradScaler puts on the loss, on its device; None without one."""
        # get_scale() would wait for the device.
        scale = getattr(self._scaler, "_scale", None)
        return scale if isinstance(scale, Tensor) else None

    def expect(self, awaited: bool) -> None:
        """Whether the backward to come is the update's last one; of the others nothing is measured."""
        self._awaited, self._queued = awaited, False

    def look(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        """See whether the gradients are still as backward left them. Call before they are used; `before_step` does."""
        parameters, gradients = self._with_gradients()
        self._found = [_mark(gradient) for gradient in gradients]
        self.written = None if self.seen is None else self._found != self._marks
        return parameters, gradients

    def forget(self) -> None:
        """The update is over."""
        self.seen = self._own = self.written = None
        self._marks, self._found = [], []

    @torch.no_grad()
    def before_step(self) -> GradientNorms | None:
        """The norms of what the optimizer is about to apply. Call from its pre-step hook; None if there is nothing."""
        parameters, gradients = self.look()
        if not gradients:
            return None
        seen, telltale = self.seen, self.telltale
        scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer unscales by itself
        if seen is None or telltale is None or not self._only_scaled(gradients):
            each, total = _measure(gradients, scale)
            return GradientNorms(parameters, each, total, None, self._own, self._squares(parameters, each))
        if not self.written and self.scale is None:
            return replace(seen, kept=torch.ones((), device=seen.total.device))
        assert telltale.grad is not None
        before = seen.each[_position(telltale, parameters)]
        after = torch.linalg.vector_norm(_dense(telltale.grad), dtype=before.dtype)
        if scale is not None:
            after = after / scale.to(after.device)
        # What was zero is zero still, or broken.
        kept = torch.where(before > 0, after / before, 1.0 + after)
        # A factor above one, or none, is no clipping but somebody's fault.
        total = seen.total * kept.clamp(min=1.0).to(seen.total.dtype)
        return replace(seen, total=total, kept=kept)

    def _backward_reached_telltale(self, _: Tensor) -> None:
        if not self._queued and self._awaited:
            self._queued = True
            _at_end_of_backward(self._before_averaging if self._averaged else self._after_averaging)

    @torch.no_grad()
    def _before_averaging(self) -> None:
        telltale = self.telltale
        if telltale is not None and telltale.grad is not None and telltale.grad._base is None:
            self._own = torch.linalg.vector_norm(_dense(telltale.grad))
        # Else gradient_as_bucket_view is on, and the averaging is going on in this very memory.
        _at_end_of_backward(self._after_averaging)

    @torch.no_grad()
    def _after_averaging(self) -> None:
        self._queued = False
        parameters, gradients = self._with_gradients()
        each, total = _measure(gradients, self.scale)
        self.seen = GradientNorms(parameters, each, total, None, self._own)
        self._marks = [_mark(gradient) for gradient in gradients]

    def _only_scaled(self, gradients: list[Tensor]) -> bool:
        """Whether these are the gradients that backward left, untouched or each written to equally often."""
        if not self.written:
            return True
        if len(gradients) != len(self._marks) or any(gradient._base is not None for gradient in gradients):
            return False  # views of one bucket count their writes together
        pairs = list(zip(self._found, self._marks, strict=True))
        return all(found[0] == mark[0] for found, mark in pairs) and len({now[1] - then[1] for now, then in pairs}) == 1

    def _squares(self, parameters: list[nn.Parameter], each: Tensor) -> Tensor | None:
        """What this rank adds to the square of the norm over all ranks' parts; None where nothing is sharded."""
        if not any(map(is_sharded, parameters)):
            return None
        ranks = torch.distributed.get_world_size()
        weights = [ranks / copies_of(parameter, ranks) for parameter in parameters]
        return (each.double().square() * torch.tensor(weights, dtype=torch.float64, device=each.device)).sum()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _with_gradients(self) -> tuple[list[nn.Parameter], list[Tensor]]:
        parameters, gradients = [], []
        for parameter in self._parameters():
            if parameter.grad is not None:
                gradient = local_of(parameter.grad)
                parameters.append(parameter)
                gradients.append(gradient if gradient.layout is torch.strided else _dense(gradient))
        return parameters, gradients


def _choose_telltale(parameters: list[nn.Parameter]) -> nn.Parameter | None:
    """A small parameter near the model's input: whatever breaks in backward behind it arrives there. None where they
    are sharded: what shards them puts their gradients in place, and no hook of theirs is called."""
    trained = [p for p in parameters if p.requires_grad]
    if any(map(is_sharded, trained)):
        return None
    small = (p for p in trained if p.numel() <= _TELLTALE_SIZE)
    return next(small, min(trained, key=lambda p: p.numel(), default=None))


def _position(parameter: nn.Parameter, parameters: list[nn.Parameter]) -> int:
    return next(place for place, other in enumerate(parameters) if other is parameter)


def _at_end_of_backward(act: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(act)


def _mark(gradient: Tensor) -> tuple[int, int]:
    """What changes when a gradient is replaced or written to."""
    return gradient.data_ptr(), gradient._version


def _dense(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient if gradient.layout == torch.strided else gradient.coalesce().values()


def _measure(gradients: list[Tensor], scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Norm of each tensor and of all, divided by `scale`."""
    device = gradients[0].device
    on_host = device.type == "cpu"  # where small operations cost more than their numbers
    each = norm_of_each(gradients)
    if scale is not None:
        each = each / scale.to(device)
    # The sum of squares is what overflows first in single precision.
    if on_host:
        squares = torch.tensor(sum(norm * norm for norm in each.tolist()), dtype=torch.float32)
    else:
        squares = each.square().sum().float()
    narrow = torch.float16 if gradients[0].dtype == torch.float16 else torch.float32
    return each, squares.sqrt().to(narrow).float()


def norm_of_each(tensors: list[Tensor]) -> Tensor:
    """On the device of the first. A device measures in double precision. The host, which would convert every tensor for
    that, a copy of twice its size, does so only for those whose squares overflow in single precision."""
    if tensors[0].device.type != "cpu":
        return _each(tensors, torch.float64)
    each = _each(tensors, torch.float32)
    overflown = [place for place, norm in enumerate(each.tolist()) if norm == math.inf]
    if overflown:
        each = each.double()
        each[overflown] = _each([tensors[place] for place in overflown], torch.float64)
    return each


def _each(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    device = gradients[0].device
    if any(g.device != device or g.dtype == torch.float64 for g in gradients):
        return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).to(device) for g in gradients])
    return torch.stack(list(torch._foreach_norm(gradients, 2, dtype)))
