"""What the guards of all libraries have in common: what is said of a second training in one process."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rollback.errors import UsageError
from rollback.trainers.guarded_trainer import made_guard


def train(run: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    guard = made_guard({"run": run}, model=model, optimizer=optimizer, loader=DataLoader(torch.ones(16, 4), 4))
    for batch in guard:
        model(batch).sum().backward()
        optimizer.step()
    guard.close()


def test_a_second_training_in_the_run_directory_of_the_first_is_told_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for run in ("one", "two", "one"):
        train(tmp_path / run)
        said.append("is no new training" in capsys.readouterr().err)
    assert said == [False, False, True]


def test_a_training_behind_the_removal_of_its_run_directory_is_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    train(tmp_path / "run")
    assert "is no new training" not in capsys.readouterr().err


def test_a_run_directory_that_is_no_path_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="run=7, which is no path"):
        train(7)
