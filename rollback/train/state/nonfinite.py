"""Finds non-finite values in snapshots: NaN in a running statistic, Inf in an optimizer's state.

The loss may not show them. Each rank checks its copy in the thread that writes it, and tells the others in its
shard report. Values that were not finite when the run began are never reported: masks are infinite on purpose. The
same is true for an infinite value in a buffer that had no tensor before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rollback.wording import ranks_in_words

NonFiniteKind = Literal["Inf", "NaN", "NaN and Inf"]

_PIECE = 32_767  # elements; from one more on torch uses several cores, which others need
_NARROW = {torch.float8_e5m2, torch.float8_e4m3fn}


class FiniteCheck:
    """Looks at tensors of images. under: beginnings of the names of those that matter. in_words: what one is, in words.

    left_alone: what is known and no trouble, by the tensor's name; it is kept in checkpoints.
    """

    def __init__(self, under: tuple[str, ...], in_words: Callable[[str], str]) -> None:
        self.left_alone: dict[str, NonFiniteKind] | None = None
        self._under = under
        self.in_words = in_words
        self._buffers: set[str] = set()

    def begin(self, tensors: Mapping[str, Tensor]) -> dict[str, NonFiniteKind]:
        """The non-finite tensors at the beginning of a run or an attempt, if they are not known yet."""
        self._buffers.update(name for name in tensors if name.startswith("local/"))
        return self._kinds(tensors) if self.left_alone is None else {}

    def newly_nonfinite(self, tensors: Mapping[str, Tensor]) -> dict[str, NonFiniteKind]:
        """Tensors with non-finite values that were finite before."""
        kinds = self._kinds(tensors)
        own = {name for name in tensors if name.startswith("local/")}
        self.accept({name: kinds[name] for name in own - self._buffers if kinds.get(name) == "Inf"})
        self._buffers |= own
        known = self.left_alone or {}
        return {name: kind for name, kind in kinds.items() if known.get(name) not in (kind, "NaN and Inf")}

    def accept(self, found: Mapping[str, NonFiniteKind]) -> None:
        """Do not report these any more."""
        self.left_alone = union([self.left_alone or {}, found])

    def account(self, found: Mapping[str, NonFiniteKind], ranks: Sequence[int], step: int, since: int) -> str:
        """In words, what was found in the snapshot of `step` and not in that of `since`."""
        name = min(found)
        others = f" (and {len(found) - 1} other tensors)" if len(found) > 1 else ""
        return (
            f"{self.in_words(name)}{others} held {found[name]} in the snapshot of step {step}, on "
            f"{ranks_in_words(ranks)}, and did not in the one of step {since}"
        )

    def _kinds(self, tensors: Mapping[str, Tensor]) -> dict[str, NonFiniteKind]:
        looked_at = ((name, kind_in(item)) for name, item in tensors.items() if name.startswith(self._under))
        return {name: kind for name, kind in looked_at if kind is not None}


def kind_in(item: Tensor) -> NonFiniteKind | None:
    """The kind of non-finite values in a tensor; None: all are finite."""
    if item.is_complex():
        item = torch.view_as_real(item.resolve_conj())
    if not item.is_floating_point() or not item.numel():
        return None
    flat = item.detach().reshape(-1)
    nan = inf = False
    for part in torch.split(flat, flat.numel() if flat.is_cuda else _PIECE):
        part = part.float() if part.dtype in _NARROW else part  # noqa: PLW2901 - the same values
        low, high = (end.item() for end in torch.aminmax(part))
        if not (math.isfinite(low) and math.isfinite(high)):
            nan, inf = nan or bool(part.isnan().any()), inf or bool(part.isinf().any())
    return "NaN and Inf" if nan and inf else "NaN" if nan else "Inf" if inf else None


def union(all_found: Iterable[Mapping[str, NonFiniteKind]]) -> dict[str, NonFiniteKind]:
    """The findings of several ranks together."""
    together: dict[str, NonFiniteKind] = {}
    for found in all_found:
        for name, kind in found.items():
            together[name] = kind if together.get(name, kind) == kind else "NaN and Inf"
    return together
