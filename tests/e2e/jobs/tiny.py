"""A guarded job of a few steps; distributed where torchrun started it.

`tiny.py [--width N] [--samples N] [--keep N] [--hold] [--evaluate] [--again]`; with --hold, the first attempt waits at
batch 3 for SIGTERM; with --evaluate, it evaluates for a minute, whatever it is told, once there is a second checkpoint;
with --again, it makes another guard behind the training, for a model of other weights.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rollback

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("--samples", type=int, default=24)
parser.add_argument("--keep", type=int, default=6)
parser.add_argument("--hold", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--again", action="store_true")
options = parser.parse_args()

told: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))  # the guard's handler calls this one, too

if "MASTER_ADDR" in os.environ:
    dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Linear(options.width, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.randn(options.samples, options.width)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, snapshot_every=2, keep=options.keep)
journal = Path(os.environ["ROLLBACK_RUN"], "journal", "train.jsonl")
for batch, (x, y) in enumerate(guard):
    while options.hold and batch == 3 and os.environ["ROLLBACK_ATTEMPT"] == "1" and not told:
        time.sleep(0.01)
    if options.evaluate and os.environ["ROLLBACK_ATTEMPT"] == "1" and journal.read_text().count('"committed"') == 2:
        Path(os.environ["NOTES"], "evaluating").touch()
        for _ in range(600):
            time.sleep(0.1)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    guard.observe(loss)
if options.again:
    guard.close()
    other = nn.Linear(options.width, 1)
    trained = torch.optim.SGD(other.parameters(), lr=0.01)
    rollback.Guard(model=other, optimizer=trained, loader=loader, run="another", snapshot_every=2, keep=options.keep)
    print("a second guard was made")
