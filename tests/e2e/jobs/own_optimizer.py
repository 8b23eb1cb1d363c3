"""FSDP2 with an optimizer of the user's own: by rows, it keeps one number for each row of a weight; by parts, each rank
keeps the state of its own part in a plain tensor. Or with an average of each rank's own parts, or one of the weights
that begins late; or with two optimizers. Rank 1 of the first attempt kills itself at a step, if told to; each rank
writes the final parameters, and the late average."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rollback


class ByRows(torch.optim.Optimizer):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square()
                square = square.mean(-1, keepdim=True) if square.dim() > 1 else square
                size = self.state[parameter].setdefault("size", torch.zeros_like(square))
                size.mul_(0.9).add_(square, alpha=0.1)
                parameter.sub_(parameter.grad / (size.sqrt() + 1e-3), alpha=group["lr"])


class ByParts(torch.optim.SGD):
    """As SGD with momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            part, gradient = parameter.to_local(), parameter.grad.to_local()
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(part))
            part.sub_(momentum.mul_(0.9).add_(gradient, alpha=0.1), alpha=0.1)


class AverageOfParts:
    def __init__(self, model: nn.Module) -> None:
        self.parts = [parameter.to_local().detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for part, parameter in zip(self.parts, model.parameters(), strict=True):
            part.lerp_(parameter.to_local(), 0.1)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"parts": self.parts}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        for part, stored in zip(self.parts, state["parts"], strict=True):
            part.copy_(stored)


class LateAverage:
    """Of sharded weights, from the third update on: before that it has no tensors."""

    def __init__(self) -> None:
        self.updates = 0
        self.weights: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for name, parameter in model.named_parameters() if self.updates > 2 else ():
            self.weights.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.weights = state["updates"], dict(state["weights"])


def main(kind: str, out: Path, killed_at: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    rows = 5 if kind in ("by rows", "average of uneven parts") else 4
    model = nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8))
    fully_shard(model)
    average: dict[str, Any] = {"average": AverageOfParts(model)} if kind.startswith("average") else {}
    if kind == "late average":
        average = {"average": LateAverage()}
    optimizer = {"by rows": ByRows}.get(kind, ByParts)(list(model.parameters()))
    if average:
        optimizer = torch.optim.AdamW(model.parameters())
    second = {}
    if kind == "two optimizers":
        optimizer, second = (
            torch.optim.AdamW(model[0].parameters()),
            {"second": torch.optim.AdamW(model[2].parameters())},
        )
    data = torch.randn(12, 4, 8)[:, rank * 4 // ranks : (rank + 1) * 4 // ranks]
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(data), max_steps=12, snapshot_every=3, **average, **second
    )
    for batch in guard:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        for each in (*second.values(), optimizer):
            each.step()
            each.zero_grad()
        for each in average.values():
            each.update(model)
        guard.observe(loss)
        guard._loop.checkpoints.snapshots.wait()  # which checkpoints there are does not depend on the disk's speed then
        if guard.step == killed_at and rank == 1 and not out.exists():
            out.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
    out.mkdir(exist_ok=True)
    late = [*average["average"].weights.values()] if kind == "late average" else []
    torch.save([tensor.full_tensor().detach() for tensor in (*model.parameters(), *late)], out / f"{rank}.pt")
    dist.destroy_process_group()


main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
