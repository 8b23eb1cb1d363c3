"""A Trainer that keeps one folder besides the best, whose second evaluation is the best only in a step that is undone.

With `full`: no step is undone, and the disk has no room for the folder of that evaluation. It writes `ended-RANK.json`:
the best model that it ended with.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

os.environ["HF_HUB_OFFLINE"] = "1"
from transformers import Trainer, TrainerCallback, TrainingArguments

import rollback

SCORES = {10: 3.0, 20: 2.0, 30: 5.0, 40: 6.0, 50: 7.0}
AGAIN = 4.0
"""What step 20 scores when it comes by once more."""
FULL = "full" in sys.argv
SPOILED = None if FULL else 22


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.inner(x) - labels).square().mean()}


class Scored(Trainer):  # type: ignore[misc]
    undone = False

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
        if model.training:
            self.train.__self__.guard._loop.checkpoints.snapshots.wait()  # as `Toy.patient`: which are good is the same
        loss = super().compute_loss(model, inputs, *more, **others)
        if model.training and self.state.global_step == SPOILED and not self.undone:
            self.undone = True
            loss = loss * float("nan")
        return loss

    def _save(self, *given: Any, **others: Any) -> None:
        super()._save(*given, **others)
        if FULL and self.args.should_save and self.state.global_step == 20:
            Path("/dev/full").write_bytes(b"as where there is no room")

    def evaluate(self, *given: Any, **others: Any) -> dict[str, float]:
        step = self.state.global_step
        return {"eval_loss": AGAIN if self.undone and step == 20 else SCORES[step]}


class Uploading(TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}", "trainer_state.json")
        assert saved.exists() or not state.is_world_process_zero


def main() -> None:
    torch.manual_seed(1)
    source = torch.randn(512, 2)
    data = [{"x": x, "labels": x.sum()[None]} for (x,) in TensorDataset(source)]
    arguments = TrainingArguments(
        "output", max_steps=50, per_device_train_batch_size=4, eval_strategy="steps", eval_steps=10, save_steps=10,
        save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False,
        report_to="none", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Scored(model=Line(), args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[Uploading()])
    rollback.protect(trainer)
    trainer.train()
    state = trainer.state
    ended = {"best": [state.best_metric, state.best_global_step, state.best_model_checkpoint]}
    Path(f"ended-{os.environ['RANK']}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
