"""A plain script, as people have it: DDP or one process, epochs in a function each, evaluation between them.

It writes what it ends with to OUT-<rank>.pt, and what it consumes to OUT-<rank>.log. `--bad EPOCH:SAMPLE`: a NaN there.
`--kill RANK:BATCH`: that rank kills itself when it has taken so many, in a first attempt.
"""

import argparse
import os
import random
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
        self.register_buffer("trail", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.layers(x)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--own", action="store_true", help="noise by a generator, and an average, of its own")
    parser.add_argument("--bad", default="")
    parser.add_argument("--kill", default="")
    return parser.parse_args()


args = arguments()
taken = 0
noise = random.Random(3)


def take(model, ids, epoch, rank):
    """For the test: keep track of what was consumed, in the model's state."""
    global taken
    taken += 1
    if f"{rank}:{taken}" == args.kill and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    with open(f"{args.out}-{rank}.log", "a") as log:
        print(epoch, *ids.tolist(), file=log)
    model.trail.mul_(31).add_(sum(ids.tolist()) + epoch)
    bad = [item.split(":") for item in args.bad.split(",") if item]
    return any(int(where) == epoch and int(sample) in ids.tolist() for where, sample in bad)


class Average:
    def __init__(self, model):
        self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

    @torch.no_grad()
    def follow(self, model):
        for name, value in model.named_parameters():
            self.shadow[name].lerp_(value, 0.1)


def train(model, loader, optimizer, scheduler, scaler, average, epoch, rank):
    model.train()
    inner = model.module if isinstance(model, DDP) else model
    for i, (x, y, ids) in enumerate(loader):
        if take(inner, ids, epoch, rank):
            y = y * float("nan")
        if args.own:
            x = x + noise.gauss(0, 0.1)
        last = (i + 1) % args.accumulate == 0 or i + 1 == len(loader)
        model.require_backward_grad_sync = last
        loss = nn.functional.mse_loss(model(x), y) / args.accumulate
        (scaler.scale(loss) if scaler else loss).backward()
        if last:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if average is not None:
                average.follow(model)
    return loss.item()


def evaluate(model, loader):
    model.eval()
    total = 0.0
    for x, y, _ in loader:
        with torch.no_grad():
            total += nn.functional.mse_loss(model(x), y).item()
    torch.rand(3)
    return total


def main():
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(7)
    source = torch.Generator().manual_seed(1)
    x = torch.randn(args.samples * ranks, 8, generator=source)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(len(x)))
    sampler = DistributedSampler(data) if ranks > 1 else None
    loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None, num_workers=args.workers)
    validation = DataLoader(data, batch_size=16)
    model = Net()
    if args.compile:
        model = torch.compile(model, backend="aot_eager")
    if ranks > 1:
        model = DDP(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=20) if args.scaler else None
    average = Average(model) if args.own else None
    torch.manual_seed(100 + rank)
    print("first batch has", next(iter(loader))[0].shape)
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, scheduler, scaler, average, epoch, rank)
        print(f"epoch {epoch}: loss {loss:.6f}, validation {evaluate(model, validation):.6f}")
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    if average is not None:
        kept["average"] = average.shadow
    torch.save({**kept, "random": torch.get_rng_state()}, f"{args.out}-{rank}.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
