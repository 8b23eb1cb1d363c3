"""Models of which each rank has a share, one after another, handed to a guard: each rank says what it is told."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import rollback
from rollback.errors import UsageError


def first(model: nn.Sequential) -> None:
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))


def second(model: nn.Sequential) -> None:
    fully_shard(model[1], mesh=init_device_mesh("cpu", (2,)))


def parallel(model: nn.Sequential) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"1": ColwiseParallel()})


dist.init_process_group("gloo")
for shard in (first, second, parallel):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        rollback.Guard(model=model, optimizer=optimizer, loader=[torch.randn(2, 8)])
    except UsageError as error:
        print(f"rank {dist.get_rank()}, {shard.__name__}: {error.message}\n", end="", flush=True)
dist.destroy_process_group()
