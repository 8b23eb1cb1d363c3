"""What snapshots and rollbacks of a state on a GPU cost, ours and the peers' in one run, one rank, no other job.

    python scripts/bench_gpu.py [--gigabytes 1 10 40] [--rounds 3] [--alone] [--json FILE] [--device cpu]

A model and its AdamW state of each size; sizes for which the device, the host's memory or /dev/shm has no room are
named and left out. Every figure is a median over the rounds; of ours the worst is shown too. Peers take turns with us,
unless --alone leaves them out: they take nine tenths of the time. Each figure is printed as it is found, too.

link       a copy_ of as many bytes into pinned memory that is there already: the bound for each copy
copy       from the first byte of a snapshot to the last, by events on the device, as a share of the link's bandwidth
lost       loop time lost to a snapshot until it has landed in /dev/shm: the loop's time less that of as many steps
blocked    until the call returns and the loop may go on
restore    from /dev/shm into the live model and optimizer
rollback   a NaN in a batch: from the decision until the loop goes on (`seconds` of the fact `restored`)

With --device cpu it shows that it works, and nothing else: nothing is copied from a device there.
"""

import argparse
import json
import logging
import math
import os
import shutil
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
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rollback
from checkpoint_timing import lost, ordinary
from rollback.checkpoints import tiers
from rollback.facts.training import Restored
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.snapshots.capture import Capture
from savers import MEMORY, DcpAsync, DcpAsyncProcess, Method, Ours, Script, TorchSave, TorchSnapshot, has_torchsnapshot

WIDTH = {"cuda": 4096, "cpu": 256}
SAMPLES = {"cuda": 8192, "cpu": 64}  # a step takes 80 ms for each GB of the state on a large GPU
LARGE = 4.0  # GB, from which on steps do not get longer: longer than a copy, and not the benchmark's whole time
NAN_AT, EVERY = 25, 10
Found = dict[str, list[float]]


class Stepping(Script):
    """A step ends when the device has done it. What it copies beside that is not waited for."""

    def __init__(self, gigabytes: float, device: str) -> None:
        samples = int(SAMPLES[device] / max(1.0, gigabytes / LARGE))
        super().__init__(int(gigabytes * 1e3), device, WIDTH[device], samples)

    def train_on(self, x: Tensor) -> Tensor:
        loss = super().train_on(x)
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        return loss

    @property
    def size(self) -> int:
        return sum(item.nbytes for item in self.tensors().values())


class Copies:
    """Seconds that the device took for the copies of each snapshot, from within."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._start = Capture._start_on_device

    def __enter__(self) -> "Copies":
        def timed(capture: Capture) -> None:
            if not torch.cuda.is_available():
                return self._start(capture)
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            self._start(capture)
            if capture._stream is not None:
                ended.record(capture._stream)
                self._events.append((began, ended))
            return None

        setattr(Capture, "_start_on_device", timed)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(Capture, "_start_on_device", self._start)  # noqa: B010

    def seconds(self) -> list[float]:
        for _, ended in self._events:
            ended.synchronize()
        return [began.elapsed_time(ended) / 1e3 for began, ended in self._events]


def link(size: int) -> float:
    """Seconds for a copy of so many bytes from the device into pinned memory, in pieces that need little room."""
    piece = min(size, 1 << 30)
    source = torch.ones(piece, dtype=torch.uint8, device="cuda")
    target = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(math.ceil(size / piece)):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * size / (math.ceil(size / piece) * piece)


def no_room_for(size: float, device: str) -> str | None:
    """Why a state of so many bytes cannot be measured here."""
    wanted: list[tuple[str, float, float]] = [("/dev/shm", shutil.disk_usage(MEMORY).free, 4.5 * size)]
    if device == "cuda":
        wanted.append(("the device's memory", torch.cuda.mem_get_info()[0], 1.6 * size))
    for what, free, needed in wanted:
        if free < needed:
            return f"{what} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB are needed"
    return None


def peers_of(script: Script, folder: Path) -> dict[str, Method]:
    kinds: dict[str, type[Method]] = {
        "torch.save": TorchSave, "DCP async, thread": DcpAsync, "DCP async, process": DcpAsyncProcess,
    }  # fmt: skip
    if has_torchsnapshot:
        kinds["torchsnapshot"] = TorchSnapshot
    return {name: kind(script, folder / name.replace(" ", "-").replace(",", "")) for name, kind in kinds.items()}


def snapshots(gigabytes: float, device: str, rounds: int, folder: Path, alone: bool) -> tuple[Found, int]:
    script = Stepping(gigabytes, device)
    found: Found = {}
    ours, peers = Ours(script, folder / "ours", fast=True), {} if alone else peers_of(script, MEMORY / folder.name)

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)
        print(f"{gigabytes:g} GB, {name}: {seconds:.4f} s", flush=True)

    with Copies() as copies:
        for turn in range(rounds + 1):
            seen = len(copies.seconds())
            ordinary(ours)
            for name, method in [("rollback", ours), *sorted(peers.items(), reverse=bool(turn % 2))]:
                took, blocked = lost(method, steps_around=4)
                method.finish()
                if turn:
                    note(f"lost: {name}", took)
                    note(f"blocked: {name}", ours.blocked() if method is ours else blocked)
            if turn and device == "cuda":
                note("link", link(script.size))
            if turn:
                for seconds in copies.seconds()[seen:]:
                    note("copy", seconds)
                note("restore: rollback", clocked(ours.restore, device))
                if not alone:
                    note("restore: torch.save", clocked(peers["torch.save"].restore, device))
    for method in (*peers.values(), ours):
        method.close()
    return found, script.size


def clocked(act: Callable[[], None], device: str) -> float:
    began = time.perf_counter()
    act()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def rollbacks(gigabytes: float, device: str, rounds: int, folder: Path) -> Found:
    """Of as many jobs that meet a NaN, one after the other."""
    found: Found = {"rollback": []}
    for number in range(rounds):
        script, run = Stepping(gigabytes, device), folder / f"run{number}"
        batches = [script.x] * (2 * NAN_AT)
        batches[NAN_AT] = script.x * float("nan")
        guard = rollback.Guard(
            model=script.model, optimizer=script.optimizer, loader=batches, run=run,
            snapshot_every=EVERY, keep=3, probation=EVERY, fast_tier=str(MEMORY), max_steps=NAN_AT + EVERY,
            policy="surgical", checkpoint_every=str(10**8), evidence_limit=0, max_skipped="100%",
        )  # fmt: skip
        for x in guard:
            guard.observe(script.train_on(x))
        tier = tiers.fast_tier_of(RunPaths(run))
        guard.close()
        if tier is not None:
            shutil.rmtree(tier.root, ignore_errors=True)
        facts = [record.fact for record in read_journal(RunPaths(run).train_journal).records]
        found["rollback"] += [fact.seconds for fact in facts if isinstance(fact, Restored)]
        shutil.rmtree(run)
        del script, guard
    return found


def show(gigabytes: float, found: Found, size: int) -> None:
    table = Table(title=f"a state of {size / 1e9:.1f} GB")
    for column in ("", "median s", "worst s", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        speed = f"{size / middle / 1e9:.1f}" if name in ("link", "copy", "rollback") or "restore" in name else ""
        table.add_row(name, f"{middle:.4f}", f"{max(seconds):.4f}", speed)
    Console().print(table)
    if "copy" in found:
        share = statistics.median(found["link"]) / statistics.median(found["copy"])
        print(f"{gigabytes:g} GB: the copy runs at {100 * share:.0f} % of the link's bandwidth")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 10, 40], help="of parameters and AdamW state")
    parser.add_argument("--rounds", type=int, default=3, help="after one to warm up")
    parser.add_argument("--alone", action="store_true", help="without the peers")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="write all figures there, after each size")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu shows whether the benchmark works")
    logging.disable(logging.INFO)  # of DCP's process, line after line
    warnings.simplefilter("ignore", UserWarning)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)  # DCP's process wants a group, even of one rank
    told: dict[str, Any] = {}
    for gigabytes in args.gigabytes:
        if (why := no_room_for(gigabytes * 1e9, args.device)) is not None:
            print(f"{gigabytes:g} GB: not measured: {why}")
            continue
        with tempfile.TemporaryDirectory(prefix="rollback-bench-") as folder:
            found, size = snapshots(gigabytes, args.device, args.rounds, Path(folder), args.alone)
            found |= rollbacks(gigabytes, args.device, args.rounds, Path(folder))
        show(gigabytes, found, size)
        told[f"{gigabytes:g} GB"] = {"bytes": size, "seconds": found}
        if args.json is not None:
            args.json.write_text(json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
