"""A Trainer of transformers under guard, in this process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rollback
from rollback.facts.training import Advice
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.line(x) - labels).square().mean()}


@pytest.mark.parametrize("has_state", [False, True])
def test_an_average_that_a_callback_keeps_from_the_trainings_begin_is_named(tmp_path: Path, has_state: bool) -> None:
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState

    class Averaging(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
            self.average = [item.detach().clone() for item in model.parameters()]

        def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
            for mean, item in zip(self.average, model.parameters(), strict=True):
                mean.lerp_(item.detach(), 0.1)

    class Kept(Averaging, ExportableState):  # type: ignore[misc]
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {}}

    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=5, per_device_train_batch_size=1, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
    callbacks = [(Kept if has_state else Averaging)()]
    trainer = Trainer(Line(), arguments, train_dataset=rows, callbacks=callbacks)
    del callbacks
    rollback.protect(trainer, run=tmp_path / "run")
    trainer.train()
    said = [record.fact for record in read_journal(RunPaths(tmp_path / "run").train_journal).records]
    told = [fact.text for fact in said if isinstance(fact, Advice) and fact.code == "copies-not-kept"]
    assert len(told) == (not has_state), told
    assert all("writes to Averaging.average, " in text for text in told)


@pytest.mark.parametrize("given", ["checkpoint-2", "checkpoint-2/", "./checkpoint-2", "link/checkpoint-2/"])
def test_a_folder_of_this_run_is_left_aside_however_a_script_writes_it(tmp_path: Path, given: str) -> None:
    """`sorted(glob("out/checkpoint-*/"))[-1]` ends with a slash."""
    pytest.importorskip("transformers")
    from transformers import Trainer, TrainingArguments

    (tmp_path / "link").symlink_to(tmp_path)
    for steps in (2, 4):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, per_device_train_batch_size=1, use_cpu=True, report_to="none", save_steps=2,
            disable_tqdm=True,
        )  # fmt: skip
        rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 8
        trainer = rollback.protect(Trainer(Line(), arguments, train_dataset=rows), run=tmp_path / "run")
        trainer.train(resume_from_checkpoint=f"{tmp_path}/{given}" if steps == 4 else None)
    assert trainer.state.global_step == 4
