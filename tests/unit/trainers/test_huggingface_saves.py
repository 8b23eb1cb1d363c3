"""What becomes of a folder that a Trainer could not save."""

import contextlib
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from rollback.trainers.huggingface.saves import FolderSaves
from rollback.trainers.saved_files import SavedFiles


class Trainer:
    """One rank's, which saves by torch.distributed.checkpoint what is sharded. failing: ranks."""

    def __init__(self, folder: Path, rank: int, failing: tuple[int, ...], number: int) -> None:
        self.args = SimpleNamespace(output_dir=str(folder), should_save=rank == 0, process_index=rank)
        self.state = SimpleNamespace(global_step=5, best_metric=None, best_global_step=None, best_model_checkpoint=None)
        self.control = SimpleNamespace(should_save=True)
        self.accelerator = SimpleNamespace(device="cpu", reduce=lambda failed, how: failed)
        self._failures: Any = {rank: (OSError(number, os.strerror(number)), []) for rank in failing}

    def save_model(self) -> None:
        folder = Path(self.args.output_dir, "checkpoint-5")
        folder.mkdir()
        (folder / "part").touch()

    def _save_optimizer_and_scheduler(self) -> None:
        raise CheckpointException("save", self._failures)

    def _save_scaler(self) -> None: ...

    def _save_rng_state(self) -> None: ...

    def _save_checkpoint(self) -> None:
        self.save_model()
        self._save_optimizer_and_scheduler()


@pytest.mark.parametrize(("rank", "told"), [(0, False), (1, True)])
def test_a_disk_that_is_full_for_a_part_of_a_sharded_model_costs_the_folder_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, told: bool
) -> None:
    trainer = Trainer(tmp_path, rank, (1,), errno.ENOSPC)
    saves = FolderSaves(trainer)
    saves.skip_if_it_fails(saves.save)
    assert not trainer.control.should_save
    assert (tmp_path / "checkpoint-5").exists() == (rank > 0), "who saves removes what there is of it"
    said = capsys.readouterr().err
    assert ("could not be saved ([Errno 28] No space left on device)" in said) == told, said


def test_a_part_that_fails_for_another_reason_ends_the_rank(tmp_path: Path) -> None:
    saves = FolderSaves(Trainer(tmp_path, 0, (0,), errno.EPERM))
    with pytest.raises(CheckpointException):
        saves.save()


@pytest.mark.parametrize(("reached", "stays"), [(4, False), (5, True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_folders_of_undone_steps_are_renamed_by_who_saves(tmp_path: Path, rank: int, reached: int, stays: bool) -> None:
    trainer = Trainer(tmp_path, 0, (), 0)
    saves = FolderSaves(trainer)
    saves.saved = SavedFiles(tmp_path / "run")
    with contextlib.suppress(CheckpointException):
        saves.save()
    (tmp_path / "checkpoint-6").mkdir()  # of another run
    trainer.args.should_save, trainer.state.global_step = rank == 0, reached
    saves.set_aside()
    assert (tmp_path / "checkpoint-5").exists() == (stays or rank > 0)
    assert (tmp_path / "checkpoint-6").exists()
