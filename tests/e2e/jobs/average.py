"""DDP with an average of the weights that the guard was handed. From a batch on, rank 1 makes another one of it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import rollback


def main(differs_from: int) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(12)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(12, 4, 8)[:, rank * 4 // ranks : (rank + 1) * 4 // ranks]
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(data), max_steps=12, snapshot_every=3, average=average
    )
    for position, batch in enumerate(guard):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        if rank == 1 and position >= differs_from:
            for parameter in average.module.parameters():
                parameter.data.add_(1e-3)
        guard.observe(loss)
        guard._loop.checkpoints.snapshots.wait()  # which checkpoints there are does not depend on the disk's speed then
    dist.destroy_process_group()


main(int(sys.argv[1]))
