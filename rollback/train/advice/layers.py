"""Looks at the layers now and then: whose gradient has vanished, whose embedding grows without bound.

A look costs a pass over the embeddings, every `EVERY` updates, on the gradient norms that are measured anyhow. What a
look finds is copied to the host beside the training, and read at the next look: nothing waits for the device.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import isfinite, sqrt

import torch
from torch import Tensor, nn

from rollback.train.sharded import is_sharded
from rollback.train.updates.gradients import GradientNorms
from rollback.wording import AdviceText, first_few

EVERY = 100
"""Updates between two looks."""
VANISHED = 1e-8
"""Share of the total norm below which a layer's gradient has vanished. float32 rounds at 1e-7."""
LOOKS = 5
"""Looks in a row in which it must have."""
GROWTH_LOOKS = 10
"""Looks in a row in which the largest row of an embedding must have grown."""
_GROWN = 1.5  # times, over these looks
_ABOVE_OTHERS = 10.0  # times the median row
_UNABATED = 0.9  # growth in the second half of these looks over that in the first; of a random walk it is 0.76
_NAMED = 3

VANISHING = AdviceText(
    "vanishing-gradient",
    "the gradient of {layers} has been less than 1e-8 of the whole in {looks} looks over {updates} updates: nothing is "
    "learnt there. Usual reasons: activations that are saturated or dead, a path that is cut off (detach, a mask), or "
    "many layers without a residual connection or normalization",
)
GROWING_ROWS = AdviceText(
    "growing-embedding",
    "row {row} of the embedding {layer} grows without bound: its norm is {norm:.3g}, {times:.0f} times that of the "
    "median row. It was {growth:.1f} times smaller {updates} updates ago, and does not slow down. Look at what this "
    "token is (padding? a token of every sample?); weight decay on the embedding, or a norm behind it, bounds it",
)


class Layers:
    """The layers of a rank's model. Not collective. Of what is sharded a rank sees a part, and looks at nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(parameter): _layer_of(name) for name, parameter in model.named_parameters()}
        self._embeddings = [
            (_layer_of(f"{name}.weight"), module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module.weight.requires_grad and module.weight.numel()
            if not is_sharded(module.weight)
        ]
        self._coming: tuple[list[str], Tensor] | None = None
        self._vanished: dict[str, int] = defaultdict(int)
        self._largest: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=GROWTH_LOOKS + 1))
        self.found: dict[str, AdviceText] = {}
        """The advice so far, by code."""
        self.heaviest: str | None = None
        """The layer with the largest gradient at the last look; None: not known."""

    def look(self, norms: GradientNorms | None) -> None:
        """An update was made, with these gradients; None: not known. Call it once in `EVERY` updates."""
        if norms is None or norms.squares is not None:
            return
        if self._coming is not None:
            self._read(*self._coming)
        self._coming = self._begin(norms)

    @torch.no_grad()
    def _begin(self, norms: GradientNorms) -> tuple[list[str], Tensor]:
        """Start to copy the norms, and of each embedding the largest row's norm, its number, the median row's norm."""
        found = [norms.each.double()]
        for _, weight in self._embeddings:
            rows = torch.linalg.vector_norm(weight, dim=1).double()
            largest = rows.max(0)
            found.append(torch.stack([largest.values, largest.indices.double(), rows.median()]).to(norms.each.device))
        device = torch.cat(found)
        host = torch.empty(device.shape, dtype=device.dtype, device="cpu", pin_memory=device.is_cuda)
        layers = [self._names.get(id(parameter), "") for parameter in norms.parameters]
        return layers, host.copy_(device, non_blocking=True)

    def _read(self, layers: Sequence[str], found: Tensor) -> None:
        values = found.tolist()
        self._judge_gradients(layers, values[: len(layers)])
        for place, (layer, _) in enumerate(self._embeddings):
            at = len(layers) + 3 * place
            self._judge_rows(layer, *values[at : at + 3])

    def _judge_gradients(self, layers: Sequence[str], norms: Iterable[float]) -> None:
        squares: dict[str, float] = defaultdict(float)
        for layer, norm in zip(layers, norms, strict=True):
            squares[layer] += norm * norm
        total = sum(squares.values())
        if not isfinite(total) or not total:
            return
        self.heaviest = max(squares, key=lambda layer: squares[layer])
        for layer, square in squares.items():
            self._vanished[layer] = self._vanished[layer] + 1 if sqrt(square / total) < VANISHED else 0
        if LOOKS in self._vanished.values():
            gone = [layer for layer, looks in self._vanished.items() if looks >= LOOKS]
            layers = first_few(gone, _NAMED)
            self._tell(VANISHING.of(layers=layers, looks=LOOKS, updates=LOOKS * EVERY))

    def _judge_rows(self, layer: str, norm: float, row: float, median: float) -> None:
        past = self._largest[layer]
        past.append(norm)
        if len(past) <= GROWTH_LOOKS or not isfinite(norm) or not median:
            return
        steps = [later - earlier for earlier, later in pairwise(past)]
        half = len(steps) // 2
        unabated = sum(steps[half:]) >= _UNABATED * sum(steps[:half])
        if min(steps) > 0 and unabated and norm > _GROWN * past[0] and norm > _ABOVE_OTHERS * median:
            self._tell(GROWING_ROWS.of(
                layer=layer, row=int(row), norm=norm, times=norm / median, growth=norm / past[0],
                updates=GROWTH_LOOKS * EVERY,
            ))  # fmt: skip

    def _tell(self, advice: AdviceText) -> None:
        self.found.setdefault(advice.code, advice)


def _layer_of(name: str) -> str:
    """The module of a parameter, without what wrappers put before it."""
    parts = [part for part in name.split(".") if part not in ("module", "_orig_mod")] or [name]
    return ".".join(parts[:-1]) or parts[-1]
