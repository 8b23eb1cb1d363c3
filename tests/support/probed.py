"""A job whose loss goes up a little and stays up, by its labels or by its weights; as a script, `probed.py SCENARIOS`.

It has learned nearly all when the trouble comes, and goes on learning slowly. The labels of a sample are in the data
set; the weights are moved once, whatever is done again later. Dropout draws, the batch norm's statistics move, and
reading a sample draws too. A scenario has `toy`, a `Case`, and `run`.
"""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scenarios import perform_all
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate
from toy import flat

import rollback

FAULT_AT, STEPS = 90, 150
BATCH, ROWS = 8, 8  # samples of a batch, and rows of a sample: to read many samples is most of what such a job costs
SETTINGS: dict[str, Any] = {
    "snapshot_every": 20, "probation": 10, "rewind": 5, "skip_after": 3, "max_skipped": "100%", "sensitivity": "low",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    fault: str | None
    """`labels`, `weights`."""
    probe: bool = True
    workers: int = 0
    accumulate: int = 1
    loader: str = "map"
    """`map`, `iterable`."""
    odd: str | None = None
    """`object`: batches have something that is not looked into, `object on the last rank` there alone; `hidden`: the
    model counts in a plain attribute; `gradients`: half of each is left for the next update; `noise`: the loop draws
    from a generator of its own."""
    skip: tuple[tuple[int, int], ...] = ()
    steps: int = STEPS

    def to_json(self) -> str:
        return json.dumps(vars(self))


class Labelled(Dataset[Any]):
    """In their order; from one on the labels are wrong by a little."""

    def __init__(self, case: Case, ranks: int) -> None:
        source = torch.Generator().manual_seed(3)
        count = STEPS * case.accumulate * BATCH * ranks
        self.x = torch.randn(count, ROWS, 6, generator=source)
        self.y = self.x.sum(2, keepdim=True) + 0.5 * torch.randn(count, ROWS, 1, generator=source)
        if case.fault == "labels":
            self.y[FAULT_AT * case.accumulate * BATCH * ranks :] += 0.55

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index] + 0.01 * torch.randn(6) + 0.01 * random.random(), self.y[index], index


class InOrder(IterableDataset[Any]):
    def __init__(self, data: Labelled, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(self.rank, len(self.data), self.ranks))


def with_an_object(samples: list[Any]) -> list[Any]:
    return [*default_collate(samples), Path("of no interest")]


class Net(nn.Module):
    """A line, which is what there is to learn, and beside it layers that draw and that have buffers."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        if counts:
            self.seen = torch.zeros(())
        self.line = nn.Linear(6, 1)
        self.beside = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen = self.seen + len(x)
        return self.line(x) + 0.1 * self.beside(x)  # type: ignore[no-any-return]


def run_case(case: Case, run: Path, in_probe: Callable[[], bool] = lambda: False) -> dict[str, str]:
    """Train to the end, and tell what there is then and what was trained on, each value as a short text.

    in_probe: called when a probe's update is made; true: the loop is left there.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(1)
    net = Net(case.odd == "hidden")
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 30 else 0.001)
    data = Labelled(case, ranks)
    if case.loader == "map":
        sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, shuffle=False)
        odd = case.odd == "object" or (case.odd == "object on the last rank" and rank == ranks - 1)
        collate = with_an_object if odd else None
        loader = DataLoader(data, BATCH, sampler=sampler, num_workers=case.workers, collate_fn=collate)
    else:
        loader = DataLoader(InOrder(data, rank, ranks), BATCH)
    noise = torch.Generator().manual_seed(60 + rank) if case.odd == "noise" else None
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, max_steps=case.steps, run=run,
        probe=case.probe, skip=[{"first": first, "last": last} for first, last in case.skip], **SETTINGS,
    )  # fmt: skip
    torch.manual_seed(50 + rank)
    random.seed(50 + rank)
    consumed: dict[int, list[Any]] = {}
    moved = handed_out = 0
    with contextlib.closing(guard):
        for samples_x, samples_y, ids, *_ in guard:
            x, y = samples_x.flatten(0, 1), samples_y.flatten(0, 1)
            guard._loop.checkpoints.snapshots.wait()
            if noise is not None:
                y = y + 0.2 * torch.randn(y.shape, generator=noise)
            if case.fault == "weights" and guard.step == FAULT_AT and not moved:
                moved = 1
                with torch.no_grad():
                    net.line.weight.mul_(0.75)
            loss = (model(x) - y).abs().mean() / case.accumulate
            for p in net.parameters() if case.odd == "gradients" else ():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            loss.backward()
            guard.observe(loss, grad_norm=1.0)  # what the norm would say is not what is tested
            consumed[guard.batch] = ids.tolist()
            handed_out += 1
            if handed_out % case.accumulate == 0:
                optimizer.step()
                scheduler.step()
                if case.odd != "gradients":
                    optimizer.zero_grad()
                if guard._loop.step_in_progress.probe_batches and in_probe():
                    break
    return flat({
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        "random": [random.getstate(), torch.get_rng_state()],
        "gradients": [p.grad for p in net.parameters()], "consumed": consumed, "steps": guard.step,
    }) | {"handed out": str(handed_out)}  # fmt: skip


def perform(scenario: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    return {"portrait": run_case(Case(**json.loads(scenario["toy"])), Path(scenario["run"]))}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    perform_all(perform)
