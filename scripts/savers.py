"""Ways to save and restore a training state, ours and those that people use, behind one interface: for benchmarks."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import rollback
from rollback.checkpoints import tiers
from rollback.train.restore.restore import restore

try:
    import torchsnapshot
except ImportError:
    torchsnapshot = None
has_torchsnapshot = torchsnapshot is not None

WIDTH = 1024
SAMPLES = 64  # of a step: enough for a step to compute more than it moves, as training does
MEMORY = Path("/dev/shm")


class Script:
    """A model with its optimizer, and one training step. width: of its square layers."""

    def __init__(self, megabytes: int, device: str = "cpu", width: int = WIDTH, samples: int = SAMPLES) -> None:
        torch.manual_seed(0)
        layers = max(1, round(megabytes * 1e6 / 12 / width**2))
        with torch.device(device):
            self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
            self.x = torch.randn(samples, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.train_on(self.x)

    def train_on(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.model.parameters():
            assert parameter.grad is not None
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
        state_dict_saver.save(self.script.state(), checkpoint_id=self.folder)

    def restore(self) -> None:
        state = self.script.state()
        state_dict_loader.load(state, checkpoint_id=self.folder)
        self.script.model.load_state_dict(state["model"])
        self.script.optimizer.load_state_dict(state["optimizer"])


class DcpAsync(Method):
    def __init__(self, script: Script, folder: Path) -> None:
        super().__init__(script, folder)
        self.future: Any = None
        # Its thread talks to the other ranks while the job trains: in the job's own group both would wait for ever.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() and not self.in_process else None
        self.stager = self._new_stager()

    def _new_stager(self) -> DefaultStager:
        device = self.script.x.is_cuda  # torch copies best into pinned memory, without waiting for each tensor
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=device, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=device
            )
        )

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if not self.stager._state_dict_stager._deepcopy_dispatch:
            self.stager = self._new_stager()  # torch 2.11 closes it after each save in a thread
        kind = AsyncCheckpointerType.PROCESS if self.in_process else AsyncCheckpointerType.THREAD
        self.future = state_dict_saver.async_save(
            self.script.state(), checkpoint_id=self.folder, process_group=self.group, async_checkpointer_type=kind,
            async_stager=self.stager,
        )  # fmt: skip

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
        self.guard._loop.checkpoints.snapshots.wait()
        for _ in range(4):
            self.step()

    def step(self) -> None:
        x = next(self.batches)
        self.guard.observe(self.script.train_on(x))

    def save(self) -> None:
        self.guard._loop.checkpoints.wanted = True
        before = self.guard._loop.schedule._taken_at
        while self.guard._loop.schedule._taken_at == before:
            self.step()

    def blocked(self) -> float:
        """Of the snapshot that was taken, with what the optimizer waited since."""
        self.step()
        return self.guard._loop.checkpoints.snapshots.stalled

    def done(self) -> bool:
        return not self.guard._loop.checkpoints.snapshots.in_flight

    def finish(self) -> None:
        for _ in range(50):
            if self.done() and self.guard._loop.checkpoints.snapshots.ready:
                return
            self.guard._loop.checkpoints.snapshots.wait()
            self.step()
        raise RuntimeError("the snapshot never landed")

    def restore(self) -> None:
        newest = self.guard._loop.checkpoints.catalogue.newest()
        assert newest is not None
        places = self.guard._loop.checkpoints.places(newest.name)
        result = restore(newest.name, places, self.guard._loop.run.ranks, self.guard._loop.state)
        assert result.place is not None, result.fault

    def slots(self) -> tuple[int, int]:
        """Bytes of the slots on this host, and bytes that they were given. Marks of the last snapshot are apart."""
        tier = tiers.fast_tier_of(self.guard._loop.run.paths)
        assert tier is not None
        allotted = self.guard._loop.schedule._allotted
        assert allotted is not None
        files = (path for path in tier.root.glob("*/*") if path.parent.name != "last")
        return sum(path.lstat().st_blocks * 512 for path in files), allotted.slots * allotted.slot_bytes

    def close(self) -> None:
        tier = tiers.fast_tier_of(self.guard._loop.run.paths)
        self.guard.close()
        barrier()  # rank 0 has drained what was left
        if tier is not None and first():
            shutil.rmtree(tier.root, ignore_errors=True)
        barrier()
        super().close()


def peers_of(script: Script, folder: Path) -> dict[str, Method]:
    kinds: dict[str, type[Method]] = {
        "torch.save": TorchSave, "safetensors": Safetensors, "DCP": Dcp,
        "DCP async, thread": DcpAsync, "DCP async, process": DcpAsyncProcess,
    }  # fmt: skip
    if has_torchsnapshot:
        kinds["torchsnapshot"] = TorchSnapshot
    return {name: kind(script, folder / name.replace(" ", "-").replace(",", "")) for name, kind in kinds.items()}


def first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
