"""Plain scripts over two ranks in which rank 1 alone does more: `one_sided.py CASE [UPDATES BEFORE IT SHOWS]`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

case, late = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
dist.init_process_group("gloo")
alone = dist.get_rank() == 1
torch.manual_seed(1)
DATA = TensorDataset(torch.randn(24 + 4 * late, 2))
model = DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader, other = DataLoader(DATA, 4), DataLoader(DATA, 2)
if case == "another optimizer" and alone:
    critic = torch.optim.Adam(model.parameters())
if case == "an average" and alone:
    average = AveragedModel(model.module)


def train(epochs):
    for _epoch in epochs:
        for i, (x,) in enumerate(loader):
            if case == "another loader" and alone and i == late:
                strange = iter(other)
                next(strange)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


train(range(1) if case == "another loader" else (0, 1))
if case == "another optimizer, later":
    if alone:
        critic = torch.optim.Adam(model.parameters())
    train((2,))
print(f"the end: {model.module.weight.sum().item():.9f}")
dist.destroy_process_group()
