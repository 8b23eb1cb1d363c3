"""What `rollback.protect` adds to a step of a library's loop: two loops in one process take turns, step by step.

One is protected, one is not. So whatever else the machine does hits both alike. Steps are timed from the end of one to
the end of the next, without the other loop's step in between: by the clock, and by the processor time of the thread
that trains. Of all steps, but for each run's first ones: the median, the mean, and the tenth percentile, since what
others do on the machine can only add to a step. And the median of the differences of neighbouring steps.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, median, quantiles

os.environ["HF_HUB_OFFLINE"] = "1"
import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import set_seed

import rollback

WARM = 5
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


def run(library: str, steps: int) -> tuple[Steps, Steps]:
    """Steps of a plain loop and of a protected one. The latter is in the main thread, for its signals."""
    plain, protected = StepTimes(), StepTimes()
    plain.other, protected.other = protected, plain

    def in_turn(times: StepTimes) -> None:
        torch.set_num_threads(1)  # counts for this thread
        with tempfile.TemporaryDirectory() as folder:
            try:
                LIBRARIES[library](Path(folder), steps, times is protected, times)
            finally:
                times.leave()

    def second() -> None:
        plain.turn.acquire()
        in_turn(plain)

    thread = threading.Thread(target=second)
    thread.start()
    in_turn(protected)
    thread.join()
    return plain.steps[WARM:], protected.steps[WARM:]


def least_tenth(values: Iterable[float]) -> float:
    return quantiles(values, n=10)[0]


def more(plain: Steps, protected: Steps, place: int, kind: Callable[[Iterable[float]], float]) -> tuple[float, ...]:
    before, after = (kind(step[place] for step in steps) * 1000 for steps in (plain, protected))
    return before, after, (after / before - 1) * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=LIBRARIES, default="huggingface")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    run(given.library, WARM + 3)
    plain: Steps = []
    protected: Steps = []
    each: list[float] = []
    for _ in range(given.rounds):
        one, other = run(given.library, given.steps)
        each.append(more(one, other, 1, median)[2])
        plain += one
        protected += other
    for place, clock in enumerate(("by the clock", "processor time")):
        for kind in (median, mean, least_tenth):
            figures = more(plain, protected, place, kind)
            print(f"{clock}, {kind.__name__}: " + "{:.2f} ms a step, protected {:.2f} ms: {:+.2f} %".format(*figures))
    added = median(after[1] - before[1] for before, after in zip(plain, protected, strict=False)) * 1000
    share = added / (median(step[1] for step in plain) * 1000)
    print(f"processor time, neighbours: {added:+.2f} ms in the median, {share:+.2%}")
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"processor time, each round: {', '.join(f'{part:+.2f} %' for part in each)}")


if __name__ == "__main__":
    main()
