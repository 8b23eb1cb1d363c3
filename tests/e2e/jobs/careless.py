"""A guarded job of a few steps that takes any arguments: `careless.py [rename NAME] [groups] ...`.

`rename NAME`: at batch 3 the host gets that name, and the job waits for the stop that follows. `groups`: at step 3 the
optimizer gets another group, and at batch 30 the job dies, in its first attempt.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

import rollback

Path("told.json").write_text(json.dumps({"arguments": [os.fsencode(text).hex() for text in sys.argv[1:]],
                                         "large": len(os.environ.get("LARGE_0", ""))}))  # fmt: skip
do = sys.argv[1] if len(sys.argv) > 1 else ""
first_attempt = os.environ["ROLLBACK_ATTEMPT"] == "1"
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
groups = [model[1].parameters()] if do == "groups" else [model.parameters()]
optimizer = torch.optim.SGD([{"params": list(group)} for group in groups], lr=0.01)
guard = rollback.Guard(model=model, optimizer=optimizer, loader=list(torch.randn(40, 4, 4)), snapshot_every=2)
for batch, x in enumerate(guard):
    if do == "groups" and guard.step == 3 and len(optimizer.param_groups) == 1:
        optimizer.add_param_group({"params": list(model[0].parameters())})
    guard._loop.checkpoints.snapshots.wait()
    if do == "groups" and batch == 30 and first_attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "rename" and batch == 3 and first_attempt:
        socket.sethostname(sys.argv[2])
        Path("renamed").touch()
        while not guard._loop.requests.stop.requested:
            time.sleep(0.01)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    guard.observe(loss)
