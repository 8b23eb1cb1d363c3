"""The guard in the Trainer of Hugging Face transformers, and in what is derived from it, as TRL's SFTTrainer.

The Trainer has a loop over epochs and in it `_run_epoch`, whose place in the epoch is a local variable: no callback can
put it back. But it can be entered at any place, as when it resumes. So the guard's loop over epochs stands in the place
of the Trainer's, and whenever training stands elsewhere than `_run_epoch` believes, that is left by an exception and
entered again. What it knows besides its place (`TrainerState`, the loss since the last log) travels in the checkpoints.

    Trainer                          here
    _prepare_for_training            then the guard is made, of what that has prepared
    _run_epoch, for the first epoch  all epochs, from where the run stands
    its batches                      the guard's; a batch from another place ends `_run_epoch` by `_Moved`
    training_step                    then the guard is told the loss; its backward, what will be added up behind it
    _maybe_log_save_evaluate         what it is given of the last update, if `_run_epoch` was entered behind that
    _evaluate                        the one on start only where the run begins
    _save_checkpoint                 first it is noted; lives with a full disk, as the guard does
    get_eval_dataloader              then whether a pass over it draws from the random states is as the run goes
    on_epoch_end                     first our callback: the last update is judged before anybody hears of the end
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers.trainer
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import OptimizerNames

from rollback.errors import UsageError
from rollback.train.sharded import is_sharded
from rollback.train.start import attach
from rollback.train.state.stateful import trained_by
from rollback.train.updates.optimizer import applies_gradients
from rollback.train.updates.wrappers import ddp_inside
from rollback.trainers.evaluated_loaders import EvaluatedLoaders
from rollback.trainers.guarded_trainer import GuardedTrainer, attributes_of, refusing, replaced, require_none_of
from rollback.trainers.huggingface.saves import FolderSaves
from rollback.trainers.huggingface.state import ChangedArguments, LoopState
from rollback.trainers.huggingface.trl import (
    end_update,
    generates_text,
    reference_models,
    require_completions_of_one_update,
)
from rollback.trainers.prepared_loader import begin_pass, hand_out, require_known_loader, require_known_ranks
from rollback.trainers.saved_files import SavedFiles

_HERE = "<where the guard says>"  # in place of a folder to resume from
_NONE = object()


class _Moved(Exception):
    """Training stands elsewhere than `_run_epoch` believes."""


def _require_known(trainer: Any) -> None:
    """Raises UsageError for what the Trainer is set to do, and a guard cannot go along with."""
    args = trainer.args
    optim: str = OptimizerNames(args.optim).value
    require_none_of((
        (trainer.state.global_step > 0, f"it has made {trainer.state.global_step} steps already, unprotected",
         "call rollback.protect before trainer.train(); what was trained so far can begin the run of another Trainer"),
        (args.auto_find_batch_size, "auto_find_batch_size=True begins the training anew with smaller batches",
         "choose per_device_train_batch_size, and gradient_accumulation_steps to make up for it"),
        (args.ignore_data_skip, "ignore_data_skip=True reads data from their beginning in a run that goes on",
         "take it out: the guard goes on in the data where it was, and reads nothing to get there"),
        (args.enable_jit_checkpoint,
         "enable_jit_checkpoint=True ends the training at SIGTERM, as if it were complete",
         "take it out: at SIGTERM the guard saves and stops all ranks, and the same command goes on"),
        (optim.endswith("layerwise"), f'optim="{optim}" updates weights in mid-backward',
         'take an optimizer that makes the update in step(); one with little memory is optim="adafactor"'),
        (args.n_gpu > 1, f"the Trainer trains with torch's DataParallel on {args.n_gpu} GPUs",
         "start one process for each GPU: rollback launch --nproc N, or torchrun"),
    ))  # fmt: skip
    require_known_ranks(trainer.accelerator)
    require_completions_of_one_update(trainer)


def _require_averaged(trainer: Any) -> None:
    """Raises UsageError, on all ranks, where nothing averages the gradients of several ranks: an evaluation in front of
    the training has prepared the model, without DistributedDataParallel, and Accelerate prepares no model twice."""
    model, accelerator = trainer.model, trainer.accelerator
    if (
        accelerator.num_processes > 1
        and accelerator.distributed_type.name.startswith("MULTI_")
        and getattr(model, "_is_accelerate_prepared", False)
        and ddp_inside(trainer.model_wrapped) is None
        and not any(map(is_sharded, model.parameters()))
    ):
        raise UsageError(
            f"each of the {accelerator.num_processes} ranks would train a model of its own, also without rollback: "
            "trainer.evaluate() or predict() in front of trainer.train() has left the model out of "
            "DistributedDataParallel, as this version of accelerate does",
            hint="take that evaluation out, or put it behind trainer.train(). TrainingArguments(eval_on_start=True) "
            "evaluates in front of the first step; so does a Trainer of its own, with a copy of the model",
        )


class _GuardedLoop(GuardedTrainer, TrainerCallback):  # type: ignore[misc]
    """One training of one Trainer, and the first of its callbacks."""

    entry, step_name = "train", "trainer.state.global_step"
    require_known = staticmethod(_require_known)

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        super().__init__(trainer, settings)
        self._saves = FolderSaves(trainer)
        self._state = LoopState(trainer, self._saves)
        self._evaluated = EvaluatedLoaders(self._evaluation_loaders())
        self._loader: Any = None
        self._drawn: list[Any] = []
        """Batches of the update in progress that no training step has been made of."""
        self._position = 0
        """Of the last one in its epoch."""

    def install(self) -> None:
        self._replace(
            self._trainer, "train", "_prepare_for_training", "_run_epoch", "training_step", "_maybe_log_save_evaluate",
            "_evaluate", "get_eval_dataloader",
        )  # fmt: skip
        self._replace_one(self._trainer, "floating_point_ops", self._state.sums.floating_point_ops)
        self._replace_one(self._trainer.accelerator, "backward", self._state.sums.backward)
        self._replace_one(self._trainer, "_save_checkpoint", self._saves.save)
        self._replace_one(self._trainer, "_load_rng_state", lambda _: None)  # the guard has put them back
        self._trainer.callback_handler.callbacks.insert(0, self)

    def uninstall(self) -> None:
        super().uninstall()
        self._trainer.callback_handler.callbacks.remove(self)

    # In the place of the Trainer's methods ---------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *more: Any, **others: Any) -> Any:
        with refusing(status=1):
            if resume_from_checkpoint and self._trainer.is_world_process_zero():  # other hosts may lack the record
                self._leave_aside(
                    resume_from_checkpoint, f"resume_from_checkpoint={resume_from_checkpoint!r}",
                    self._is_of_this_run(resume_from_checkpoint), "folder, load the model from it",
                )  # fmt: skip
            if trial is not None:
                raise UsageError(
                    "hyperparameter_search of a Trainer under rollback.protect",
                    hint="protect the Trainer of the final run",
                )
            self._require_first()
        watched = register_optimizer_step_pre_hook(self._require_own_update)
        try:
            return self._originals["train"](None, None, *more, **others)
        finally:
            watched.remove()

    def _require_own_update(self, optimizer: Optimizer, *_: Any) -> None:
        """At every update while `train` runs. In front of the guard there is none of the model's."""
        if not hasattr(self, "guard"):
            trained = {*map(id, self._trainer.model.parameters())}
            if any(id(item) in trained for item in trained_by(optimizer)) and applies_gradients(optimizer):
                self._require_guard()

    def _require_guard(self) -> None:
        """A class derived from the Trainer may have a loop of its own, as one that was copied from an earlier version.
        That would train unprotected, without a word."""
        if hasattr(self, "guard"):
            return
        kind = type(self._trainer).__name__
        with refusing(status=1):
            raise UsageError(
                f"rollback.protect cannot guard this Trainer: {kind} trains in a loop of its own, which does not call "
                "the Trainer's _prepare_for_training() and _run_epoch()",
                hint=f"take out the _inner_training_loop() of {kind}; training_step(), compute_loss() and callbacks "
                "may be its own. Or make a rollback.Guard in that loop, and leave out rollback.protect",
            )

    def _is_of_this_run(self, given: str | bool) -> bool:
        """Whether there is a run already, and this folder is where it saves. given: True is the newest one, as for the
        Trainer."""
        output = self._trainer.args.output_dir
        folder = get_last_checkpoint(output) if given is True else str(given)
        if folder is None or os.path.realpath(Path(folder).parent) != os.path.realpath(output):
            return False
        return os.path.lexists(attach.run_paths(self._settings.get("run")).identity)

    def _prepare_for_training(self, max_steps: int, loader: Any, *given: Any, **others: Any) -> Any:
        trainer = self._trainer
        prepared = self._originals["_prepare_for_training"](max_steps, loader, *given, **others)
        with refusing():
            require_known_loader(loader)
            _require_averaged(trainer)
            self._settings = {**reference_models(trainer), **self._settings}
            self._begin(
                "max_steps={}" if trainer.args.max_steps > 0 else "the Trainer's {} steps",
                f"num_train_epochs={trainer.args.num_train_epochs:g}",
                model=trainer.model_wrapped, optimizer=trainer.optimizer.optimizer, loader=loader.base_dataloader,
                scheduler=trainer.lr_scheduler, scaler=getattr(trainer.accelerator, "scaler", None),
                max_steps=max_steps,
            )  # fmt: skip
        self._loader = loader
        if generates_text(trainer):
            self.guard.judge_first()
        self._saves.saved = SavedFiles(self.guard.run, trainer.args.process_index)
        return prepared

    def _run_epoch(self, **given: Any) -> None:
        """All epochs. The Trainer, which has called this for its first one, is told to stop behind the last."""
        trainer, announced = self._trainer, True
        state = self._state
        self.guard.keep(
            trainer_counts=state.counts, trainer=state, trainer_logs=state.logs, trainer_evaluated=self._evaluated,
            trainer_arguments=ChangedArguments(trainer),
        )  # fmt: skip
        self.guard.watch(attributes_of(self._state.stateless_callbacks()))
        self._has_moved()  # a resume has
        if self._state.stopped_early:
            self._end_again(**given)
            if not self._state.asked_for_more:
                self.guard.close()
                return
            trainer.control.should_training_stop = self._state.asked_for_more = announced = False
        epochs = sys.maxsize if trainer.args.max_steps > 0 else trainer.state.num_train_epochs
        for epoch in self.guard.epochs(epochs):
            if not announced:
                trainer.control = trainer.callback_handler.on_epoch_begin(trainer.args, trainer.state, trainer.control)
            announced = False
            self._begin_epoch(epoch)
            ended = False
            while not ended and (self._drawn or not self.guard.interrupted):
                # It finds its place by skipping batches; what it iterates here stands there already.
                there = replaced(transformers.trainer, skip_first_batches=lambda loader, count: loader)
                with contextlib.suppress(_Moved), there:
                    self._originals["_run_epoch"](**{**given, **self._place(epoch, given["steps_in_epoch"])})
                    ended = True
            if trainer.control.should_training_stop:
                break
        self._has_moved()  # the last epoch's end may have been restored
        trainer.control.should_training_stop = True
        self.guard.close()

    def _end_again(
        self, *, model: Any, trial: Any, epoch: int, ignore_keys_for_eval: Any, start_time: Any, **_: Any
    ) -> None:
        """A run that a callback had stopped is there again: do what the Trainer does behind the epoch, which the
        process may not have lived to do, and which the state was kept before."""
        trainer = self._trainer
        trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        self._maybe_log_save_evaluate(trainer._tr_loss, None, model, trial, epoch, ignore_keys_for_eval, start_time)

    def training_step(self, model: Any, inputs: Any, *given: Any, **others: Any) -> Any:
        self._require_guard()
        self._drawn = []
        self._state.sums.begin(inputs)
        loss = self._originals["training_step"](model, inputs, *given, **others)
        self.guard.observe(loss)
        return loss

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, *given: Any, learning_rate: Any = None, **others: Any
    ) -> None:
        if learning_rate is not None:
            self._state.counts.last_update = grad_norm, learning_rate
        grad_norm, learning_rate = self._state.counts.last_update
        act = self._originals["_maybe_log_save_evaluate"]
        self._saves.skip_if_it_fails(act, tr_loss, grad_norm, *given, learning_rate=learning_rate, **others)
        end_update(self._trainer)

    def _evaluate(self, *given: Any, skip_scheduler: bool = False, **others: Any) -> Any:
        """skip_scheduler: in front of the first epoch (`eval_on_start`). A run that goes on has had that evaluation:
        another one would be logged as that of step 0, with the weights that it goes on with."""
        if skip_scheduler and self.guard.batch:
            return {}
        return self._originals["_evaluate"](*given, skip_scheduler=skip_scheduler, **others)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        loader = self._originals["get_eval_dataloader"](eval_dataset)
        inner: Any = getattr(loader, "base_dataloader", None)
        for name, known in self._evaluation_loaders().items():
            if known is inner:
                self._evaluated.begin(name, inner)
        return loader

    def _evaluation_loaders(self) -> dict[str, Any]:
        """Those that the Trainer keeps, by name."""
        kept = vars(self._trainer).get("_eval_dataloaders", {})
        return {name: loader.base_dataloader for name, loader in kept.items()}

    # Its batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        yield from list(self._drawn)
        while self._draw():
            yield self._drawn[-1]

    def _begin_epoch(self, epoch: int) -> None:
        loader = self._loader
        for part in (loader, getattr(getattr(loader, "batch_sampler", None), "batch_sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        begin_pass(loader)
        iter(self.guard)
        self._has_moved()  # to where this epoch begins
        self._drawn, self._position = [], -1
        with contextlib.suppress(_Moved):
            self._draw()

    def _draw(self) -> bool:
        """Whether there is another batch of the epoch. Raises _Moved where it is not the next one, or none of it."""
        batch, expected = next(self.guard, _NONE), self._position + 1
        if moved := self._has_moved():
            self._drawn = []
        if batch is not _NONE:
            self._position = self.guard.batch_in_epoch
            self._drawn.append(hand_out(self._loader, batch, last=self.guard.last_in_epoch))
        if moved or (batch is not _NONE and self._position != expected):
            raise _Moved
        return batch is not _NONE

    def _has_moved(self) -> bool:
        """Whether training has been put elsewhere since this was asked last. Collective."""
        moved, self._state.moved = self._state.moved, False
        if moved:
            self._state.forget_lost_best()
        return moved

    def _place(self, epoch: int, batches: int) -> dict[str, Any]:
        """Where `_run_epoch` is to begin: before what has been drawn, with all that is left of the epoch's `batches`.

        It counts updates from the epoch's first batch on. Behind a skip window that is no whole number of them, an
        epoch of another length is told it, which has as many batches left. Where nothing has been drawn, nothing is
        left but the epoch's end.
        """
        accumulated = self._trainer.args.gradient_accumulation_steps
        if self._drawn:
            left = batches - 1 - self._position + len(self._drawn)
            done = (batches - left) // accumulated * accumulated
        else:
            left, done = 0, 1
        return {
            "epoch": epoch,
            "train_dataloader": self,
            "steps_in_epoch": done + left,
            "num_update_steps_per_epoch": math.ceil((done + left) / accumulated),
            "resume_from_checkpoint": _HERE,
            "epochs_trained": epoch,
            "steps_trained_in_current_epoch": done,
        }

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the Trainer does what it does behind an epoch. Raises _Moved where it has not come to its end yet."""
        if self._state.asked_for_more:  # an end that is done again
            return
        told = self._state.stopped_early and self.guard.script_was_told
        if told:  # a callback's answer to a stop signal is no end of the training: the guard stops all ranks together
            control.should_training_stop = False
        elif self._state.stopped_early:
            if self.guard.finish("TrainerControl.should_training_stop"):
                return
        elif control.should_epoch_stop:
            return
        if self._draw() and told:
            raise _Moved


protect = _GuardedLoop.protect
