"""What a guard asks of a device in a loop where all is well: no wait of the host, and no memory of the device."""

from pathlib import Path

import torch
from on_devices import NEEDS_GPU
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rollback

pytestmark = NEEDS_GPU
STEPS = 120
EVERY = 10


def train(run: Path | None, *, strictly: bool = False) -> int:
    """Train a model of 4 MB on a device, and return the most memory of it that was in use, in bytes.

    strictly: whatever makes the host wait for the device raises, once the first snapshots have found their memory.
    """
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    data = TensorDataset(torch.randn(8 * STEPS, 1024), torch.randn(8 * STEPS, 1))
    loader = DataLoader(data, batch_size=8, pin_memory=True)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Dropout(0.1), nn.Linear(1024, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    guard = None
    if run is not None:
        guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, run=run, snapshot_every=EVERY)
    try:
        for number, (x, y) in enumerate(loader if guard is None else guard):
            if strictly and number == 3 * EVERY:
                torch.cuda.set_sync_debug_mode("error")
            if number == STEPS - 1:
                torch.cuda.set_sync_debug_mode("default")
            x, y = (each.cuda(non_blocking=True) for each in (x, y))  # noqa: PLW2901
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)  # noqa: PLW2901
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if guard is not None:
                guard.observe(loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if guard is not None:
        guard.close()
    return torch.cuda.max_memory_allocated()


def test_a_healthy_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """Its snapshots do not either. The pulse that is waited for is a step old."""
    train(tmp_path / "run", strictly=True)


def test_snapshots_take_no_memory_of_the_device(tmp_path: Path) -> None:
    plain, guarded = train(None), train(tmp_path / "run")
    state = 3 * 4 * 1024 * 1024
    assert guarded - plain < state / 10
