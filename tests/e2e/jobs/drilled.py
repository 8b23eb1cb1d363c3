"""A guarded job of a tiny model, seeded throughout, that trains until it is told to end.

`drilled.py [--silent] [--sharded N]`: with --silent the guard is never told a loss; with --sharded the model is
sharded, in N replicas. Where the training is over it leaves `reached-the-end` in its folder.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import rollback

if dist.is_torchelastic_launched():
    dist.init_process_group("gloo")
torch.manual_seed(1)
random.seed(1)
np.random.seed(1)
model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
if "--sharded" in sys.argv:
    replicas = int(sys.argv[sys.argv.index("--sharded") + 1])
    mesh = (replicas, dist.get_world_size() // replicas)
    fully_shard(model, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")))
elif dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(4000, 8)
targets = inputs.sum(1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader)
for x, y in guard:
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--silent" not in sys.argv:
        guard.observe(loss)
Path("reached-the-end").touch()
