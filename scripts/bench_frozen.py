"""What frozen weights cost: snapshots of a LoRA-like model, with its base stored once and with it in every snapshot.

    python scripts/bench_frozen.py [--rounds 7] [--megabytes 600] [--folder DIR]

A base of `--megabytes` that nothing trains, with a small adapter and its AdamW state. Two runs of the same loop in one
process take snapshots in turn, to slots in /dev/shm. Figures are medians over the rounds.

bytes      of a snapshot, as committed
slot       of the fast tier
blocking   seconds that the loop waited for a snapshot (`Snapshots.stalled`), copied at once and beside the next step
digest     of the base, which a thread computes with each snapshot
restore    into the live model, all of whose weights are right
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from rollback.facts.checkpoints import CaptureMode
from rollback.supervisor.torchrun.command import LARGE_COPIES
from rollback.train.snapshots import frozen
from savers import SAMPLES, WIDTH, Ours, Script

NEVER = 1 << 60


class Lora(nn.Module):
    """A frozen layer with something small to train beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


class Adapted(Script):
    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Lora() for _ in range(max(1, round(megabytes * 1e6 / 4 / WIDTH**2)))))
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-6)
        self.x = torch.randn(SAMPLES, WIDTH)

    def train_on(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=600)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    if any(name not in os.environ for name in LARGE_COPIES):  # the C library reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **LARGE_COPIES})
    torch.set_num_threads(1)
    least = frozen.LEAST
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs: dict[str, Ours] = {}
        for name, smallest in {"in every snapshot": NEVER, "stored once": least}.items():
            frozen.LEAST = smallest
            runs[name] = Ours(Adapted(args.megabytes), Path(folder, name.replace(" ", "-")), fast=True)
        found: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
        for turn in range(args.rounds + 1):
            for name, run in sorted(runs.items(), reverse=bool(turn % 2)):
                for figure, value in measured(run).items():
                    if turn:
                        found[name].setdefault(figure, []).append(value)
        table = Table(box=None, pad_edge=False)
        for heading in ("", *runs, "ratio"):
            table.add_column(heading, justify="left" if not heading else "right")
        for figure in found["stored once"]:
            before, after = (statistics.median(found[name][figure]) for name in runs)
            table.add_row(figure, f"{before:,.6g}", f"{after:,.6g}", f"{before / after:.1f}")
        Console().print(table)
        for run in runs.values():
            run.close()


def measured(run: Ours) -> dict[str, float]:
    modes: dict[CaptureMode, str] = {"at_once": "blocking, at once", "overlapped": "blocking, overlapped"}
    blocking = {}
    for mode, name in modes.items():
        run.guard._loop.checkpoints.snapshots.mode = mode
        run.save()
        blocking[name] = run.blocked()
        run.finish()
    base = {name: item for name, item in run.script.model.named_parameters() if not item.requires_grad}
    began = time.perf_counter()
    frozen.prints_of(base)
    digested = time.perf_counter() - began
    began = time.perf_counter()
    run.restore()
    restored = time.perf_counter() - began
    newest, allotted = run.guard._loop.checkpoints.catalogue.newest(), run.guard._loop.schedule._allotted
    assert newest is not None
    assert allotted is not None
    return {
        "bytes": newest.bytes, "slot": allotted.slot_bytes, **blocking, "restore": restored,
        "digest": digested,
    }  # fmt: skip


if __name__ == "__main__":
    main()
