"""Models of which each rank has a share that no checkpoint keeps, one after another, handed to a guard: each rank says
what it is told."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard

import rollback
from rollback.errors import UsageError

dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (2,))


def first(model: nn.Sequential) -> None:
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"))


def engine(model: nn.Sequential) -> None:
    class DeepSpeedEngine(nn.Module):
        """In place of the real one, which is known by its name."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    model[1] = DeepSpeedEngine(model[1])


def summands(model: nn.Sequential) -> None:
    weight = DTensor.from_local(torch.randn(2, 8), MESH, [Partial()])
    model[1].register_parameter("weight", nn.Parameter(weight))


def buffer(model: nn.Sequential) -> None:
    model[1].register_buffer("level", DTensor.from_local(torch.randn(8), MESH, [Shard(0)]))


def stages(model: nn.Sequential) -> None:
    """A layer of its own on each rank, sharded over that rank alone, as a pipeline's stage is over its ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"]
    model.add_module(f"of_{dist.get_rank()}", fully_shard(nn.Linear(2, 2), mesh=mesh))


for shard in (first, engine, summands, buffer, stages):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        rollback.Guard(
            model=model, optimizer=optimizer, loader=[torch.randn(2, 8)], run=f"runs/{shard.__name__}"
        ).close()
    except UsageError as error:
        print(f"rank {dist.get_rank()}, {shard.__name__}: {error.message}\n", end="", flush=True)
dist.destroy_process_group()
