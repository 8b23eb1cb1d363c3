"""A small byte-level GPT, in float32 or as float16 autocast would compute it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stability.text import CONTEXT

WIDTH, DEPTH, HEADS = 32, 1, 2


def _rounded(values: Tensor, half: bool) -> Tensor:
    """With `half`: to float16 and back, the gradient on its way back too. What is beyond float16 is infinite."""
    return values.half().float() if half else values


class HalfLinear(nn.Linear):
    """A linear layer that can compute as under autocast: operands and result in float16, weights kept in float32.

    Real float16 products are many times slower on a CPU than this.
    """

    half_precision = False

    def forward(self, x: Tensor) -> Tensor:
        half = self.half_precision
        return _rounded(F.linear(_rounded(x, half), _rounded(self.weight, half), self.bias), half)


class Block(nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = HalfLinear(WIDTH, 3 * WIDTH, bias=False), HalfLinear(WIDTH, WIDTH, bias=False)
        self.up, self.down = HalfLinear(WIDTH, 4 * WIDTH), HalfLinear(4 * WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        half = self.qkv.half_precision
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        logits = _rounded(q @ k.transpose(-1, -2), half) / math.sqrt(WIDTH // HEADS)
        attended = _rounded(logits.masked_fill(self.mask, -math.inf).softmax(-1) @ v, half)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return out


class GPT(nn.Module):
    """Next-byte predictor: inputs (samples, CONTEXT), targets alike; the result is each sample's loss."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = HalfLinear(WIDTH, 256, bias=False)
        for parameter in (self.token.weight, self.head.weight, self.position):
            nn.init.normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, HalfLinear):
                module.half_precision = half

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.token(inputs) + self.position)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).mean(1)


class GrowingAdamW(torch.optim.AdamW):
    """AdamW. Where `growth` is not None, each step also multiplies some weights, the more so the higher its rate.

    growth: the weights, and the factor less one of a step at learning rate 1.
    """

    growth: tuple[list[Tensor], float] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.growth is not None:
            weights, per_rate = self.growth
            for weight in weights:
                weight.mul_(1 + per_rate * self.param_groups[0]["lr"])
        return result
