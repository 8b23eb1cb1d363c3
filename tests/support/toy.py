"""A small deterministic training job with every knob that the tests turn, and a portrait of what it ends with.

`train(toy, run=folder)` trains under a guard, `train(toy)` without one: the same loop, so that the two can be compared.
What is wrong with the data is said by position in the stream (`nan`, `garbage`), since a test must know when it comes.
"""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import rollback
from rollback.facts.history import History, fold
from rollback.facts.training import Fact
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import read_skipped

PRESETS = {"snapshot_every": "auto", "rewind": None, "skip_after": None, "probation": 25, "max_skipped": "5%"}
"""Those of a job whose script names none."""
SETTINGS = {"snapshot_every": 10, "rewind": 5, "skip_after": 3, "probation": 8, "max_skipped": "100%"}
"""Those of a test that names no others: the balanced preset's, made smaller; toys are too short for a share."""


@dataclass(frozen=True)
class Toy:
    """One job. Batches are positions in the stream; nan: those with a NaN target (on rank `nan_rank`, if given);
    garbage: first and last of a stretch of wild targets; once: only the first time that they come by.
    """

    samples: int = 400
    epochs: int = 1
    loop: str = "range"
    """`range`; `epochs`: guard.epochs(); `rehearsed epochs`: that, with a batch for a pass that has none left, and
    with resumes between two epochs."""
    loader: str = "map"
    """`map`, `drawn` (callable), `iterator`, `stateful`, `list`."""
    sampler: str = "random"
    """`random`, `distributed`, `sequential`."""
    batch_size: int = 4
    """Of each rank; map-style and stateful loaders only."""
    workers: int = 0
    augment: bool = False
    """Reading a sample draws random numbers."""
    accumulate: int = 1
    by_epoch: bool = False
    """Count the batches of an update anew in each epoch. What is left at its end makes an update of its own."""
    max_steps: int | None = None
    between: bool = False
    """Between two epochs: evaluate, which draws random numbers, and step the per-epoch scheduler."""
    evaluates_behind: int | None = None
    """Evaluate behind this batch, too."""
    leave_after: int | None = None
    """Break out of every epoch's loop after so many batches."""
    scaler: bool = False
    overflow: tuple[int, ...] = ()
    """Batches whose gradient overflows, for the scaler to find."""
    nan: tuple[int, ...] = ()
    nan_rank: int | None = None
    garbage: tuple[int, int] | None = None
    once: bool = False
    poison: tuple[int, ...] = ()
    """Samples that cannot be read."""
    breaking: tuple[int, ...] = ()
    """Samples at which the step raises."""
    bad: tuple[int, ...] = ()
    """Samples with a NaN target."""
    join: bool = False
    """Loop inside of DistributedDataParallel's `join`, with fewer samples for each further rank."""
    nan_input: tuple[int, ...] = ()
    """Batches of which one sample (on rank `nan_rank`, if given) has a NaN among its inputs."""
    level: str | None = None
    """The model follows the level of its inputs in a buffer: `hidden`: no state_dict has it, and what the model gives
    depends on it; `aside`: it is in the state_dict, and nothing depends on it, nor on inputs that are NaN."""
    noise: str | None = None
    """Inputs get noise by a random generator of the script's own: `torch` (seeded anew for each epoch), `numpy`,
    `twister` (NumPy's older one), `python`."""
    average: bool = False
    """Keep an average of the model, buffers too, beside it."""
    base: str | None = None
    """Weights in front that nothing trains, more than a MiB: `frozen`; `slow`: written to all the same."""
    width: int = 16
    sharding: str | None = None
    """`fsdp`: FSDP2, with `, mixed` in bfloat16, with `, gathered` not sharded again behind the forward, with `,
    recomputed` without stored activations, with `, offloaded` parameters kept on the host; `hsdp`: two replicas of it;
    `tensor parallel`: over half the ranks, FSDP2 over the rest."""
    bucket_cap_mb: float | None = None
    """Of DistributedDataParallel."""
    device: str = "cpu"
    """`cpu`, or `cuda`: then with kernels that are deterministic."""
    narrow: str | None = None
    """What the forward computes in under autocast: `bfloat16`, `float16`."""
    adamw: str | None = None
    """`foreach`, `fused`."""
    clip: float | None = None
    """The norm to which gradients are clipped, without a scaler."""
    compiled: str | None = None
    """The mode of torch.compile."""
    replicas: str = "guarded"
    """Where DistributedDataParallel is: `compiled`: inside of torch.compile, without a compiler; `part`: inside of a
    module; `unguarded`: the guard gets the module that is inside of it."""
    recomputed: bool = False
    """Activations are not kept but computed again in the backward."""
    pinned: bool = False
    """Batches lie in pinned memory."""
    patient: bool = True
    """Wait for the disk at each batch. A toy's step is shorter than a sync: which checkpoints there are would otherwise
    depend on the disk's speed, and with them what a rollback restores and skips."""
    settings: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> "Toy":
        return replace(self, **changes)

    def with_settings(self, **settings: Any) -> "Toy":
        return replace(self, settings={**self.settings, **settings})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Toy":
        fields: dict[str, Any] = json.loads(text)
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists})


class Samples(Dataset[Any]):
    """Sample i and its number. The targets follow from the inputs, so there is something to learn."""

    def __init__(self, count: int, augment: bool, poison: tuple[int, ...] = ()) -> None:
        self.poison = poison
        source = torch.Generator().manual_seed(5)
        self.x = torch.randn(count, 8, generator=source)
        self.y = self.x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(count, 1, generator=source)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if index in self.poison:
            raise ValueError(f"sample {index} cannot be decoded")
        x = self.x[index]
        if self.augment:
            x = x + 0.01 * torch.randn(8) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return x, self.y[index], index


class Endless:
    """Batches drawn for ever, as nanoGPT does: by calling it or as an iterator."""

    def __init__(self, data: Samples) -> None:
        self.data = data

    def __next__(self) -> Any:
        chosen = torch.randint(len(self.data), (4,))
        return self.data.x[chosen], self.data.y[chosen], chosen

    def __iter__(self) -> "Endless":
        return self


Hook = Callable[[rollback.Guard | None, int], None]
"""Called with the guard and the position of each batch that was handed out, before it is used."""


def train(toy: Toy, run: Path | None = None, *, hook: Hook | None = None, log: Path | None = None) -> dict[str, str]:
    """Train to the end and return the portrait: what there is at the end, by name, each value as a short text.

    With `log`, consumed samples are appended to that file as they come and read back from it at the end, so that the
    portrait covers attempts that were killed.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if toy.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    parts = _Parts(toy, rank)
    guard = None
    if run is not None:
        settings = {**SETTINGS, **toy.settings}
        guard = rollback.Guard(
            model=parts.guarded, optimizer=parts.optimizer, loader=parts.loader, scheduler=parts.scheduler,
            scaler=parts.scaler, average=parts.average, max_steps=toy.max_steps, run=run, **settings,
        )  # fmt: skip
    seed(100 + (0 if toy.sharding == "tensor parallel" else rank))
    trained = Loop(toy, parts, guard, rank, hook, log)
    try:
        trained.run()
    finally:
        if guard is not None:
            guard.close()
    return trained.portrait()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


class Level(nn.Module):
    """See `Toy.level`. The mask is infinite on purpose."""

    level: Tensor
    mask: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.hidden = kind == "hidden"
        self.register_buffer("level", torch.ones(8), persistent=not self.hidden)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
        self.plain = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.level.lerp_(x.abs().mean(0), 0.1)
        return x / (1 + self.level) if self.hidden else x.nan_to_num()


class Base(nn.Module):
    """See `Toy.base`. What it writes, it writes past torch's version counter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.slow = kind == "slow"
        self.wide = nn.Linear(8, 32_768)
        self.wide.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.slow and self.training:
            self.wide.bias.data.lerp_(x.detach().mean(), 0.1)
        wide: Tensor = self.wide(x)
        return x + wide.reshape(len(x), 8, -1).mean(2)


def recompute(model: nn.Module, *kinds: type[nn.Module]) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, kinds))


def shard(model: nn.Module, sharding: str, device: str) -> None:
    """The linear layers each for itself, the rest with the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks, layers = dist.get_world_size(), [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    kind, *with_ = sharding.split(", ")
    match kind:
        case "fsdp":
            mesh = init_device_mesh(device, (ranks,))
        case "hsdp":
            mesh = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
        case _:
            both = init_device_mesh(device, (2, ranks // 2), mesh_dim_names=("shards", "tensors"))
            plan = {
                layers[0]: ColwiseParallel(output_layouts=Replicate()),
                layers[-1]: RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(model, both["tensors"], plan)
            mesh = both["shards"]
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=False) if "offloaded" in with_ else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh, "reshard_after_forward": "gathered" not in with_, "offload_policy": offload,
    }  # fmt: skip
    if "recomputed" in with_:
        recompute(model, nn.Linear)
    for name in layers:
        of_layer: dict[str, Any] = {"mp_policy": narrow} if "mixed" in with_ else {}
        fully_shard(model.get_submodule(name), **options, **of_layer)
    fully_shard(model, **options)


_NOISES: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed), "numpy": np.random.default_rng,
    "twister": np.random.RandomState, "python": random.Random,
}  # fmt: skip


class _Parts:
    """The objects of a script."""

    def __init__(self, toy: Toy, rank: int) -> None:
        torch.manual_seed(7)
        width = toy.width
        self.model: nn.Module = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        if toy.level is not None:
            self.model = nn.Sequential(Level(toy.level), self.model)
        if toy.base is not None:
            self.model = nn.Sequential(Base(toy.base), self.model)
        self.model.to(toy.device)
        if toy.recomputed:
            recompute(self.model, nn.Linear, nn.Dropout)
        self.average = AveragedModel(self.model, use_buffers=True) if toy.average else None
        self.averaged = self.model
        if toy.compiled is not None:
            self.model = torch.compile(self.model, mode=toy.compiled)  # type: ignore[assignment]
        if toy.sharding is not None:
            shard(self.model, toy.sharding, toy.device)
        elif dist.is_initialized():
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=toy.bucket_cap_mb)
        if toy.replicas == "part":
            self.model = nn.Sequential(self.model)
        if toy.replicas == "compiled":
            torch._dynamo.config.optimize_ddp = False  # it cuts graphs at buckets, and only at large ones
            self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]
        self.guarded: Any = self.model.module if toy.replicas == "unguarded" else self.model
        trained = [p for p in self.model.parameters() if p.requires_grad]
        how: dict[str, Any] = {toy.adamw: True} if toy.adamw is not None else {}
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, **how)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.8 if toy.between else 0.998)
        self.scaler = torch.amp.GradScaler(toy.device, init_scale=1024.0, growth_interval=20) if toy.scaler else None
        data = Samples(toy.samples - 40 * rank * toy.join, toy.augment, toy.poison)
        data.y[list(toy.bad)] = float("nan")
        self.sampler: DistributedSampler[Any] | None = None
        if toy.sampler == "distributed":
            ranks = dist.get_world_size() if dist.is_initialized() else 1
            same = ranks // 2 if toy.sharding == "tensor parallel" else 1  # so many ranks in a row share one batch
            self.sampler = DistributedSampler(data, num_replicas=ranks // same, rank=rank // same)
        self.loader = self._loader(toy, data)
        self.noise = _NOISES[toy.noise](rank) if toy.noise is not None else None

    def _loader(self, toy: Toy, data: Samples) -> Any:
        match toy.loader:
            case "drawn":
                return Endless(data).__next__
            case "iterator":
                return Endless(data)
            case "list":
                return [_slice(data, start) for start in range(0, len(data), 4)]
            case "stateful":
                from torchdata.stateful_dataloader import StatefulDataLoader as Loader
            case _:
                Loader = DataLoader
        shuffle = toy.sampler == "random"
        return Loader(
            data, batch_size=toy.batch_size, sampler=self.sampler, shuffle=shuffle, num_workers=toy.workers,
            pin_memory=toy.pinned,
        )  # fmt: skip


def _slice(data: Samples, start: int) -> tuple[Tensor, Tensor, Tensor]:
    return data.x[start : start + 4], data.y[start : start + 4], torch.arange(start, start + 4)


class Loop:
    """What a tidy script does, with and without a guard."""

    def __init__(
        self, toy: Toy, parts: _Parts, guard: rollback.Guard | None, rank: int, hook: Hook | None, log: Path | None
    ) -> None:
        self.toy, self.parts, self.guard, self.rank, self.hook = toy, parts, guard, rank, hook
        self.consumed: dict[int, list[Any]] = {}
        self.log = log
        self.position = -1
        self.steps = 0
        self.micro = 0
        self.under_way = False
        self.rehearsed: Any = None
        self.come_by: set[int] = set()

    def run(self) -> None:
        toy, parts = self.toy, self.parts
        if toy.loop != "range" and self.guard is not None:
            between = toy.loop == "rehearsed epochs"
            rehearse = self.rehearsal if between else None
            epochs: Iterable[int] = self.guard.epochs(toy.epochs, rehearse=rehearse, resume_between=between)
        else:
            epochs = range(toy.epochs)
        for epoch in epochs:
            if parts.sampler is not None:
                parts.sampler.set_epoch(epoch)
            self.micro = 0 if toy.by_epoch else self.micro
            if isinstance(parts.noise, torch.Generator):
                parts.noise.manual_seed(epoch)
            taken = 0
            with parts.model.join() if toy.join else contextlib.nullcontext():  # type: ignore[operator]
                for taken, (x, y, ids) in enumerate(self.batches(), 1):
                    self.train_on(x, y, ids)
                    if taken == toy.leave_after:
                        break
            if toy.by_epoch and self.under_way:
                self.update()
            assert taken or toy.loop != "rehearsed epochs", "what the body sets is not set"
            if toy.between:
                self.evaluate()
                parts.scheduler.step()

    def batches(self) -> Iterator[Any]:
        if self.guard is not None:
            for batch in self.guard:
                self.position, self.steps = self.guard.batch, self.guard.step
                if self.toy.patient:
                    self.guard._loop.checkpoints.snapshots.wait()
                yield batch
            return
        loader = self.parts.loader
        for batch in iter(loader, None) if self.toy.loader == "drawn" else loader:
            if self.steps == self.toy.max_steps:
                return
            self.position += 1
            yield batch

    def rehearsal(self) -> Any:
        self.rehearsed = next(iter(self.parts.loader))
        return self.rehearsed

    def drawn(self) -> float:
        noise: Any = self.parts.noise
        if isinstance(noise, torch.Generator):
            return torch.rand(1, generator=noise).item()
        return float(noise.normal() if hasattr(noise, "normal") else noise.gauss(0, 1))

    def train_on(self, x: Tensor, y: Tensor, ids: Tensor) -> None:
        toy, parts, position = self.toy, self.parts, self.position
        counts = self.rehearsed is None or x is not self.rehearsed[0]
        if self.hook is not None and counts:
            self.hook(self.guard, position)
        if {*ids.tolist()} & {*toy.breaking}:
            raise ArithmeticError(f"the step at batch {position} broke")
        if counts:
            self.note(ids.tolist())
        x, y = (each.to(toy.device, non_blocking=toy.pinned) for each in (x, y))
        if parts.noise is not None:
            x = x + self.drawn()
        y = self.spoil(y, position)
        if position in toy.nan_input and toy.nan_rank in (None, self.rank):
            x = x.clone()
            x[0, 0] = torch.nan
        self.micro += 1
        whole = self.micro % toy.accumulate == 0 or (toy.by_epoch and self.micro == len(parts.loader))
        if toy.sharding is not None:
            parts.model.set_requires_gradient_sync(whole)  # type: ignore[operator]
        alone = whole or toy.sharding is not None or not dist.is_initialized()
        quiet = contextlib.nullcontext() if alone else parts.model.no_sync()  # type: ignore[operator]
        with quiet:
            with torch.autocast(toy.device, getattr(torch, toy.narrow)) if toy.narrow else contextlib.nullcontext():
                seen = parts.model(x)
            loss = ((seen.float() - y) ** 2).mean() / toy.accumulate
            if position in toy.overflow:
                loss = loss * 1e38
            (parts.scaler.scale(loss) if parts.scaler is not None else loss).backward()
        if self.guard is not None:
            self.guard.observe(loss.detach() / (1e38 if position in toy.overflow else 1))
        self.under_way = True
        if whole:
            self.update()
        if position == toy.evaluates_behind:
            self.evaluate()

    def update(self) -> None:
        toy, parts = self.toy, self.parts
        if parts.scaler is not None:
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        else:
            if toy.clip is not None:
                torch.nn.utils.clip_grad_norm_(parts.model.parameters(), toy.clip)
            parts.optimizer.step()
        if not toy.between:
            parts.scheduler.step()
        if parts.average is not None:
            parts.average.update_parameters(parts.averaged)
        parts.optimizer.zero_grad()
        self.steps += 1
        self.under_way = False

    def spoil(self, y: Tensor, position: int) -> Tensor:
        toy = self.toy
        if toy.once and position in self.come_by:
            return y
        self.come_by.add(position)
        if position in toy.nan and toy.nan_rank in (None, self.rank):
            return y * float("nan")
        if toy.garbage is not None and toy.garbage[0] <= position <= toy.garbage[1]:
            return y * 20 + (30 if position % 2 == 0 else -30)
        return y

    def evaluate(self) -> None:
        """Without eval(): dropout draws and the batch norm moves, so that what is left out or done twice shows."""
        with torch.no_grad():
            self.parts.model(torch.randn(4, 8, device=self.toy.device))
        random.random()
        np.random.rand()

    def note(self, ids: list[int]) -> None:
        if self.log is None:
            self.consumed.setdefault(self.steps, [])
            if self.micro % self.toy.accumulate == 0:
                self.consumed[self.steps] = []
            self.consumed[self.steps].append([self.position, ids])
            return
        line = json.dumps([self.steps, self.micro % self.toy.accumulate, self.position, ids]) + "\n"
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, line.encode())
        os.close(fd)

    def portrait(self) -> dict[str, str]:
        parts = self.parts
        steps = self.steps if self.guard is None else self.guard.step
        if self.log is not None:
            for line in self.log.read_text().splitlines():
                step, micro, position, ids = json.loads(line)
                if micro == 0:
                    self.consumed[step] = []
                self.consumed[step].append([position, ids])
        version, words, gauss = random.getstate()
        drawn: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
        if self.toy.device == "cuda":
            drawn["cuda"] = torch.cuda.get_rng_state()
        drawn["numpy"] = [item.tolist() if isinstance(item, np.ndarray) else item for item in np.random.get_state()]
        return flat({
            "model": parts.model.state_dict(),
            "buffers": dict(parts.model.named_buffers()),
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": parts.scheduler.state_dict(),
            "scaler": parts.scaler.state_dict() if parts.scaler is not None else None,
            "average": parts.average.state_dict() if parts.average is not None else None,
            "random": drawn,
            "consumed": {step: batches for step, batches in sorted(self.consumed.items()) if step < steps},
            "steps": steps,
        })  # fmt: skip


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf of a state by its path, as a short text that differs if a bit does."""
    if isinstance(value, Tensor):
        value = getattr(value, "full_tensor", lambda: value)()  # of a sharded one, from all ranks
        value = value.cpu()
        body = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(body).hexdigest()[:12]
        return {path: f"{value.dtype}{list(value.shape)} {digest} {value.reshape(-1)[:3].tolist()}"}
    if isinstance(value, dict):
        return {key: text for name, item in value.items() for key, text in flat(item, f"{path}/{name}").items()}
    text = repr(value)
    return {path: text if len(text) < 100 else f"{hashlib.sha256(text.encode()).hexdigest()[:12]} {text[:80]}"}


def require_same(one: dict[str, str], other: dict[str, str], what: str) -> None:
    """Fails naming the first thing that differs."""
    differing = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    assert not differing, (
        f"{what}: {len(differing)} of {len(one)} entries differ, first {differing[0]}:\n"
        f"  {one.get(differing[0])}\n  {other.get(differing[0])}\n  all: {differing[:12]}"
    )


def consumed(portrait: dict[str, str]) -> dict[int, list[int]]:
    """Samples by position, of the steps that count. Only where no step has so many batches that they were shortened."""
    steps = [json.loads(text) for name, text in portrait.items() if name.startswith("/consumed")]
    return {batch: ids for step in steps for batch, ids in step}


def weights(portrait: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in portrait.items() if name.startswith("/model")}


def facts(run: Path, *kinds: type[Fact]) -> list[Any]:
    """Facts of the ranks' journal, of these kinds (default: all), in order."""
    return _facts(RunPaths(run).train_journal, kinds or (Fact,))


def stop_at(batch: int) -> Hook:
    """Break off at this batch."""

    def stop(_guard: object, position: int) -> None:
        if position == batch:
            raise KeyboardInterrupt

    return stop


def supervisor_facts(run: Path, *kinds: type[Fact]) -> list[Any]:
    """Facts of the supervisor's journal, of these kinds, in order."""
    return _facts(RunPaths(run).supervisor_journal, kinds)


def _facts(journal: Path, kinds: tuple[type[Fact], ...]) -> list[Any]:
    return [record.fact for record in read_journal(journal).records if isinstance(record.fact, kinds)]


def history(run: Path) -> History:
    return fold(read_journal(RunPaths(run).train_journal).records)


def skip_list(run: Path) -> list[dict[str, int]]:
    """The windows in force, as the setting `skip` takes them."""
    return [window.model_dump() for window in history(run).skip_list]


def skipped(run: Path, rank: int = 0) -> dict[int, list[int] | None]:
    """Data set indices by position of all batches that a rank passed over."""
    return {line.batch: line.indices for line in read_skipped(RunPaths(run).skip_record(rank), [])}


def left_out(run: Path) -> list[dict[str, Any]]:
    """What was left out from where on, as the setting `skip_samples` takes it."""
    return [{"batch": fact.batch, "samples": list(fact.samples)} for fact in history(run).quarantine]


def told_from_the_start(toy: Toy, run: Path) -> Toy:
    """The same over the same data, told at the start what that run found out."""
    return toy.with_settings(skip=skip_list(run), skip_samples=left_out(run))


def same_skips_from_the_start(toy: Toy, run: Path, fresh: Path) -> dict[str, str]:
    """Oracle A: a fresh run over the same data that was told at the start what the other one found out."""
    return train(told_from_the_start(toy, run), fresh)


def files(root: Path) -> dict[str, bytes | None]:
    """Everything in a directory, byte for byte, but for heartbeats, which live as long as the process that trained."""
    found = [path for path in root.rglob("*") if path.parent.name != "ranks"]
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in found}
