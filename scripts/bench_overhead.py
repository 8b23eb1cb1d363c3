"""What the guard costs a healthy training loop: the same loop with and without it, step by step in turn, in one run.

    python scripts/bench_overhead.py [--ranks 2] [--steps 100] [--width 256] [--batch 8] [--tokens 128]
    python scripts/bench_overhead.py --device cuda --ranks 1     # on a GPU, the pulse over NCCL
    python scripts/bench_overhead.py --device cuda --ranks 1 --unwaited 20
    python scripts/bench_overhead.py --last-snapshot on          # with the marks for a last snapshot at every step

Two identical models train side by side in each rank, one guarded, one not: a step of the one and a step of the other,
in changing order, so that whatever else the machine does hits both alike. Printed are medians over the steps and the
median of the ratios of neighbouring steps, for a script that hands `clip_grad_norm_`'s result to `observe` and for one
that does not. Snapshots are off unless --snapshot-every is given. With a GPU, each step is waited for, as by a script
that prints each loss, unless --unwaited says how many of each loop are made in a row.

On a machine with other work the clock says little. So the processor time of the training thread is printed too: its
median, and its tenth percentile, since what others do can only add to it.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rollback

WARMUP = 10


class Loop:
    """One model with its optimizer and loader; `step` runs one training step and returns its seconds: by the clock, and
    of the processor."""

    def __init__(self, args: argparse.Namespace, guarded: bool, hand_over_norm: bool, run: Path) -> None:
        torch.manual_seed(0)
        block = nn.TransformerEncoderLayer(args.width, 4, 4 * args.width, batch_first=True, dropout=0.0)
        net = nn.Sequential(nn.Embedding(256, args.width), nn.TransformerEncoder(block, 4), nn.Linear(args.width, 256))
        self.device, self.unwaited = args.device, args.unwaited
        net.to(self.device)
        self.model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        samples = args.batch * args.ranks * args.unwaited * (args.steps + 2 * WARMUP)
        data = TensorDataset(torch.randint(0, 256, (samples, args.tokens + 1)))
        sampler: DistributedSampler[Any] | None = DistributedSampler(data) if dist.is_initialized() else None
        loader = DataLoader(data, batch_size=args.batch, sampler=sampler, pin_memory=args.device == "cuda")
        self.hand_over_norm = hand_over_norm
        self.guard: rollback.Guard | None = None
        if guarded:
            settings: dict[str, Any] = {"snapshot_every": 0, "observe_only": True, "last_snapshot": args.last_snapshot}
            if args.snapshot_every or args.last_snapshot == "on":
                settings |= {"snapshot_every": args.snapshot_every or 100 * args.steps, "observe_only": False}
            self.guard = rollback.Guard(model=self.model, optimizer=self.optimizer, loader=loader, run=run, **settings)
        self.batches = iter(self.guard if self.guard is not None else loader)

    def step(self) -> tuple[float, float]:
        began = time.perf_counter(), time.thread_time()
        for _ in range(self.unwaited):
            self._train()
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()
        clock, processor = time.perf_counter() - began[0], time.thread_time() - began[1]
        return clock / self.unwaited, processor / self.unwaited

    def _train(self) -> None:
        tokens = next(self.batches)[0].to(self.device, non_blocking=True)
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.guard is not None:
            self.guard.observe(loss, grad_norm=norm if self.hand_over_norm else None)


def measure(rank: int, args: argparse.Namespace, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    if args.ranks > 1 or args.device == "cuda":
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    for name, hand_over_norm in (("norm handed over", True), ("norm measured", False)):
        guarded = Loop(args, True, hand_over_norm, Path(folder, name.replace(" ", "-")))
        plain = Loop(args, False, hand_over_norm, Path(folder))
        pairs = []
        for number in range(args.steps + WARMUP):
            if number % 2:
                seconds = guarded.step()
                pairs.append((seconds, plain.step()))
            else:
                seconds = plain.step()
                pairs.append((guarded.step(), seconds))
        del pairs[:WARMUP]
        assert guarded.guard is not None
        guarded.guard.close()
        if rank == 0:
            results[name] = pairs
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each loop")
    parser.add_argument("--width", type=int, default=256, help="of the transformer of four layers")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank's batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: on one GPU, with --ranks 1")
    parser.add_argument("--unwaited", type=int, default=1, help="steps in a row, after which the GPU is waited for")
    parser.add_argument("--snapshot-every", type=int, default=0, help="steps between checkpoints; default: none")
    parser.add_argument("--last-snapshot", choices=("on", "off"), default="off", help="on: marks at each step")
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        spawn(measure, (args, port, folder, results), nprocs=args.ranks)  # type: ignore[no-untyped-call]
        table = Table(title=f"{args.ranks} ranks, {args.steps} steps each, in turn; milliseconds are medians")
        for column in ("", "", "plain ms", "guarded ms", "median ratio", "added us a step"):
            table.add_column(column, justify="right")
        for name, pairs in results.items():
            for kind, part in ("clock", 0), ("processor", 1):
                guarded, plain = ([step[part] for step in side] for side in zip(*pairs, strict=True))
                ratio = statistics.median(g / p for g, p in zip(guarded, plain, strict=True))
                added = statistics.median(g - p for g, p in zip(guarded, plain, strict=True))
                row(table, name, kind, statistics.median(plain), statistics.median(guarded), ratio, added)
            low, high = (statistics.quantiles(side, n=10)[0] for side in (plain, guarded))
            row(table, name, "processor, 10 %", low, high, high / low, high - low)
        Console().print(table)
        print(f"load {os.getloadavg()[0]:.1f}")


def row(table: Table, name: str, kind: str, plain: float, guarded: float, ratio: float, added: float) -> None:
    table.add_row(name, kind, f"{plain * 1e3:.2f}", f"{guarded * 1e3:.2f}", f"{ratio:.4f}", f"{added * 1e6:.0f}")


if __name__ == "__main__":
    main()
