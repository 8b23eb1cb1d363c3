"""A guarded job that hangs at batch 5: the first rank on HOST is stopped, all others wait for it. `stuck.py HOST`"""

import os
import signal
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn

import rollback


def wait_for_all(batch: int) -> None:
    if (batch, socket.gethostname(), os.environ["LOCAL_RANK"]) == (5, sys.argv[1], "0"):
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(1))


dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(2, 4)] * 20)
for inputs in guard:
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    guard.observe(loss)
    wait_for_all(guard.batch)
