"""A plain script that saves a snapshot of its own after each epoch, and begins with the epoch behind it.

`--kill RANK:BATCH`: as in `epochs.py`. Each sample counts in the model's state.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, optimizer, path):
        self.model, self.loader, self.optimizer, self.path = model, loader, optimizer, path
        self.epochs_run = 0
        self.taken = 0
        if os.path.exists(path):
            snapshot = torch.load(path)
            self.model.load_state_dict(snapshot["model"])
            self.epochs_run = snapshot["epochs_run"]
        self.model = DDP(self.model)

    def run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        for x, y in self.loader:
            self.taken += 1
            if f"{dist.get_rank()}:{self.taken}" == args.kill and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            dist.barrier()
            if dist.get_rank() == 0:
                torch.save({"model": self.model.module.state_dict(), "epochs_run": epoch + 1}, self.path)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    x = torch.randn(80, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, f"{args.out}.snapshot").train(4)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{args.out}-{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--kill", default="")
    args = parser.parse_args()
    main()
