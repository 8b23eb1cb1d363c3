"""The file that a fit would go on from, which the script hands over, or Lightning looks for itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollback.errors import UsageError
from rollback.trainers.saved_files import SavedAt, SavedFiles

Fit = Callable[[Any], list[Any]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """As an OnExceptionCheckpoint saves it."""
    path = tmp_path / "on_exception.ckpt"
    path.touch()
    return path


@pytest.fixture
def fit(tmp_path: Path) -> Fit:
    """Asks, by the `ckpt_path` of a fit, for the files that Lightning loads then: of a Trainer that saves a file when
    an exception ends its training, and looks for that file when it begins."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from rollback.trainers.lightning.trainer import _GuardedFit

    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path,
    )  # fmt: skip
    guarded, loaded = _GuardedFit(trainer, {"run": tmp_path / "run"}), []

    def run(*_: Any, ckpt_path: Any, **others: Any) -> None:
        loaded.append(ckpt_path)
        trainer.state.status = type(trainer.state.status).FINISHED

    trainer._run = run
    guarded.install()

    def asked(ckpt_path: Any) -> list[Any]:
        trainer.fit(lightning.LightningModule(), [0], ckpt_path=ckpt_path)
        return loaded

    return asked


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_one_that_this_run_has_saved_is_left_aside(
    fit: Fit, file: Path, tmp_path: Path, ckpt_path: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else no attempt but the first one would train."""
    SavedFiles(tmp_path / "run").note(str(file), SavedAt(3, 6))
    assert fit(ckpt_path) == [None]
    assert f"is to resume from {file}: this is left aside" in capfd.readouterr().err


def test_where_there_is_none_a_run_begins(fit: Fit) -> None:
    assert fit("last") == [None]


def test_another_one_that_lightning_finds_is_refused(fit: Fit, file: Path) -> None:
    with pytest.raises(UsageError, match="move that file away"):
        fit(None)


def test_another_one_that_the_script_asks_for_is_refused(fit: Fit, file: Path) -> None:
    with pytest.raises(UsageError, match="leave it out"):
        fit("last")
