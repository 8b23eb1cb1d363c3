"""The config that a LightningCLI saves at each start: its callback goes on as it would without a guard."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollback.trainers.lightning.trainer import _GuardedFit


class SaveConfigCallback:
    """As Lightning has it, without a parser."""

    config_filename, overwrite = "config.yaml", False

    def __init__(self, *, save_to_log_dir: bool = True) -> None:
        self.save_to_log_dir = save_to_log_dir
        self.seen: list[bool] = []

    def setup(self, trainer: Any) -> None:
        self.seen.append(self.save_to_log_dir)


SaveConfigCallback.__module__ = "lightning.pytorch.cli"


def set_up(callback: SaveConfigCallback, log_dir: Path | None, run: Path, *, fits: int = 1) -> list[bool]:
    """What it is set to when it is set up, in the last of so many calls of `fit`."""
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=None), loggers=[], callbacks=[callback], log_dir=log_dir,
        is_global_zero=True, strategy=SimpleNamespace(broadcast=lambda value: value),
    )  # fmt: skip
    guarded = _GuardedFit(trainer, {"run": run})
    for _ in range(fits):
        guarded._leave_saved_config()
    callback.setup(trainer)
    return callback.seen


def test_one_that_another_way_of_saving_takes_needs_no_folder(tmp_path: Path) -> None:
    assert set_up(SaveConfigCallback(save_to_log_dir=False), None, tmp_path / "run") == [False]


def test_a_fit_that_failed_before_its_training_may_be_called_again(tmp_path: Path) -> None:
    assert set_up(SaveConfigCallback(), tmp_path, tmp_path / "run", fits=2) == [True]
