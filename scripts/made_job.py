# mypy: disable-error-code="no-any-return,has-type,misc,index"
"""What a small training job is, for `made_tasks.py`: its model, what a batch is, and the loss.

What can go wrong with the data of every job is said by `Data`; what can go wrong with the model or the optimizer is the
business of `made_faults.py`. The data of a step comes from a generator that the caller seeds, so two jobs of the same
seed see the same batches.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn


@dataclass(frozen=True)
class Data:
    """What the data of a step is like."""

    wrong: float = 0.0
    """Share of the labels (targets, rewards, pairs) that belong to another example."""
    scale: float = 1.0
    """Factor of the inputs: a broken preprocessing."""
    harder: float = 0.0
    """Healthy, but harder than before: from 0 to 1."""


GOOD = Data()


class Job:
    """One training job. Subclasses say what a batch is and what its loss is. `fault` notes what was done to it."""

    supervised = True
    """Whether its loss is a progress curve: GANs and reinforcement learning have none."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.model = self.build()
        self.optimizer = self.make_optimizer()
        self.fault: dict[str, float] = {}
        self.clip = [None, 1.0, 5.0][seed % 3]

    def build(self) -> nn.Module:
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.pick(1e-3, 2e-3, 4e-3), weight_decay=0.01, fused=True)

    def pick(self, *choices: float) -> float:
        """One of the choices, by the job's seed."""
        return choices[int(torch.randint(len(choices), (1,), generator=self.chance))]

    def loss(self, gen: Generator, data: Data) -> Tensor:
        raise NotImplementedError

    def step(self, gen: Generator, data: Data, gradient: float = 1.0) -> tuple[float, float]:
        """One optimizer step; the loss and the gradient norm before clipping. gradient: a factor of the gradients."""
        self.optimizer.zero_grad()
        loss = self.loss(gen, data)
        loss.backward()  # type: ignore[no-untyped-call]
        parameters = [each for each in self.model.parameters() if each.grad is not None]
        if gradient != 1.0:
            for each in parameters:
                assert each.grad is not None
                each.grad *= gradient
        norm = nn.utils.clip_grad_norm_(parameters, self.clip if self.clip is not None else math.inf)
        self.optimizer.step()
        return float(loss.detach()), float(norm)


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


def mixed_up(labels: Tensor, share: float, gen: Generator) -> Tensor:
    """The labels, a share of them replaced by those of other examples."""
    if not share:
        return labels
    other = labels[torch.randperm(len(labels), generator=gen)]
    chosen = torch.rand(len(labels), generator=gen) < share
    return torch.where(chosen.view(-1, *[1] * (labels.dim() - 1)), other, labels)
