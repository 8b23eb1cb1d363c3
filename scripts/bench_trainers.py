"""What `rollback.protect` adds to a step of a library's loop: two loops in one process take turns, step by step.

One is protected, one is not. So whatever else the machine does hits both alike. Steps are timed from the end of one to
the end of the next, without the other loop's step in between: by the clock, and by the processor time of the thread
that trains. Of all steps, but for each run's first ones: the median, the mean, and the tenth percentile, since what
others do on the machine can only add to a step. And the median of the differences of neighbouring steps.

Where the tensors of a loop come to lie in memory makes its steps faster or slower by some per cent, for as long as it
runs. So each round makes both loops anew, and there are as many rounds of two loops without protection: what these
differ by is what the machine does by itself. A thread that is not the main one gets its memory from an arena of its
own, which made its loop slower by 1 to 2 %. So there is one arena for all. And the allocator keeps what it has: where
it gives memory back and takes it again, a step has 1,500 to 3,000 page faults, in one loop more than in the other.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median, quantiles

if "MALLOC_TRIM_THRESHOLD_" not in os.environ:  # read when a process starts
    kept = dict.fromkeys(["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"], str(1 << 32))
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_ARENA_MAX": "1", **kept})
os.environ["HF_HUB_OFFLINE"] = "1"
import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

import rollback

WARM = 20  # in the first 16 the guard takes looks at the script that it never takes again
SEQUENCES = 4  # in a batch, at first
Steps = list[tuple[float, float]]
"""Seconds of each step by the clock and of the processor."""


class Ids(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(0, 512, (count, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class StepTimes:
    """The steps of one loop, in turn with those of `other`."""

    other: "StepTimes"

    def __init__(self) -> None:
        self.steps: Steps = []
        self.turn = threading.Semaphore(0)
        self._began: tuple[float, float] | None = None
        self._over = False

    def note(self) -> None:
        """A step ends. Returns when the other loop has done one."""
        ended = time.perf_counter(), time.thread_time()
        if self._began is not None:
            self.steps.append((ended[0] - self._began[0], ended[1] - self._began[1]))
        if not self.other._over:
            self.other.turn.release()
            self.turn.acquire()
        self._began = time.perf_counter(), time.thread_time()

    def leave(self) -> None:
        """The loop is over."""
        self._over = True
        self.other.turn.release()


def model() -> GPT2LMHeadModel:
    set_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=4, n_head=4))


def by_huggingface(folder: Path, steps: int, batch: int, protected: bool, times: StepTimes) -> None:
    class Told(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            times.note()

    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=batch, save_strategy="no", logging_steps=20,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model(), args=arguments, train_dataset=Ids(batch * steps, 64), callbacks=[Told()])
    if protected:
        rollback.protect(trainer, run=folder / "run")
    trainer.train()


def by_accelerate(folder: Path, steps: int, batch: int, protected: bool, times: StepTimes) -> None:
    accelerator, net = Accelerator(cpu=True), model()
    objects = net, torch.optim.AdamW(net.parameters(), 1e-4), DataLoader(Ids(batch * steps, 64), batch, shuffle=True)
    prepared = accelerator.prepare(*objects)
    if protected:
        prepared = rollback.protect(accelerator, *prepared, run=folder / "run")
    net, optimizer, loader = prepared
    for inputs in loader:
        accelerator.backward(net(**inputs).loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.note()
    if protected:
        loader.guard.close()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def by_lightning(folder: Path, steps: int, batch: int, protected: bool, times: StepTimes) -> None:
    class Told(lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            times.note()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, callbacks=[Told()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    if protected:
        rollback.protect(trainer, run=folder / "run")
    trainer.fit(Module(), DataLoader(Ids(batch * steps, 64), batch, shuffle=True))


LIBRARIES = {"huggingface": by_huggingface, "accelerate": by_accelerate, "lightning": by_lightning}


def run(library: str, steps: int, batch: int, *, protect: bool) -> tuple[Steps, Steps]:
    """Steps of a plain loop and of another one, protected or not. That is in the main thread, for its signals."""
    plain, other = StepTimes(), StepTimes()
    plain.other, other.other = other, plain

    def in_turn(times: StepTimes) -> None:
        torch.set_num_threads(1)  # counts for this thread
        with tempfile.TemporaryDirectory() as folder:
            try:
                LIBRARIES[library](Path(folder), steps, batch, protect and times is other, times)
            finally:
                times.leave()

    def second() -> None:
        plain.turn.acquire()
        in_turn(plain)

    thread = threading.Thread(target=second)
    thread.start()
    in_turn(other)
    thread.join()
    return plain.steps[WARM:], other.steps[WARM:]


def least_tenth(values: Iterable[float]) -> float:
    return quantiles(values, n=10)[0]


class Rounds:
    """All rounds of one kind: the steps of both loops, and for each round what the second loop's steps take more."""

    def __init__(self) -> None:
        self.plain: Steps = []
        self.other: Steps = []
        self.more: list[float] = []
        """Median of the differences of neighbouring steps, by processor time, as a share of a plain step."""

    def add(self, plain: Steps, other: Steps) -> None:
        self.plain += plain
        self.other += other
        self.more.append(_added(plain, other) / median(step[1] for step in plain))

    def show(self, name: str) -> None:
        for place, clock in enumerate(("by the clock", "processor time")):
            for kind in (median, mean, least_tenth):
                before, after = (kind(step[place] for step in steps) * 1000 for steps in (self.plain, self.other))
                share = after / before - 1
                print(f"{name}, {clock}, {kind.__name__}: {after:.2f} ms a step beside {before:.2f}: {share:+.2%}")
        print(f"{name}, neighbouring steps: {1000 * _added(self.plain, self.other):+.2f} ms in the median of all")
        low, middle, high = quantiles(self.more, n=4) if len(self.more) > 1 else self.more * 3
        print(f"{name}, each round's share: {middle:+.2%} in the median, half of them {low:+.2%} to {high:+.2%}")


def _added(plain: Steps, other: Steps) -> float:
    """Seconds."""
    return median(after[1] - before[1] for before, after in zip(plain, other, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, default="huggingface")
    parser.add_argument("--steps", type=int, default=55, help="of each run")
    parser.add_argument("--rounds", type=int, default=12, help="of each kind")
    parser.add_argument(
        "--milliseconds", type=int, default=100, help="of a plain step; it decides how large a batch is"
    )
    given = parser.parse_args()
    run(given.library, WARM, SEQUENCES, protect=True)
    batch = SEQUENCES
    for _ in range(2):  # a step does not take twice as long for twice the sequences
        before, _ = run(given.library, WARM + 20, batch, protect=False)
        batch = max(1, round(batch * given.milliseconds / 1000 / median(step[1] for step in before)))
    print(f"batches of {batch} sequences")
    alike, protected = Rounds(), Rounds()
    for _ in range(given.rounds):
        alike.add(*run(given.library, given.steps, batch, protect=False))
        protected.add(*run(given.library, given.steps, batch, protect=True))
    alike.show("both plain")
    protected.show("protected")
    print(f"protected, less what two plain loops differ by: {median(protected.more) - median(alike.more):+.2%}")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
