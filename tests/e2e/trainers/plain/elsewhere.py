"""A plain script whose loop over batches is in another file, as in MAE and DeiT: epochs here, batches in means.py.

`elsewhere.py OUT EPOCHS [BATCH]`: when it has taken so many, it kills itself, in a first attempt.
"""

import itertools
import os
import signal
import sys

import torch
from means import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.use_deterministic_algorithms(True)
torch.manual_seed(7)
x = torch.randn(80, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(80)), 4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


class Average:
    """Of the weights, as EMA libraries have it: no module."""

    def __init__(self, parameters):
        self.shadow = [p.detach().clone() for p in parameters]

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = [p.clone() for p in state["shadow"]]

    def update(self, parameters):
        for mine, p in zip(self.shadow, parameters, strict=True):
            mine.lerp_(p.detach(), 0.1)


average = Average(model.parameters())
taken = itertools.count(1)


def update(model, x, y, ids, place):
    if [str(next(taken))] == sys.argv[3:] and os.environ.get("ROLLBACK_ATTEMPT", "1") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 - place / 4)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    average.update(model.parameters())
    return loss.item()


for _warm in range(2):
    torch.rand(1)
for epoch in range(int(sys.argv[2])):
    print(f"epoch {epoch}: {train(model, loader, optimizer, update, epoch):.6f}, {len(list(loader))} batches")
torch.save(
    {"model": model.state_dict(), **average.state_dict(), "random": torch.get_rng_state()}, f"{sys.argv[1]}-0.pt"
)
