"""Train a small byte-level GPT on the Python standard library's sources, on CPU, with DistributedDataParallel.

python scripts/train_gpt.py, or torchrun --nproc-per-node 2 scripts/train_gpt.py
"""

import argparse
import json
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import rollback
from stdlib_text import WINDOW, StdlibText


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class GPT(nn.Module):
    """Next-byte predictor; called with (batch, WINDOW + 1) bytes it returns the loss of each sample, (batch,)."""

    def __init__(self, width: int, depth: int, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for parameter in (self.token.weight, self.head.weight, self.position):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.token(tokens[:, :-1]) + self.position))
        return F.cross_entropy(self.head(hidden).transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on the standard library.")
    parser.add_argument("--steps", type=int, default=300, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a rank's micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of an update")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=30, help="updates until the full learning rate")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="data-loader workers of a rank")
    parser.add_argument("--corrupt", action="store_true", help="two stretches of the data set are bad")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1

    data = StdlibText(corrupt=args.corrupt)
    sampler: Any = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False, drop_last=True)
    loader = DataLoader(data, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    model: Any = GPT(args.width, args.depth)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    def learning_rate(step: int) -> float:
        warm = min(1.0, (step + 1) / args.warmup)
        rate: float = warm * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / args.steps)))
        return rate

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)

    guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, max_steps=args.steps)
    loss = torch.zeros(())
    for micro_batch, (tokens, weights) in enumerate(guard):
        last = (micro_batch + 1) % args.accumulate == 0
        with nullcontext() if last or world == 1 else model.no_sync():
            part = (weights * model(tokens)).mean() / args.accumulate
            part.backward()
        loss += part.detach()
        if last:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            guard.observe(loss, grad_norm=norm)
            if rank == 0:
                report = {"step": scheduler.last_epoch, "loss": loss.item(), "grad_norm": norm.item()}
                print(json.dumps(report), flush=True)
            scheduler.step()
            loss = torch.zeros(())

    if rank == 0:
        model.eval()
        with torch.no_grad():
            parts = [model(tokens) for tokens, _ in DataLoader(StdlibText(held_out=True), 64)]
        validation = torch.cat(parts).mean().item()
        print(json.dumps({"step": scheduler.last_epoch, "validation_loss": validation}), flush=True)


if __name__ == "__main__":
    main()
    if dist.is_initialized():  # after main(): a DDP model that is freed after its gloo group can deadlock
        dist.destroy_process_group()
