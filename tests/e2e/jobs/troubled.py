"""A guarded job of two ranks that gets into another kind of trouble in each attempt, and finishes in the seventh.

Before the first trouble it does what must not be taken for a hang: rank 0 evaluates for long, its peer waits for it.
"""

import ctypes
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import rollback

ATTEMPT = int(os.environ["ROLLBACK_ATTEMPT"])
EVALUATION = 6.0  # seconds; the test's limit for hangs is shorter
POISONED = 37


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == POISONED:
            raise ValueError(f"sample {index} cannot be decoded \x1b[31m")
        return torch.full((4,), float(index))


def evaluate(model: nn.Module) -> None:
    until = time.monotonic() + EVALUATION
    while time.monotonic() < until:
        model(torch.ones(64, 4))
        time.sleep(0.05)


def get_into_trouble(rank: int, batch: int) -> None:
    match ATTEMPT, rank, batch:
        case 1, 1, 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        case 2, 1, 7:
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter lock
        case 3, 0, 8:
            threading.Event().wait()  # and leaves out the all-reduce that its peer waits in
    dist.all_reduce(torch.ones(1))
    if (ATTEMPT, rank, batch) == (6, 1, 19):
        threading.Event().wait()  # its peer waits for its part of the last beat


dist.init_process_group("gloo")
rank = dist.get_rank()
if (ATTEMPT, rank) == (6, 0):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # as a sampling profiler has one
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = Numbers()
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=1)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, snapshot_every=2)
for inputs in guard:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    guard.observe(loss)
    if guard.batch == 3 and ATTEMPT == 1:
        if rank == 0:
            evaluate(model.module)
        dist.barrier()
    get_into_trouble(rank, guard.batch)
dist.destroy_process_group()
