"""Clipping takes the norm that was measured at the end of backward, and does not read all gradients once more.

torch's `clip_grad_norm_` begins with the norm of each gradient and the norm of these norms (`_get_total_norm`). Both
are what `gradients` has measured a moment before. As long as nobody has written to a gradient since, torch gets that.
The result is the same, bit for bit: the first time, torch computes it too, and both are compared. In every case that is
not this plain one, torch's own function does the work.
"""

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

Lender = Callable[[Sequence[Tensor]], Tensor | None]
"""Gets gradients. Returns the norm over them in single precision; None: it is not measured, or not as torch would."""


class _Lent:
    """What this process knows of the lenders."""

    lenders: ClassVar[list[weakref.WeakMethod[Lender]]] = []
    same_as_torch: bool | None = None
    """Whether torch computed the same. If not, nothing is lent any more. None: not compared yet."""


def lend_norm(lender: Lender) -> None:
    """Ask `lender`, a method, whenever gradients are clipped, for as long as its object lives."""
    _Lent.lenders = [known for known in _Lent.lenders if known() is not None] + [weakref.WeakMethod(lender)]
    original = getattr(clip_grad, "_get_total_norm", None)
    if original is not None and not hasattr(original, "lends"):
        clip_grad._get_total_norm = _lending(original)


def _lending(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *more: Any, **others: Any) -> Tensor:
        if torch.compiler.is_compiling() or norm_type != 2.0 or more[1:2] == (False,) or others.get("foreach") is False:
            return original(tensors, norm_type, *more, **others)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = _lent(tensors)
        if total is None or not math.isfinite(total.item()):  # not finite is rare, and torch may have to raise
            return original(tensors, norm_type, *more, **others)
        if _Lent.same_as_torch is None:
            own = original(tensors, norm_type, *more, **others)
            _Lent.same_as_torch = own.dtype == total.dtype and torch.equal(own, total)
            return own
        return total

    total_norm.lends = True  # type: ignore[attr-defined]
    return total_norm


def _lent(gradients: list[Tensor]) -> Tensor | None:
    if _Lent.same_as_torch is False or not gradients:
        return None
    for reference in _Lent.lenders:
        lender = reference()
        if lender is not None and (norm := lender(gradients)) is not None:
            return norm
    return None
