"""What checkpoints cost a training loop: ours and those that people use, same state, same loop, one run, in turn.

    python scripts/bench_checkpoint.py [--rounds 5] [--megabytes 600] [--folder DIR] [--quick]
    python scripts/bench_checkpoint.py --sharded       # FSDP2 on two ranks, ours and DCP: see bench_sharded.py

A model and its AdamW state of `--megabytes` in all. Every figure is a median over the rounds, in seconds and as a ratio
to a libc memmove of the same bytes, by as many processes, measured in the same rounds. In each round every peer comes
once, in changing order, and ours a few times, of which the middle one counts. The processes have the environment in
which `rollback launch` starts ranks.

blocking   until the call returns and the state may be changed, two ranks, to /dev/shm. Ours: `Snapshots.stalled`.
overlapped the same with one rank, to /dev/shm and to the folder; ours includes what the optimizer waits at its fence.
lost       loop time lost for each checkpoint on disk and synced: the loop's time from the save until the checkpoint is
           durable, less that of as many steps without a save.
restore    into the live model and optimizer, with what the step after it takes longer than a step does.
extra      peak private resident memory (VmHWM less RssShmem of /proc/self/status) of all ranks above that of as many
           steps without a save, as a share of the state. Allocators breathe, so it may be below nothing. Shared memory,
           which slots are, does not count: they are mapped before.
"""

import argparse
import ctypes
import logging
import os
import socket
import statistics
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

from checkpoint_timing import Peak, lost, of_all_ranks, ordinary, restored, timed
from rollback.supervisor.torchrun.command import LARGE_COPIES
from savers import MEMORY, Method, Ours, Script, has_torchsnapshot, peers_of

OURS = 3
"""Times that ours is measured in a round, and the memmove beside it: small as they are next to what the machine's own
speed drifts by, the middle one counts."""


class Memmove:
    """The bound: this rank's share of the state's bytes into memory that is mapped and warm."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.source, self.target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def once(self) -> float:
        return timed(lambda: ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.size))


def measure(rank: int, world: int, args: argparse.Namespace, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.INFO)  # of DCP's process, line after line
    warnings.simplefilter("ignore", UserWarning)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    script = Script(args.megabytes)
    size = sum(item.nbytes for item in script.tensors().values())
    rows = blocking(script, Path(folder), args, size) if world == 2 else alone(script, Path(folder), args, size)
    if rank == 0:
        results[world] = rows
    dist.destroy_process_group()


Rows = dict[str, dict[str, list[float]]]


def blocking(script: Script, folder: Path, args: argparse.Namespace, size: int) -> Rows:
    """Two ranks, every core busy."""
    memory = Path(folder.as_posix().replace(str(args.folder), str(MEMORY)))
    bound = Memmove(size // 2)
    ours = Ours(script, folder / "ours", fast=True)
    peers = peers_of(script, memory)
    rows: Rows = {"blocking": {}}
    note = rows["blocking"]
    for turn in range(args.rounds + 1):
        names = sorted(peers, reverse=bool(turn % 2))
        found: dict[str, float] = {}
        for name in names:
            found[name] = timed(peers[name].save)
            peers[name].finish()
        with Peak() as usual:
            ordinary(ours)
        bounds, blocked = [], []
        with Peak() as peak:
            for _ in range(OURS):
                bounds.append(of_all_ranks(bound.once(), dist.ReduceOp.MAX))
                ours.save()
                blocked.append(of_all_ranks(ours.blocked(), dist.ReduceOp.MAX))
                ours.finish()
        found["memmove"], found["rollback"] = statistics.median(bounds), statistics.median(blocked)
        found["rollback: extra memory"] = of_all_ranks(peak.bytes - usual.bytes, dist.ReduceOp.SUM) / size
        for name, value in found.items():
            if turn:
                # A loop waits for the slowest rank.
                note.setdefault(name, []).append(of_all_ranks(value, dist.ReduceOp.MAX))
    used, given = ours.slots()
    rows["slots"] = {"bytes used": [float(used)], "bytes given": [float(given)]}
    for method in (*peers.values(), ours):
        method.close()
    return rows


def alone(script: Script, folder: Path, args: argparse.Namespace, size: int) -> Rows:
    """One rank, a core free."""
    memory = Path(folder.as_posix().replace(str(args.folder), str(MEMORY)))
    bound = Memmove(size)
    fast, disk = Ours(script, folder / "fast", fast=True), Ours(Script(args.megabytes), folder / "disk", fast=False)
    rows: Rows = {"overlapped": {}, "lost": {}, "restore": {}}
    to_memory, to_disk = peers_of(script, memory), peers_of(script, folder / "peers")
    for turn in range(args.rounds + 1):
        found: dict[str, dict[str, float]] = {row: {"memmove": bound.once()} for row in rows}
        for name, method in sorted(to_memory.items(), reverse=bool(turn % 2)):
            found["overlapped"][f"{name}, memory"] = timed(method.save)
            method.finish()
            if type(method).restore is not Method.restore:
                found["restore"][name] = restored(method)
        for name, method in sorted(to_disk.items(), reverse=bool(turn % 2)):
            found["lost"][name], found["overlapped"][f"{name}, disk"] = lost(method)
        for name, own in (("rollback, memory", fast), ("rollback, disk", disk)):
            with Peak() as usual:
                ordinary(own)
            with Peak() as peak:
                own.save()
                found["overlapped"][name] = own.blocked()
                own.finish()
            found["overlapped"][f"{name}: extra memory"] = (peak.bytes - usual.bytes) / size
        found["lost"]["rollback"] = statistics.median(lost(disk)[0] for _ in range(OURS))
        found["restore"]["rollback"] = statistics.median(restored(fast) for _ in range(OURS))
        for row, values in found.items():
            for name, value in values.items():
                if turn:
                    rows[row].setdefault(name, []).append(value)
    for method in (*to_memory.values(), *to_disk.values(), fast, disk):
        method.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken, after one to warm up")
    parser.add_argument("--megabytes", type=int, default=600, help="of parameters and AdamW state")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--ranks", type=int, choices=(1, 2), help="only what is measured with so many")
    parser.add_argument("--sharded", action="store_true", help="a sharded model instead, ours and DCP")
    parser.add_argument("--quick", action="store_true", help="a small state and one round: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.megabytes = 1, 24
    for name, value in LARGE_COPIES.items():
        os.environ.setdefault(name, value)
    if args.sharded:
        import bench_sharded  # which imports what the other half need not have

        return bench_sharded.run(args)
    if not has_torchsnapshot:
        print("torchsnapshot is not installed and is left out")
    with mp.Manager() as manager:
        results: Any = manager.dict()
        worlds = (args.ranks,) if args.ranks else (2, 1)
        for world in worlds:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="rollback-bench-") as folder:
                spawn(measure, (world, args, port, folder, results), nprocs=world)  # type: ignore[no-untyped-call]
            show(results[world])
        found = {row: medians(values) for world in worlds for row, values in results[world].items()}
    return 1 if not args.quick and judge(found) else 0


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(found) for name, found in values.items()}


def judge(rows: Mapping[str, Mapping[str, float]]) -> bool:
    """Print what we ask of ourselves and what was seen; whether anything was missed."""
    checks: list[tuple[str, float, str, float]] = []
    if (blocking := rows.get("blocking")) is not None:
        checks += [
            ("blocking, of a memmove", blocking["rollback"] / blocking["memmove"], "at most", 1.5),
            ("blocking, less than DCP", blocking["DCP"] / blocking["rollback"], "at least", 8),
            ("blocking, less than torch.save", blocking["torch.save"] / blocking["rollback"], "at least", 8),
            ("extra memory, two ranks", blocking["rollback: extra memory"], "at most", 0.05),
            ("slots used, of those given", rows["slots"]["bytes used"] / rows["slots"]["bytes given"], "at most", 1),
        ]
    if (overlapped := rows.get("overlapped")) is not None:
        for medium in ("memory", "disk"):
            ours = overlapped[f"rollback, {medium}"]
            peer = best(overlapped, f", {medium}")
            checks.append((f"overlapped, {medium}, seconds", ours, "at most", 0.02))
            checks.append((f"overlapped, {medium}, less than the best peer", peer / ours, "at least", 6))
            checks.append((f"extra memory, {medium}", overlapped[f"rollback, {medium}: extra memory"], "at most", 0.05))
    if (lost := rows.get("lost")) is not None:
        checks.append(("lost for a durable checkpoint, seconds", lost["rollback"], "at most", 0.3))
        checks.append(("lost, less than the best peer", best(lost) / lost["rollback"], "at least", 4))
    if (restore := rows.get("restore")) is not None:
        checks.append(("restore, of a memmove", restore["rollback"] / restore["memmove"], "at most", 2))
    table = Table(title="what we ask of ourselves")
    for column in ("", "seen", "asked for", ""):
        table.add_column(column, justify="right" if column else "left")
    missed = [name for name, seen, how, bar in checks if (seen > bar if how == "at most" else seen < bar)]
    for name, seen, how, bar in checks:
        table.add_row(name, f"{seen:.3g}", f"{how} {bar:g}", "missed" if name in missed else "met")
    Console().print(table)
    return bool(missed)


def best(values: Mapping[str, float], ending: str = "") -> float:
    """Of the peers whose names end so."""
    return min(
        found
        for name, found in values.items()
        if not name.startswith(("rollback", "memmove")) and name.endswith(ending)
    )


def show(rows: Rows) -> None:
    for row in (name for name in rows if name != "slots"):
        values = rows[row]
        bound = statistics.median(values["memmove"])
        table = Table(title=row)
        for column in ("", "seconds", "x memmove"):
            table.add_column(column, justify="left" if not column else "right")
        for name, seconds in sorted(values.items(), key=lambda item: statistics.median(item[1])):
            middle = statistics.median(seconds)
            if name.endswith("memory") and ":" in name:
                table.add_row(name, f"{100 * middle:.1f} %", "")
            else:
                table.add_row(name, f"{middle:.4f}", f"{middle / bound:.2f}")
        Console().print(table)
    if "slots" in rows:
        used, given = (rows["slots"][name][0] for name in ("bytes used", "bytes given"))
        Console().print(f"slots: {used / 1e6:.0f} MB used of {given / 1e6:.0f} MB given")


if __name__ == "__main__":
    sys.exit(main())
