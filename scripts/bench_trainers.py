"""What `rollback.protect` adds to a step of a Hugging Face Trainer: plain and protected runs in turn, in one process.

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
import torch
from torch.utils.data import Dataset
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


class Clock(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append((time.perf_counter(), time.thread_time()))

    def steps(self) -> list[tuple[float, float]]:
        pairs = list(zip(self.ends, self.ends[1:], strict=False))[WARM:]
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def run(steps: int, protected: bool) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=4, save_strategy="no", logging_steps=20,
            report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        set_seed(1)
        config = GPT2Config(vocab_size=512, n_positions=128, n_embd=192, n_layer=4, n_head=4)
        clock = Clock()
        trainer = Trainer(
            model=GPT2LMHeadModel(config), args=arguments, train_dataset=Ids(4 * steps, 64), callbacks=[clock]
        )
        if protected:
            rollback.protect(trainer, run=Path(folder) / "run")
        trainer.train()
        return clock.steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    run(WARM + 3, protected=True)
    plain: list[tuple[float, float]] = []
    protected: list[tuple[float, float]] = []
    for _ in range(given.rounds):
        plain += run(given.steps, protected=False)
        protected += run(given.steps, protected=True)
    for place, kind in enumerate(("by the clock", "processor time")):
        before, after = (median(step[place] for step in steps) * 1000 for steps in (plain, protected))
        print(f"{kind}: {before:.2f} ms a step, protected {after:.2f} ms: {(after / before - 1) * 100:+.2f} %")
        before, after = (sum(step[place] for step in steps) / len(steps) * 1000 for steps in (plain, protected))
        print(f"{kind}, mean: {before:.2f} ms, protected {after:.2f} ms: {(after / before - 1) * 100:+.2f} %")


if __name__ == "__main__":
    main()
