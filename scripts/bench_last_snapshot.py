"""What the marks for the last snapshot cost a rank at every step, in its own processor time.

    python scripts/bench_last_snapshot.py [--steps 400]

Two ranks train a small model under a guard, with dropout and a scheduler, and with batch norms: without marks
(`--last-snapshot off`), the processor time of a step is that of everything else. Printed are, for each model, the
medians of what the early mark and the end mark take, in training, where the caches are full of other things, and in a
loop of nothing else; and the bytes of a mark. The time of a fixed piece of Python in the same process stands beside it,
to compare machines and moments.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
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
from rollback.train.last_snapshot.early import TRIED, EarlyMarks

RANKS = 2
NORMS = (0, 36)


def model_of(norms: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(8, 16), nn.Dropout(0.1)]
    for _ in range(norms):
        layers += [nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16)]
    return nn.Sequential(*layers, nn.Linear(16, 1))


def timed(owner: Any, name: str, seconds: list[float]) -> None:
    """Note the processor time of each call of that method."""
    ordinary: Callable[..., Any] = getattr(owner, name)

    def call(*given: Any, **others: Any) -> Any:
        began = time.thread_time()
        result = ordinary(*given, **others)
        seconds.append(time.thread_time() - began)
        return result

    setattr(owner, name, call)


def alone(act: Callable[[], object], times: int = 1000) -> float:
    """The median processor time of one call behind the other."""
    seconds: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        act()
        seconds.append(time.thread_time() - began)
    return statistics.median(seconds)


def measure(rank: int, steps: int, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo")
    early: list[float] = []
    timed(EarlyMarks, "_in_backward", early)  # a hook of its own has the method from the beginning
    for norms in NORMS:
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(model_of(norms))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        data = TensorDataset(torch.randn(4 * RANKS * (steps + 1), 8), torch.randn(4 * RANKS * (steps + 1), 1))
        sampler: DistributedSampler[Any] = DistributedSampler(data)
        memory = Path(folder, f"memory-{norms}")
        memory.mkdir(mode=0o700, exist_ok=True)
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=DataLoader(data, batch_size=4, sampler=sampler),
            scheduler=scheduler, run=Path(folder, f"run-{norms}"), fast_tier=str(memory), snapshot_every=10 * steps,
        )  # fmt: skip
        last = guard._loop.last_snapshot
        assert last._early is not None, "there are no last snapshots"
        end: list[float] = []
        python: list[float] = []
        size, both_alone = 0, 0.0
        for number, (x, y) in enumerate(guard):
            if number == TRIED + 9:
                both_alone = alone(last._early._in_backward) + alone(last.mark_end)
            if number == TRIED + 10:
                early.clear()
                timed(last, "mark_end", end)
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            guard.observe(loss.detach())
            began = time.thread_time()
            sum(place * 2 for place in range(1000))
            python.append(time.thread_time() - began)
            size = len(last._small_state.local().text) + len(last._small_state.local().stored)
        guard.close()
        if rank == 0:
            results[norms] = (*map(statistics.median, (early, end, python)), both_alone, size)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        results = manager.dict()
        spawn(measure, (arguments.steps, port, folder, results), nprocs=RANKS)  # type: ignore[no-untyped-call]
        table = Table(title="Microseconds of processor time in a step, medians")
        for column in ("batch norms", "early mark", "end mark", "together", "in a loop", "bytes", "fixed Python"):
            table.add_column(column, justify="right")
        for norms, (early, end, python, both_alone, size) in sorted(results.items()):
            cells = (f"{1e6 * each:.0f}" for each in (early, end, early + end, both_alone))
            table.add_row(str(norms), *cells, str(size), f"{1e6 * python:.0f}")
        Console().print(table)


if __name__ == "__main__":
    main()
