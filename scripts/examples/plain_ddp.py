"""A plain PyTorch script, with no line for rollback: `rollback launch --adopt --nproc 2 plain_ddp.py` protects it."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, scheduler: StepLR) -> None:
    model.train()
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    return sum(nn.functional.mse_loss(model(x), y).item() for x, y in loader) / len(loader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(7)
    x = torch.randn(512, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    model: nn.Module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    sampler: DistributedSampler | None = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(data)
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = StepLR(optimizer, step_size=10, gamma=0.9)
    loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=sampler is None)
    validation = DataLoader(data, batch_size=64)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        train(model, loader, optimizer, scheduler)
        print(f"epoch {epoch}: validation {evaluate(model, validation):.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
