"""A trainer in a module of the script's own: its loop over epochs begins behind the newest snapshot of its own."""

import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    def __init__(self, model, loader, optimizer, path, kill):
        self.model, self.loader, self.optimizer, self.path, self.kill = model, loader, optimizer, path, kill
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
            if f"{dist.get_rank()}:{self.taken}" == self.kill and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
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
