"""Clipping takes the norm that the guard has measured, and does not read all gradients once more.

torch's `clip_grad_norm_` begins with the norm of each gradient and the norm of these norms (`_get_total_norm`). Both
are what `gradients` measures, a moment before or now. As long as nobody has written to a gradient since, torch gets
that. The result is the same, bit for bit: the first time, torch computes it too, and both are compared. In every case
that is not this plain one, torch's own function does the work. Then torch multiplies the gradients by one factor
(`_clip_grads_with_norm_`), and whoever has lent the norm is told which.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad


class Lender(Protocol):
    """What has measured gradients."""

    def norm_of(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """The norm over these in single precision; None: it is not measured, or not as torch would."""

    def clipped(self, norm: Tensor, most: float) -> None:
        """The gradients over which this is the norm are clipped to `most`, by one factor, if it has lent that norm."""


class _Lent:
    """What this process knows of the lenders."""

    lenders: ClassVar[list[weakref.ref[Lender]]] = []
    """In the order of their making, which is the order in which they are asked."""
    same_as_torch: bool | None = None
    """Whether torch computed the same. If not, nothing is lent any more. None: not compared yet."""


def lend_norms(lender: Lender) -> None:
    """Ask `lender` whenever gradients are clipped, for as long as it lives."""
    _Lent.lenders = [*(known for known in _Lent.lenders if known() is not None), weakref.ref(lender)]
    for name, wrapped in (("_get_total_norm", _lending), ("_clip_grads_with_norm_", _telling)):
        original = getattr(clip_grad, name, None)
        if original is not None and not hasattr(original, "lends"):
            setattr(clip_grad, name, wrapped(original))


def _lending(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *more: Any, **others: Any) -> Tensor:
        if torch.compiler.is_compiling() or norm_type != 2.0 or more[1:2] == (False,) or others.get("foreach") is False:
            return original(tensors, norm_type, *more, **others)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total, first = _lent(tensors), _Lent.same_as_torch is None
        raises = more[:1] == (True,) or others.get("error_if_nonfinite", False)
        # Not finite is rare. Of a device it is asked only where torch would ask too: the answer is waited for.
        if total is None or ((total.is_cpu or first or raises) and not math.isfinite(total.item())):
            return original(tensors, norm_type, *more, **others)
        if first:
            own = original(tensors, norm_type, *more, **others)
            _Lent.same_as_torch = own.dtype == total.dtype and torch.equal(own, total)
            return own
        return total

    total_norm.lends = True  # type: ignore[attr-defined]
    return total_norm


def _telling(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def clip(parameters: Any, max_norm: float, total_norm: Tensor, *more: Any, **others: Any) -> None:
        if not torch.compiler.is_compiling():
            for known in _Lent.lenders:
                if (lender := known()) is not None:
                    lender.clipped(total_norm, max_norm)
        original(parameters, max_norm, total_norm, *more, **others)

    clip.lends = True  # type: ignore[attr-defined]
    return clip


def factor_of(norm: Tensor, most: float) -> Tensor | float:
    """By which torch multiplies the gradients. Of a norm on a device: a scalar there."""
    if norm.is_cpu:
        return min(1.0, float(most) / (norm.item() + 1e-6))
    return torch.clamp(float(most) / (norm + 1e-6), max=1.0)


def _lent(gradients: list[Tensor]) -> Tensor | None:
    if _Lent.same_as_torch is False or not gradients:
        return None
    if gradients[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # what is read now is not what the graph will read
    for known in _Lent.lenders:
        if (lender := known()) is not None and (norm := lender.norm_of(gradients)) is not None:
            return norm
    return None
