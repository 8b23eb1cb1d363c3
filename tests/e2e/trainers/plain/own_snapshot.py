"""A plain script that saves a snapshot of its own after each epoch, and begins with the epoch behind it.

`--kill RANK:BATCH`: as in `epochs.py`. `--apart`: each rank has a disk of its own, and rank 0's alone has the snapshot.
"""

import argparse

import torch
import torch.distributed as dist
from own_trainer import Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    x = torch.randn(80, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    path = f"{args.out}.snapshot" + (f"-{dist.get_rank()}" if args.apart else "")
    Trainer(model, loader, optimizer, path, args.kill).train(4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{args.out}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--kill", default="")
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    main()
