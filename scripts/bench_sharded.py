"""The part of bench_checkpoint.py about sharded models: ours and DCP, the same FSDP2 state, the same loop, in turn.

Two ranks (gloo), each layer sharded for itself. DCP gets its state by `get_state_dict` and gives it back by
`set_state_dict`, as its documents say. Ours is measured in both ways to copy: at once, as it chooses where all cores
compute, and overlapped with the next forward and backward.

blocking   until the call returns and the state may be changed, to /dev/shm; ours overlapped with the optimizer's wait
lost       loop time lost for each checkpoint until it is on disk and synced
restore    into the live model and optimizer, from /dev/shm. Without the step behind it: with gloo that takes seconds,
           which vary by more than a restore takes
reshard    what four ranks have saved, into the live model and optimizer of two, from /dev/shm
extra      peak private memory of all ranks above that of as many steps without a save, as a share of the state
"""

import argparse
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from checkpoint_timing import Peak, lost, of_all_ranks, ordinary, timed
from rollback.checkpoints import ring
from rollback.rundir.paths import RunPaths
from rollback.sentinel import Sentinel
from rollback.train.catalogue.catalogue import CheckpointPlace
from rollback.train.comm.ranks import Ranks
from rollback.train.data.cursor import cursor_for
from rollback.train.restore.restore import restore
from rollback.train.state.state import TrainingState
from savers import MEMORY, Dcp, DcpAsync, DcpAsyncProcess, Method, Ours, Script

OURS = 3
"""Times that ours is measured in a round: the middle one counts."""
AROUND = 2
"""Steps that are taken as ordinary ones: with gloo, a step of a sharded model takes longer than any save of it."""
RESHARDED = "reshard, 4 -> 2"


class ShardedScript(Script):
    """The same model, each layer sharded."""

    def __init__(self, megabytes: int) -> None:
        self.sharded = False
        super().__init__(megabytes)

    def train_on(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sharded:
            self.sharded = True
            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        loss: torch.Tensor = self.model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


class ShardedDcp(Dcp):
    def restore(self) -> None:
        state = self.script.state()
        state_dict_loader.load(state, checkpoint_id=self.folder)
        set_state_dict(
            self.script.model, self.script.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip


Rows = dict[str, dict[str, list[float]]]


def begin(rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)


def measure(rank: int, world: int, args: argparse.Namespace, port: int, folder: str, results: Any) -> None:
    begin(rank, world, port)
    on_disk, in_memory = Path(folder) / "peers", MEMORY / Path(folder).name
    script = ShardedScript(args.megabytes)
    size = sum(item.nbytes for item in script.model.parameters()) * 3  # with two numbers for each in the optimizer
    kinds: dict[str, type[Method]] = {
        "DCP": ShardedDcp, "DCP async, thread": DcpAsync, "DCP async, process": DcpAsyncProcess,
    }  # fmt: skip
    names = {name: name.replace(" ", "-").replace(",", "") for name in kinds}
    to_memory = {name: kind(script, in_memory / names[name]) for name, kind in kinds.items()}
    to_disk = {name: kind(script, on_disk / names[name]) for name, kind in kinds.items()}
    fast = Ours(script, Path(folder) / "fast", fast=True)
    disk = Ours(ShardedScript(args.megabytes), Path(folder) / "disk", fast=False)
    rows: Rows = {}

    def note(turn: int, row: str, name: str, value: float) -> None:
        if turn:
            rows.setdefault(row, {}).setdefault(name, []).append(value)

    for turn in range(args.rounds + 1):
        if rank == 0:
            print(f"round {turn} of {args.rounds}, load {os.getloadavg()[0]:.1f}", flush=True)
        for name, method in sorted(to_memory.items(), reverse=bool(turn % 2)):
            with Peak() as usual:
                ordinary(method, AROUND)
            with Peak() as peak:
                blocked = timed(method.save)
                method.finish()
                ordinary(method, AROUND)
            note(turn, "blocking", name, of_all_ranks(blocked, dist.ReduceOp.MAX))
            note(turn, "extra memory", name, of_all_ranks(peak.bytes - usual.bytes, dist.ReduceOp.SUM) / size)
            if name == "DCP":
                note(turn, "restore", name, of_all_ranks(timed(method.restore), dist.ReduceOp.MAX))
        for name, method in sorted(to_disk.items(), reverse=bool(turn % 2)):
            note(turn, "lost", name, of_all_ranks(lost(method, 2 * AROUND)[0], dist.ReduceOp.MAX))
        for mode in ("at_once", "overlapped"):
            fast.guard._loop.checkpoints.snapshots.mode = disk.guard._loop.checkpoints.snapshots.mode = mode
            name = f"rollback, {mode.replace('_', ' ')}"
            with Peak() as usual:
                ordinary(fast, AROUND)
            waits = []
            with Peak() as peak:
                for _ in range(OURS):
                    fast.save()
                    waits.append(of_all_ranks(fast.blocked(), dist.ReduceOp.MAX))
                    fast.finish()
            note(turn, "blocking", name, statistics.median(waits))
            note(turn, "extra memory", name, of_all_ranks(peak.bytes - usual.bytes, dist.ReduceOp.SUM) / size)
            note(turn, "lost", name, of_all_ranks(lost(disk, 2 * AROUND)[0], dist.ReduceOp.MAX))
        waits = [of_all_ranks(timed(fast.restore), dist.ReduceOp.MAX) for _ in range(OURS)]
        note(turn, "restore", "rollback", statistics.median(waits))
    for method in (*to_memory.values(), *to_disk.values(), fast, disk):
        method.close()
    if rank == 0:
        results["rows"] = rows
    dist.destroy_process_group()


def save_on_four(rank: int, world: int, args: argparse.Namespace, port: int, folder: str) -> None:
    begin(rank, world, port)
    script = ShardedScript(args.megabytes)
    ShardedDcp(script, Path(folder) / "dcp").save()
    ours = Ours(script, Path(folder) / "ours", fast=False)
    ours.save()
    ours.finish()
    ours.guard.close()
    dist.destroy_process_group()


def restore_on_two(rank: int, world: int, args: argparse.Namespace, port: int, folder: str, results: Any) -> None:
    begin(rank, world, port)
    script = ShardedScript(args.megabytes)
    dcp, paths = ShardedDcp(script, Path(folder) / "dcp"), RunPaths(Path(folder) / "ours" / "run")
    state = TrainingState(script.model, script.optimizer, {}, cursor_for(lambda: script.x), Sentinel("normal"))
    name = ring.names(paths)[-1]

    def ours() -> None:
        result = restore(name, [CheckpointPlace(paths.checkpoint(name), paths)], Ranks(), state)
        assert result.place is not None, result.fault

    ways: dict[str, Callable[[], None]] = {"DCP": dcp.restore, "rollback": ours}
    for turn in range(args.rounds + 1):
        for way, act in sorted(ways.items(), reverse=bool(turn % 2)):
            took = of_all_ranks(timed(act), dist.ReduceOp.MAX)
            if turn and rank == 0:
                results[way] = [*results.get(way, []), took]
    dist.destroy_process_group()


def run(args: argparse.Namespace) -> int:
    with mp.Manager() as manager, tempfile.TemporaryDirectory(dir=args.folder, prefix="rollback-bench-") as folder:
        results: Any = manager.dict()
        began = time.monotonic()
        spawn(measure, (2, args, free_port(), folder, results), nprocs=2)  # type: ignore[no-untyped-call]
        rows: Rows = dict(results["rows"])
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="rollback-bench-") as memory:
            spawn(save_on_four, (4, args, free_port(), memory), nprocs=4)  # type: ignore[no-untyped-call]
            found: Any = manager.dict()
            spawn(restore_on_two, (2, args, free_port(), memory, found), nprocs=2)  # type: ignore[no-untyped-call]
            rows[RESHARDED] = dict(found)
    show(rows)
    print(f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f} at the end")
    return 1 if judge(rows) and not args.quick else 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def show(rows: Rows) -> None:
    for row, values in rows.items():
        table = Table(title=row)
        unit = "share of the state" if row == "extra memory" else "seconds"
        for column in ("", f"median, {unit}", "least", "worst"):
            table.add_column(column, justify="right" if column else "left")
        for name, seen in sorted(values.items(), key=lambda item: statistics.median(item[1])):
            table.add_row(name, *(f"{value:.4f}" for value in (statistics.median(seen), min(seen), max(seen))))
        Console().print(table)


def judge(rows: Rows) -> bool:
    """Print what we ask of ourselves and what was seen; whether anything was missed."""

    def ratio(row: str, peer: str, own: str) -> float:
        return statistics.median(rows[row][peer]) / statistics.median(rows[row][own])

    chosen = "rollback, at once"  # two ranks on two cores: see `usual_capture_mode`
    asynchronous = ("DCP async, thread", "DCP async, process")
    checks = [
        ("blocking, less than DCP async", min(ratio("blocking", peer, chosen) for peer in asynchronous), 8.0),
        ("the same, overlapped", min(ratio("blocking", peer, "rollback, overlapped") for peer in asynchronous), 8.0),
        ("restore, less than DCP", ratio("restore", "DCP", "rollback"), 2.0),
        ("reshard 4 -> 2, less than DCP", ratio(RESHARDED, "DCP", "rollback"), 2.0),
    ]
    table = Table(title="what we ask of ourselves")
    for column in ("", "seen, times", "asked for, at least", ""):
        table.add_column(column, justify="right" if column else "left")
    for name, seen, asked in checks:
        table.add_row(name, f"{seen:.2f}", f"{asked:g}", "met" if seen >= asked else "missed")
    Console().print(table)
    return any(seen < asked for _, seen, asked in checks)
