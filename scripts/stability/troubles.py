"""What goes wrong in a run. Each trouble is of one of three kinds, and comes back accordingly:

- of the *data*: it lies in some batches, and comes back whenever these are handed out;
- of the *training*: it belongs to some steps, and comes back whenever training is at them;
- of the *machine*: it strikes once, whatever is done about it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stability.model import GPT, WIDTH, Block, GrowingAdamW
from stability.text import SAMPLES, Batches, batches_of, prose

STEPS = 800  # of a whole run
ONSET = 500
STRETCH = 40  # batches: 5 % of the run
EARLY = range(100, 180)
POISONED = (300, 421, 500, 633)
GROWS = range(ONSET, ONSET + 100)
BASE_RATE = 3e-3
RATE_FACTOR = 30.0


@dataclass(frozen=True)
class Trouble:
    """What it changes. `corrupt` gets the batches and a generator, `rate` the step. The others get the number of
    updates that were made so far, those that were undone included."""

    words: str
    corrupt: Callable[[Batches, np.random.Generator], None] | None = None
    rate: Callable[[int], float] | None = None
    """The factor on the learning rate."""
    weigh: Callable[[Tensor, int], Tensor] | None = None
    """Changes the samples' weights in the loss."""
    gradient: Callable[[int], float] | None = None
    """The factor on the gradient."""
    strike: Callable[[GPT, int], None] | None = None
    """Changes the model behind an update."""
    growth: range | None = None
    """The steps in which queries and keys grow."""
    new_domain: bool = False
    """The data is of another domain from ONSET on, and so is what a run is validated with."""


def _labels(batches: Batches, noise: np.random.Generator) -> None:
    for number in range(ONSET, ONSET + STRETCH):
        flat = batches.targets[number].reshape(-1)
        batches.targets[number] = noise.permutation(flat).reshape(SAMPLES, -1)


def _constant(batches: Batches, noise: np.random.Generator) -> None:
    batches.inputs[ONSET : ONSET + STRETCH] = batches.targets[ONSET : ONSET + STRETCH] = ord(" ")


def _repeated(batches: Batches, noise: np.random.Generator) -> None:
    for part in (batches.inputs, batches.targets):
        part[ONSET : ONSET + STRETCH] = part[ONSET, :1]


def _poisoned(batches: Batches, noise: np.random.Generator) -> None:
    for number in POISONED:
        batches.targets[number] = noise.integers(0, 256, batches.targets[number].shape)
        batches.weights[number] = 100.0


def _shifted(batches: Batches, noise: np.random.Generator) -> None:
    count = (len(batches) - ONSET) * SAMPLES
    others = batches_of(prose()[noise.permutation(len(prose()))[:count]])
    batches.inputs[ONSET:], batches.targets[ONSET:] = others.inputs, others.targets


def _once(factor: float) -> Callable[[int], float]:
    return lambda made: factor if made == ONSET else 1.0


def _high_early(step: int) -> float:
    return RATE_FACTOR if step in EARLY else 1.0


def _nan_of_one_rank(weights: Tensor, made: int) -> Tensor:
    if made != ONSET:
        return weights
    struck = weights.clone()
    struck[: SAMPLES // 4] = torch.nan  # of four ranks one, before the loss and the gradient are averaged
    return struck


def _flip_a_bit(model: GPT, made: int) -> None:
    if made == ONSET:
        block = model.blocks[0]
        assert isinstance(block, Block)
        block.up.weight.data.view(torch.int32)[5, 7] ^= 1 << 30  # the top bit of the exponent


def queries_and_keys(model: GPT) -> list[Tensor]:
    """The parts of the weights that make queries and keys."""
    return [block.qkv.weight.data[: 2 * WIDTH] for block in model.blocks if isinstance(block, Block)]


def grow(model: GPT, optimizer: GrowingAdamW, trouble: Trouble, step: int) -> None:
    """Let queries and keys grow in this step, if they are to: in proportion to the learning rate, as in life."""
    growing = trouble.growth is not None and step in trouble.growth
    optimizer.growth = (queries_and_keys(model), 0.15 / BASE_RATE) if growing else None


TROUBLES: Mapping[str, Trouble] = {
    "none": Trouble("nothing goes wrong"),
    "labels": Trouble(f"{STRETCH} batches with shuffled labels, from {ONSET} on", corrupt=_labels),
    "gradient x10": Trouble(f"the gradient of update {ONSET}, once, times 10", gradient=_once(10.0)),
    "gradient x1e4": Trouble(f"the gradient of update {ONSET}, once, times 10,000", gradient=_once(1e4)),
    "NaN": Trouble("one of four ranks computes NaN in one update, once", weigh=_nan_of_one_rank),
    "bit": Trouble(f"a bit of one weight flips behind update {ONSET}, once", strike=_flip_a_bit),
    "shift": Trouble(f"healthy: another domain from batch {ONSET} on", corrupt=_shifted, new_domain=True),
    "high rate": Trouble(
        f"the learning rate times {RATE_FACTOR:.0f} in steps {EARLY[0]} to {EARLY[-1]}",
        rate=_high_early,
    ),
    "poisoned": Trouble("four single batches of noise that weighs 100", corrupt=_poisoned),
    "logits": Trouble(
        f"queries and keys grow by 5 % a step from {GROWS[0]} to {GROWS[-1]}, in proportion to the rate", growth=GROWS
    ),
    "constant": Trouble(f"{STRETCH} batches of blanks, from {ONSET} on", corrupt=_constant),
    "repeated": Trouble(f"one document in {STRETCH} batches, from {ONSET} on", corrupt=_repeated),
}
