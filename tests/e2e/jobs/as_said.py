"""Scripts as users wrote them who reported wrong data: `as_said.py NAME`. Each notes what it trains on.

A line a batch in `trained-RANK.jsonl` of the folder NOTES. `KILL` in the environment is the step at which the last rank
kills itself, unless it did in an earlier attempt.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, get_worker_info, random_split

import rollback

NOTES = Path(os.environ["NOTES"])
SETTINGS: dict[str, Any] = {"snapshot_every": 5, "probation": 6}
SAMPLES, EPOCHS = 80, 3

if "MASTER_ADDR" in os.environ:
    dist.init_process_group("gloo")
RANK = dist.get_rank() if dist.is_initialized() else 0
RANKS = dist.get_world_size() if dist.is_initialized() else 1


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((4,), index / SAMPLES), index


class Trained:
    """A model under training, and the notes of what it was trained on."""

    def __init__(self, loader: Any, **more: Any) -> None:
        torch.manual_seed(7)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.guard = rollback.Guard(
            model=self.model, optimizer=self.optimizer, loader=loader, **{**SETTINGS, **more}
        )  # fmt: skip

    def note(self, ids: Any, **more: Any) -> None:
        killed = NOTES / "killed"
        if str(self.guard.step) == os.environ.get("KILL") and RANK == RANKS - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # A step is shorter than a sync: there would be no checkpoint in mid-epoch.
        self.guard._loop.checkpoints.snapshots.wait()
        line = {
            "step": self.guard.step,
            "batch": self.guard.batch,
            "epoch": self.guard.epoch,
            "ids": list(map(int, ids)),
        }
        with (NOTES / f"trained-{RANK}.jsonl").open("a") as notes:
            notes.write(json.dumps({**line, **more}) + "\n")

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x.sum(1, keepdim=True)).square().mean()

    def update(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.step(loss)

    def step(self, loss: Tensor) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.guard.observe(loss.detach())


# Loaders whose order follows set_epoch --------------------------------------------------------------------------------


class OnDevice:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for x, ids in self.loader:
            yield x.to("cpu"), ids


class OnDeviceLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, ids in super().__iter__():
            yield x.to("cpu"), ids


class EpochSampler(Sampler[int]):
    _epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return SAMPLES // RANKS

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._epoch)).tolist()
        return iter(order[RANK::RANKS])


def follow(sampler: Any, loader: Any) -> None:
    trained = Trained(loader)
    for epoch in trained.guard.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        for x, ids in trained.guard:
            trained.note(ids)
            trained.update(trained.loss(x))


def wrapper() -> None:
    sampler = DistributedSampler(Numbered(), RANKS, RANK)
    follow(sampler, OnDevice(DataLoader(Numbered(), batch_size=2, sampler=sampler)))


def subclass() -> None:
    sampler = DistributedSampler(Numbered(), RANKS, RANK)
    follow(sampler, OnDeviceLoader(Numbered(), batch_size=2, sampler=sampler))


def epoch_of_another_name() -> None:
    sampler = EpochSampler()
    follow(sampler, DataLoader(Numbered(), batch_size=2, sampler=sampler))


# Data that are others when the script is started again ----------------------------------------------------------------


def split() -> None:
    """minGPT's, where the states at its split are others at each start."""
    torch.seed()
    train, _ = random_split(Numbered(), [40, 40])
    trained = Trained(DataLoader(train, batch_size=2, shuffle=True))
    for _ in range(EPOCHS):
        for x, ids in trained.guard:
            trained.note(ids)
            trained.update(trained.loss(x))


def file() -> None:
    """Reads the numbers that a file holds, which somebody may write anew."""
    numbers = json.loads((NOTES / "data.json").read_text())
    trained = Trained(DataLoader([(torch.full((4,), i / 99), i) for i in numbers], batch_size=2, shuffle=True))  # type: ignore[arg-type]
    for _ in range(EPOCHS):
        for x, ids in trained.guard:
            trained.note(ids)
            trained.update(trained.loss(x))


# Workers --------------------------------------------------------------------------------------------------------------


class Seeds(Numbered):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return (*super().__getitem__(index), info.seed - info.id)


def worker_seeds() -> None:
    torch.manual_seed(RANK)  # of each rank its own, as augmentation needs it with or without a guard
    sampler: Any = DistributedSampler(Seeds(), RANKS, RANK)
    trained = Trained(DataLoader(Seeds(), batch_size=2, sampler=sampler, num_workers=1))
    torch.manual_seed(RANK)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, ids, seeds in trained.guard:
            trained.note(ids, seeds=seeds.tolist())
            trained.update(trained.loss(x))


# Loops ----------------------------------------------------------------------------------------------------------------


def get_batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(SAMPLES, (4,))
    return torch.stack([torch.full((4,), i / SAMPLES) for i in ids.tolist()]), ids


def prefetching() -> None:
    """nanoGPT's: the next batch is fetched before backward of this one, so that the copy overlaps with it."""
    trained = Trained(get_batch, max_steps=40)
    batches = iter(trained.guard)
    x, ids = next(batches)
    for _ in range(30):
        trained.note(ids)
        loss = trained.loss(x)
        x, ids = next(batches)
        trained.update(loss)


def prefetching_while_accumulating() -> None:
    trained = Trained(get_batch, max_steps=40)
    batches = iter(trained.guard)
    x, ids = next(batches)
    for _ in range(20):
        for _ in range(2):
            trained.note(ids)
            loss = trained.loss(x) / 2
            x, ids = next(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        trained.step(loss)


def many(trained: Trained) -> Iterator[Any]:
    for _ in range(EPOCHS):
        yield from trained.guard


def all_of_an_update_first() -> None:
    """Hugging Face's: the micro-batches of an update are drawn first, then each is trained on."""
    trained = Trained(DataLoader(Numbered(), batch_size=4, shuffle=True))
    batches = many(trained)
    while group := [batch for _, batch in zip(range(2), batches, strict=False)]:
        loss = torch.zeros(())
        for x, ids in group:
            trained.note(ids)
            loss = trained.loss(x) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        trained.step(loss)


def some_left_out() -> None:
    trained = Trained(DataLoader(Numbered(), batch_size=4, shuffle=True))
    for x, ids in many(trained):
        trained.note(ids)
        if int(ids[0]) % 3 == 0:
            continue
        trained.update(trained.loss(x))


def accumulating() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = Trained(DataLoader(Numbered(), batch_size=4, shuffle=True))
    for number, (x, ids) in enumerate(many(trained), 1):
        trained.note(ids)
        with trained.model.no_sync() if number % 2 else contextlib.nullcontext():  # type: ignore[operator]
            loss = trained.loss(x) / 2
            loss.backward()  # type: ignore[no-untyped-call]
        if number % 2 == 0:
            trained.step(loss)


def several_forwards() -> None:
    """As contrastive training and GANs do: the model is called several times before backward, and in between."""
    trained = Trained(DataLoader(Numbered(), batch_size=4, shuffle=True))
    for x, ids in many(trained):
        trained.note(ids)
        with torch.no_grad():
            target = trained.model(x + 0.1)
        one = (trained.model(x) - trained.model(x + 0.2)).square().mean()
        one.backward()
        trained.update(trained.loss(x) + (trained.model(x) - target).square().mean())


def evaluated_in_between() -> None:
    trained = Trained(DataLoader(Numbered(), batch_size=4, shuffle=True))
    for number, (x, ids) in enumerate(many(trained)):
        trained.note(ids)
        loss = trained.loss(x)
        if number % 5 == 0:
            trained.model.eval()
            with torch.no_grad():
                for other, _ in DataLoader(Numbered(), batch_size=20):
                    trained.model(other)
            trained.model.train()
        trained.update(loss)


# nanoGPT's evaluation -------------------------------------------------------------------------------------------------


def drawing(evaluate: bool) -> None:
    torch.manual_seed(1337)
    steps, guarded = 30, "PLAIN" not in os.environ
    trained = Trained(get_batch, max_steps=steps) if guarded else None
    model = trained.model if trained else nn.Linear(4, 1)
    torch.manual_seed(1337)
    for step, (x, ids) in enumerate(trained.guard if trained else iter(get_batch, None)):
        if step == steps:
            return
        if evaluate and step % 10 == 0:
            with torch.no_grad():
                for _ in range(3):
                    model(get_batch()[0])
            print("evaluated", file=sys.stderr, flush=True)
        with (NOTES / f"drawn-{guarded}.jsonl").open("a") as notes:
            notes.write(json.dumps(ids.tolist()) + "\n")
        if trained:
            trained.update(trained.loss(x))


def evaluating() -> None:
    drawing(True)


def not_evaluating() -> None:
    drawing(False)


chosen: Callable[[], None] = globals()[sys.argv[1]]
chosen()
