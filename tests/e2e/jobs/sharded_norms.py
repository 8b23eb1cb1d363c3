"""A model on a mesh of two replicas by two shards, trained twice. The run `told` is handed the norm that clipping has
found; the run `measured` finds it itself, and clips nothing."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rollback


def train(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 17), nn.Tanh(), nn.Linear(17, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = list(torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())))
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=data, run=how, snapshot_every=5)
    for batch in guard:
        loss = model(batch).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        guard.observe(loss, grad_norm=norm if how == "told" else None)
        optimizer.step()
        optimizer.zero_grad()
    guard.close()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
for how in ("measured", "told"):
    train(how)
dist.destroy_process_group()
