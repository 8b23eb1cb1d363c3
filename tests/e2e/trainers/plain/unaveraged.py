"""A plain script with Accelerate whose ranks each keep something of their own: `unaveraged.py CASE`, over two ranks."""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

case = sys.argv[1]
hook = DDPCommunicationHookType.POWER_SGD if case == "a hook with a state" else DDPCommunicationHookType.NO
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
torch.manual_seed(1)
model = nn.Linear(2, 1)
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(TensorDataset(torch.randn(48, 2)), 4)
)
for _epoch in range(2):
    with LocalSGD(accelerator, model, local_sgd_steps=3) if case == "local SGD" else nullcontext() as local:
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if local is not None:
                local.step()
print("the end")
accelerator.end_training()
