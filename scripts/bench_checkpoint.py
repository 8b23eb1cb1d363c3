"""What checkpoints cost a training loop: ours and those that people use, same state, same loop, one run, in turn.

    python scripts/bench_checkpoint.py [--rounds 5] [--megabytes 600] [--folder DIR] [--quick]

A model and its AdamW state of `--megabytes` in all. Every figure is a median over the rounds, in seconds and as a ratio
to a libc memmove of the same bytes, by as many processes, measured in the same rounds. In each round every method comes
once, in changing order.

blocking   until the call returns and the state may be changed, two ranks, to /dev/shm. Ours: `Snapshots.stalled`.
overlapped the same with one rank, to /dev/shm and to the folder; ours includes what the optimizer waits at its fence.
lost       loop time lost for each checkpoint on disk and synced: the loop's time from the save until the checkpoint is
           durable, less that of as many steps without a save.
restore    into the live model and optimizer, with what the step after it takes longer than a step does.
extra      peak private resident memory (RssAnon of /proc/self/status) above that of two steps without a save, sampled
           every two milliseconds, as a share of the state. Shared memory, which slots are, does not count.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import rollback
from rollback.rundir import tiers
from rollback.rundir.sizing import bytes_of
from rollback.train.restoring import restore

try:
    import torchsnapshot
except ImportError:
    torchsnapshot = None

WIDTH = 1024
MEMORY = Path("/dev/shm")


class Script:
    """A model with its optimizer, and one training step."""

    def __init__(self, megabytes: int) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / 12 / WIDTH**2))
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.x = torch.randn(8, WIDTH)
        self.train_on(self.x)

    def train_on(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        for parameter in self.model.parameters():
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(parameter.grad[:1])  # a little of DDP, so that the ranks keep step
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def step(self) -> None:
        self.train_on(self.x)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, Tensor]:
        """As a flat mapping, which is all that safetensors takes."""
        flat = {f"model/{name}": item for name, item in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            flat |= {f"optimizer/{number}/{name}": item for name, item in state.items()}
        return flat


class Method:
    """A way to save. `save` returns when the script may go on; `durable` tells whether what it saved is on disk."""

    durable_by_itself = True

    def __init__(self, script: Script, folder: Path) -> None:
        self.script, self.folder = script, folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        """Wait until it is done."""

    def step(self) -> None:
        self.script.step()

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        """What a script adds so that files survive a power loss: most writers do not."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class TorchSave(Method):
    def save(self) -> None:
        if first():
            torch.save(self.script.state(), self.folder / "state.pt")
        barrier()

    def restore(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        self.script.model.load_state_dict(state["model"])
        self.script.optimizer.load_state_dict(state["optimizer"])


class Safetensors(Method):
    def save(self) -> None:
        if first():
            safetensors.torch.save_file(self.script.tensors(), self.folder / "state.safetensors")
        barrier()

    def restore(self) -> None:
        loaded = safetensors.torch.load_file(self.folder / "state.safetensors")
        optimizer = self.script.optimizer.state_dict()
        for number, state in optimizer["state"].items():
            for name in state:
                state[name] = loaded[f"optimizer/{number}/{name}"]
        model = {key.removeprefix("model/"): item for key, item in loaded.items() if key.startswith("model/")}
        self.script.model.load_state_dict(model)
        self.script.optimizer.load_state_dict(optimizer)


class Dcp(Method):
    def save(self) -> None:
        dcp.save(self.script.state(), checkpoint_id=self.folder)

    def restore(self) -> None:
        state = self.script.state()
        dcp.load(state, checkpoint_id=self.folder)
        self.script.model.load_state_dict(state["model"])
        self.script.optimizer.load_state_dict(state["optimizer"])


class DcpAsync(Method):
    kind = dcp.AsyncCheckpointerType.THREAD if hasattr(dcp, "AsyncCheckpointerType") else None

    def __init__(self, script: Script, folder: Path) -> None:
        super().__init__(script, folder)
        self.future: Any = None
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kind = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        self.future = dcp.async_save(
            self.script.state(), checkpoint_id=self.folder, async_checkpointer_type=kind, async_stager=self.stager
        )

    in_process = False

    def _future(self) -> Any:
        return getattr(self.future, "upload_completion", self.future)

    def done(self) -> bool:
        return bool(self._future().done())

    def finish(self) -> None:
        self._future().result()


class DcpAsyncProcess(DcpAsync):
    in_process = True


class TorchSnapshot(Method):
    def save(self) -> None:
        app = {"model": self.script.model, "optimizer": self.script.optimizer}
        torchsnapshot.Snapshot.take(path=str(self.folder), app_state=app)

    def restore(self) -> None:
        app = {"model": self.script.model, "optimizer": self.script.optimizer}
        torchsnapshot.Snapshot(path=str(self.folder)).restore(app_state=app)


class Ours(Method):
    """The guard as a script uses it, told when to save."""

    def __init__(self, script: Script, folder: Path, fast: bool) -> None:
        super().__init__(script, folder)
        self.guard = rollback.Guard(
            model=script.model, optimizer=script.optimizer, loader=lambda: script.x, run=folder / "run",
            snapshot_every=10**8, checkpoint_every=str(10**8), keep=3, fast_tier=str(MEMORY) if fast else "off",
            evidence_limit=0, observe_only=True,
        )  # fmt: skip
        self.batches: Iterator[Any] = iter(self.guard)
        self.loss: Tensor | None = None
        for _ in range(3):
            self.step()
        self.guard._snapshots.wait()
        for _ in range(4):
            self.step()

    def step(self) -> None:
        x = next(self.batches)
        self.guard.observe(self.script.train_on(x))

    def save(self) -> None:
        self.guard._saver.wanted = True
        before = self.guard._saver._taken_at
        while self.guard._saver._taken_at == before:
            self.step()

    def blocked(self) -> float:
        """Of the snapshot that was taken, with what the optimizer waited since."""
        self.step()
        return self.guard._snapshots.stalled

    def done(self) -> bool:
        return not self.guard._snapshots.in_flight

    def finish(self) -> None:
        for _ in range(50):
            if self.done() and self.guard._snapshots.ready:
                return
            self.guard._snapshots.wait()
            self.step()
        raise RuntimeError("the snapshot never landed")

    def restore(self) -> None:
        newest = self.guard._keeper.newest()
        assert newest is not None
        places = self.guard._keeper.places(newest.name)
        result = restore(newest.name, places, self.guard._ranks, self.guard._state)
        assert result.place is not None, result.fault

    def slots(self) -> tuple[int, int]:
        """Bytes of the tier on this host, and bytes that it was given."""
        tier = tiers.fast_tier_of(self.guard._paths)
        assert tier is not None
        allotted = self.guard._saver._allotted
        assert allotted is not None
        return bytes_of(tier.root), allotted.slots * allotted.slot_bytes

    def close(self) -> None:
        tier = tiers.fast_tier_of(self.guard._paths)
        self.guard.close()
        barrier()  # rank 0 has drained what was left
        if tier is not None and first():
            shutil.rmtree(tier.root, ignore_errors=True)
        barrier()
        super().close()


def first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(act: Callable[[], object]) -> float:
    barrier()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


class Memmove:
    """The bound: this rank's share of the state's bytes into memory that is mapped and warm."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.source, self.target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)

    def once(self) -> float:
        return timed(lambda: ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.size))


class Peak:
    """Peak of this process's private resident memory."""

    def __enter__(self) -> Peak:
        self.peak = anonymous()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.over.wait(0.002):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def measure(rank: int, world: int, args: argparse.Namespace, port: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
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
        found: dict[str, float] = {"memmove": bound.once()}
        for name in names:
            found[name] = timed(peers[name].save)
            peers[name].finish()
        with Peak() as usual:
            ours.step()
            ours.step()
        with Peak() as peak:
            ours.save()
            found["rollback"] = ours.blocked()
            ours.finish()
        found["rollback: extra memory"] = max(0, peak.peak - usual.peak) / size
        for name, value in found.items():
            if turn:
                note.setdefault(name, []).append(slowest(value))
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
                own.step()
                own.step()
            with Peak() as peak:
                own.save()
                found["overlapped"][name] = own.blocked()
                own.finish()
            found["overlapped"][f"{name}: extra memory"] = max(0, peak.peak - usual.peak) / size
        found["lost"]["rollback"], _ = lost(disk)
        found["restore"]["rollback"] = restored(fast)
        for row, values in found.items():
            for name, value in values.items():
                if turn:
                    rows[row].setdefault(name, []).append(value)
    for method in (*to_memory.values(), *to_disk.values(), fast, disk):
        method.close()
    return rows


def peers_of(script: Script, folder: Path) -> dict[str, Method]:
    kinds: dict[str, type[Method]] = {
        "torch.save": TorchSave, "safetensors": Safetensors, "DCP": Dcp,
        "DCP async, thread": DcpAsync, "DCP async, process": DcpAsyncProcess,
    }  # fmt: skip
    if torchsnapshot is not None:
        kinds["torchsnapshot"] = TorchSnapshot
    return {name: kind(script, folder / name.replace(" ", "-").replace(",", "")) for name, kind in kinds.items()}


def lost(method: Method) -> tuple[float, float]:
    """Loop time lost to one checkpoint until it is durable, and for how long the call blocked."""
    for _ in range(2):
        method.step()
    usual = statistics.median(timed(method.step) for _ in range(7))
    steps, synced = 0, False
    began = time.perf_counter()
    method.save()
    blocked = time.perf_counter() - began
    if isinstance(method, Ours):
        steps += 1
    while steps < 4 or not synced:
        if not synced and method.done():
            if not isinstance(method, Ours):
                method.sync()
            synced = True
        method.step()
        steps += 1
    return time.perf_counter() - began - steps * usual, blocked


def restored(method: Method) -> float:
    usual = statistics.median(timed(method.step) for _ in range(5))
    return timed(method.restore) + max(0.0, timed(method.step) - usual)


def slowest(value: float) -> float:
    """Of all ranks: they wait for one another."""
    number = torch.tensor(value)
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return float(number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of which medians are taken, after one to warm up")
    parser.add_argument("--megabytes", type=int, default=600, help="of parameters and AdamW state")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--quick", action="store_true", help="a small state and one round: whether it works")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.megabytes = 1, 24
    if torchsnapshot is None:
        print("torchsnapshot is not installed and is left out")
    with mp.Manager() as manager:
        results: Any = manager.dict()
        for world in (2, 1):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="rollback-bench-") as folder:
                mp.spawn(measure, (world, args, port, folder, results), nprocs=world)
            show(results[world])


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
    main()
