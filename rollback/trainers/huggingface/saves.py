"""The folders `checkpoint-N`: they are noted, and those of steps that are undone renamed. One that the disk has no room
for is left out, and training goes on.

The guard does so with its own checkpoints, and needs none of the Trainer's. A rank that raised would be started again,
undo its steps, and raise at the same step again. What there is of the folder is removed, since tools take a folder by
that name for a whole one; and so is what the Trainer says of its model, where that is the best one so far.
"""

import os
import shutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from rollback.rundir.failures import class_of_exception, qualified_name
from rollback.train.comm.recorder import say
from rollback.trainers.guarded_trainer import replaced
from rollback.trainers.saved_files import SavedAt, SavedFiles

_PARTS = "save_model", "_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state"
"""What `_save_checkpoint` calls on each rank, before it deletes folders of earlier steps for this one."""
BEST = "best_metric", "best_global_step", "best_model_checkpoint"
"""Of TrainerState."""
_best = attrgetter(*BEST)


class _NotSaved(Exception):
    """The folder of this step is left out. Raised on all ranks."""


class FolderSaves:
    """Of one Trainer. Make it before its methods are replaced. saved: what the run has saved, once there is one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._save = trainer._save_checkpoint
        self.saved: SavedFiles | None = None

    def save(self, *given: Any, **others: Any) -> None:
        """In the place of `Trainer._save_checkpoint`, within `skip_if_it_fails`. Collective."""
        trainer = self._trainer
        folder = Path(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")
        was_there = os.path.lexists(folder)  # then it is not ours to remove
        if self.saved is not None and trainer.args.should_save:
            self.saved.note(str(folder), SavedAt(trainer.state.global_step, trainer.state.global_step))
        try:
            with replaced(trainer, **{name: self._agreed_on(folder, getattr(trainer, name)) for name in _PARTS}):
                self._save(*given, **others)
        except _NotSaved:
            if trainer.args.should_save and not was_there:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def set_aside(self) -> None:
        """Training stands at the Trainer's step: rename what this run has saved behind it, so that nobody takes it for
        one of its checkpoints."""
        args, step = self._trainer.args, self._trainer.state.global_step
        if self.saved is not None and args.should_save:
            self.saved.set_aside(SavedAt(step, step), [args.output_dir])

    def skip_if_it_fails(self, act: Callable[..., object], *given: Any, **others: Any) -> None:
        """Evaluate and save, by `act`, with what it is given: the best model is one that there is a folder of."""
        state = self._trainer.state
        best = _best(state)
        try:
            act(*given, **others)
        except _NotSaved:
            self._trainer.control.should_save = False
            if state.best_global_step == state.global_step:
                vars(state).update(zip(BEST, best, strict=True))

    def _agreed_on(self, folder: Path, part: Callable[..., None]) -> Callable[..., None]:
        """The ranks meet behind the parts: one of them alone cannot leave a save."""

        def agreed_on(*given: Any, **others: Any) -> None:
            fault = None
            try:
                part(*given, **others)
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                if class_of_exception(qualified_name(type(error)), str(error)) != "disk":
                    raise
                fault = error
                if (own := self._own(error)) is not None:
                    _tell(folder, own)
            accelerator = self._trainer.accelerator
            failed = torch.tensor(float(fault is not None), device=accelerator.device)
            if accelerator.reduce(failed, "sum").item():
                raise _NotSaved from fault

        return agreed_on

    def _own(self, error: BaseException) -> BaseException | None:
        """What has failed on this rank; None: it hears of another rank's fault."""
        if not isinstance(error, CheckpointException):
            return error
        return error.failures.get(self._trainer.args.process_index, (None, None))[0]


def _tell(folder: Path, error: BaseException) -> None:
    undone = len(list(folder.parent.glob("undone-checkpoint-*")))
    hint = f"; undone-checkpoint-* there ({undone}) may be deleted" if undone else ""
    say(f"{folder} could not be saved ({error}): it is left out, and training goes on. Make room there{hint}")
