"""What `rollback.protect` adds to a step of a library's loop: plain and protected runs in turn, in one process.

Steps are timed from the end of one to the end of the next, by the clock and by the processor time of the thread that
trains (which a busy machine hardly changes). Of all steps, but for each run's first ones.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

os.environ["HF_HUB_OFFLINE"] = "1"
import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

import rollback

WARM = 5


class Ids(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, length: int) -> None:
        self.ids = torch.randint(0, 512, (count, length))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class StepTimes:
    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def note(self) -> None:
        self.ends.append((time.perf_counter(), time.thread_time()))

    def steps(self) -> list[tuple[float, float]]:
        pairs = list(zip(self.ends, self.ends[1:], strict=False))[WARM:]
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def model() -> GPT2LMHeadModel:
    set_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=4, n_head=4))


def by_huggingface(folder: Path, steps: int, protected: bool, times: StepTimes) -> None:
    class Told(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            times.note()

    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=4, save_strategy="no", logging_steps=20,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model(), args=arguments, train_dataset=Ids(4 * steps, 64), callbacks=[Told()])
    if protected:
        rollback.protect(trainer, run=folder / "run")
    trainer.train()


def by_accelerate(folder: Path, steps: int, protected: bool, times: StepTimes) -> None:
    accelerator, net = Accelerator(cpu=True), model()
    objects = net, torch.optim.AdamW(net.parameters(), 1e-4), DataLoader(Ids(4 * steps, 64), 4, shuffle=True)
    prepared = accelerator.prepare(*objects)
    if protected:
        prepared = rollback.protect(accelerator, *prepared, run=folder / "run")
    net, optimizer, loader = prepared
    for batch in loader:
        accelerator.backward(net(**batch).loss)
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


def by_lightning(folder: Path, steps: int, protected: bool, times: StepTimes) -> None:
    class Told(lightning.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            times.note()

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=1.0, callbacks=[Told()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    if protected:
        rollback.protect(trainer, run=folder / "run")
    trainer.fit(Module(), DataLoader(Ids(4 * steps, 64), 4, shuffle=True))


LIBRARIES = {"huggingface": by_huggingface, "accelerate": by_accelerate, "lightning": by_lightning}


def run(library: str, steps: int, *, protected: bool) -> list[tuple[float, float]]:
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        LIBRARIES[library](Path(folder), steps, protected, times)
    return times.steps()


def more(plain: list[tuple[float, float]], protected: list[tuple[float, float]], place: int) -> tuple[float, ...]:
    before, after = (median(step[place] for step in steps) * 1000 for steps in (plain, protected))
    return before, after, (after / before - 1) * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="huggingface")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    run(given.library, WARM + 3, protected=True)
    plain: list[tuple[float, float]] = []
    protected: list[tuple[float, float]] = []
    each: list[float] = []
    for turn in range(given.rounds):
        steps = {kind: run(given.library, given.steps, protected=kind) for kind in (turn % 2 == 1, turn % 2 == 0)}
        each.append(more(steps[False], steps[True], 1)[2])
        plain += steps[False]
        protected += steps[True]
    for place, kind in enumerate(("by the clock", "processor time")):
        print("{}: {:.2f} ms a step, protected {:.2f} ms: {:+.2f} %".format(kind, *more(plain, protected, place)))
        before, after = (sum(step[place] for step in steps) / len(steps) * 1000 for steps in (plain, protected))
        print(f"{kind}, mean: {before:.2f} ms, protected {after:.2f} ms: {(after / before - 1) * 100:+.2f} %")
    print(f"processor time, each round: {', '.join(f'{part:+.2f} %' for part in each)}")


if __name__ == "__main__":
    main()
