"""The guard in the Trainer of Lightning (`lightning.pytorch`, `pytorch_lightning`), with automatic optimization.

Lightning has all that says where it stands in attributes: a rollback within an epoch puts them back between two
batches, and its loop goes on. Only the loop over epochs is the guard's, since a rollback may end an epoch before its
end and begin an earlier one.

    Lightning                          here
    fit, _attach_model_callbacks       refuse what cannot be kept exact, before anything is touched
    _select_ckpt_path                  for a fit there is none
    SaveConfigCallback.setup           saves its file again where the run goes on
    fit_loop.setup_data                takes this object for what fetches batches
    val_loop.reset                     then whether a pass draws from the random states is as the run goes
    fit_loop.run                       makes the guard, and loops over epochs
    epoch_loop.run                     as it is, entered again where training stands elsewhere than it believes
    its batches                        the guard's; what is passed over counts as read
    automatic_optimization             tells the guard the loss; counts the batches of an update, whatever was skipped
    _update_learning_rates             counts updates, whatever was skipped
    handlers of SIGTERM, SIGUSR1       the guard's, which stops all ranks together
"""

import os
import sys
from typing import Any

import fsspec
from torch.utils.data import DataLoader, IterableDataset

from rollback.environment import ENV_ATTEMPT
from rollback.errors import UsageError
from rollback.train.start import attach
from rollback.trainers.evaluated_loaders import EvaluatedLoaders
from rollback.trainers.guarded_trainer import GuardedTrainer, attributes_of, named, refusing, replaced
from rollback.trainers.lightning.limited_loader import limited_loader
from rollback.trainers.lightning.state import FitState, is_of
from rollback.trainers.lightning.unsupported import refuse_unknown_callbacks, require_known, require_known_module
from rollback.trainers.saved_files import SavedFiles

_NONE = object()
_SAVING_CONFIG = "SaveConfigCallback", "pytorch.cli", "lightning.cli"


class _GuardedFit(GuardedTrainer):
    """One `fit` of one Trainer, and what its loop takes for the fetcher of its batches."""

    entry, step_name = "fit", "trainer.global_step"
    require_known = staticmethod(require_known)

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        super().__init__(trainer, settings)
        self._loop = trainer.fit_loop
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._state = FitState(trainer)
        self._evaluated = EvaluatedLoaders()
        self._batch: Any = _NONE
        """Asked of the guard, and not trained on yet."""
        self._micro = 0
        """How many batches the update in hand has, with the one in hand."""
        self._updates = -1
        """How many updates there were at its first one."""
        self._observed = False
        """Whether the guard was told the loss of the batch in hand."""
        self._finished = False
        # As one of Lightning's fetchers.
        self.fetched, self.done, self.length = 0, False, None

    def install(self) -> None:
        trainer, loop = self._trainer, self._epoch_loop
        self._replace(trainer, "fit", "save_checkpoint")
        self._replace(trainer._callback_connector, "_attach_model_callbacks")
        self._replace(trainer._checkpoint_connector, "_select_ckpt_path")
        self._replace_one(trainer._signal_connector, "register_signal_handlers", lambda: None)
        self._replace(self._loop, "setup_data", "run")
        self._replace(trainer._logger_connector, "update_train_step_metrics")
        self._replace(loop, "_accumulated_batches_reached", "_update_learning_rates")
        self._replace(loop.automatic_optimization, "_make_zero_grad_fn", "_training_step")
        self._replace_one(loop.val_loop, "reset", self.begin_validation)

    # In the place of Lightning's methods -----------------------------------------------------------------------------

    def fit(
        self, model: Any, train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None,
        ckpt_path: Any = None, *more: Any, **others: Any,
    ) -> Any:  # fmt: skip
        with refusing(status=1):
            if self._trainer.is_global_zero:  # other hosts may not have the record
                self._leave_saved_file(ckpt_path)
            self._require_first()
            self.require_known(self._trainer)  # callbacks may have come since
            require_known_module(getattr(model, "_orig_mod", model))
        self._leave_saved_config()
        given = train_dataloaders, val_dataloaders, datamodule
        return self._originals["fit"](model, *given, None, *more, **others)

    def _leave_saved_file(self, ckpt_path: Any) -> None:
        """Of what Lightning would go on from: what the script hands over, or else what Lightning looks for by itself
        where there is an OnExceptionCheckpoint, or a file for a requeue by Slurm."""
        trainer, file = self._trainer, ckpt_path
        if ckpt_path in (None, "last"):
            fitting = sys.modules[type(trainer.state).__module__].TrainerFn.FITTING
            with replaced(trainer.state, fn=fitting):
                file = self._originals["_select_ckpt_path"](
                    fitting, ckpt_path, model_provided=True, model_connected=False
                )
        if file is None:
            return
        known = SavedFiles(attach.run_paths(self._settings.get("run")).root).has(str(file))
        if ckpt_path is None and not known:
            raise UsageError(
                f"the Trainer goes on from {file}, and rollback.protect from the run directory",
                hint="move that file away, or take out what makes Lightning load it",
            )
        way = "file, load the model from it: load_from_checkpoint"
        self._leave_aside(file, f"ckpt_path={str(ckpt_path)!r}", known, way)

    def _select_ckpt_path(self, stage: Any, *given: Any, **others: Any) -> Any:
        return None if stage == "fit" else self._originals["_select_ckpt_path"](stage, *given, **others)

    def _leave_saved_config(self) -> None:
        """A LightningCLI saves its config at each start, and raises where there is one, as another run's. In a run that
        goes on it is this run's, and stays as it is: no attempt but the first one would train. It is not saved over,
        since the guard may still refuse this job."""
        began = os.path.lexists(attach.run_paths(self._settings.get("run")).identity)
        goes_on = began or int(os.environ.get(ENV_ATTEMPT, "1")) > 1  # an attempt may have died before its guard
        if "setup" in self._originals:  # this fit was called before, and came to no training
            return
        saving = (item for item in self._trainer.callbacks if is_of(item, *_SAVING_CONFIG))
        if (callback := next(saving, None)) is None or callback.overwrite or not callback.save_to_log_dir:
            return

        def setup(trainer: Any, *given: Any, **others: Any) -> None:
            config = os.path.join(trainer.log_dir, callback.config_filename)
            system, path = fsspec.url_to_fs(config)
            there = trainer.is_global_zero and goes_on and system.isfile(path)
            # Rank 0's word: other hosts may not have the record, and in what follows all ranks meet.
            callback.save_to_log_dir &= not trainer.strategy.broadcast(there)
            self._originals["setup"](trainer, *given, **others)

        self._replace_one(callback, "setup", setup)

    def _attach_model_callbacks(self) -> None:
        self._originals["_attach_model_callbacks"]()
        refuse_unknown_callbacks(self._trainer)

    def save_checkpoint(self, filepath: Any, *given: Any, **others: Any) -> None:
        if self._state.saved is not None and self._trainer.is_global_zero:
            self._state.saved.note(str(filepath), self._state.place)
        self._originals["save_checkpoint"](filepath, *given, **others)

    def setup_data(self) -> None:
        """The loader is made, but not iterated: batches are the guard's."""
        module = sys.modules[type(self._loop).__module__]
        original = module._select_data_fetcher

        def select(trainer: Any, stage: Any) -> Any:
            if type(original(trainer, stage)).__name__ == "_DataLoaderIterDataFetcher":
                attach.refuse(
                    UsageError(
                        "rollback.protect got a training_step that takes its batches itself (dataloader_iter)",
                        hint="take a batch: training_step(self, batch, batch_idx)",
                    )
                )
            return self

        with replaced(module, _select_data_fetcher=select):
            self._originals["setup_data"]()

    def run(self) -> None:
        loop = self._loop
        loop.setup_data()
        if loop.skip:
            return
        loop.reset()
        with refusing():
            self._make_guard()
        loop.on_run_start()
        self._state.begin()
        self.guard.watch(attributes_of(item for item in self._trainer.callbacks if not item.state_dict()))
        was_stopped, goes_on = self._was_stopped(), self._state.asked_for_more
        if was_stopped:
            loop.on_advance_start()
            self._epoch_loop.reset()
            self._state.go_on()
            self._trainer.should_stop = self._trainer.should_stop and not goes_on
            self._end_epoch()
        if goes_on or not was_stopped:
            self._train()
        loop.on_run_end()
        self.guard.close()

    def begin_validation(self) -> None:
        combined = self._loop._combined_loader  # None: this is the check in front of the training
        trained = self._loop._data_source.instance if combined is None else combined.iterables
        for number, loader in enumerate(self._epoch_loop.val_loop._combined_loader.flattened):
            if isinstance(loader, DataLoader) and loader is not trained:
                self._evaluated.begin(str(number), loader)
        self._originals["reset"]()

    def _training_step(self, *given: Any, **others: Any) -> Any:
        result = self._originals["_training_step"](*given, **others)
        if result.loss is not None and not self._observed:  # an optimizer may ask several times
            self._observed = True
            self.guard.observe(result.loss * self._trainer.accumulate_grad_batches)  # by which Lightning has divided
        return result

    def _accumulated_batches_reached(self) -> bool:
        return bool(self._micro % self._trainer.accumulate_grad_batches == 0)

    def _make_zero_grad_fn(self, batch_idx: int, optimizer: Any) -> Any:
        """None but for an update's first batch, as which Lightning knows the multiples of `accumulate_grad_batches`."""
        first = batch_idx - batch_idx % self._trainer.accumulate_grad_batches
        return self._originals["_make_zero_grad_fn"](first + self._micro - 1, optimizer)

    def _update_learning_rates(self, *given: Any, **others: Any) -> None:
        """A scheduler's `frequency` goes by the batches read when an update ends: a multiple of an update's.

        Behind a skip window that is no whole number of updates it would be none for the rest of the epoch.
        """
        progress = self._epoch_loop.batch_progress
        ready = progress.current.ready
        if not progress.is_last_batch:
            progress.current.ready += -ready % self._trainer.accumulate_grad_batches
        try:
            self._originals["_update_learning_rates"](*given, **others)
        finally:
            progress.current.ready = ready

    def update_train_step_metrics(self) -> None:
        self._leave_stop_to_guard()  # where it is to stop, Lightning logs that step, and validates
        self._originals["update_train_step_metrics"]()

    def _leave_stop_to_guard(self) -> None:
        """A callback's answer to a stop signal is no end of the training: the guard stops all ranks together."""
        if self._trainer.should_stop and self.guard.script_was_told:
            self._trainer.should_stop = False

    # Its epochs ------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        loop = self._loop
        for epoch in self.guard.epochs(sys.maxsize):
            _count(loop.epoch_progress, epoch, epoch)
            self._state.ending = False
            if loop.done and self._finish():
                break
            loop.on_advance_start()
            self._epoch_loop.reset()
            iter(self.guard)
            self._state.restore_again()
            if not self._train_epoch():
                continue
            self._end_epoch()
            if loop.done and self._finish():
                break

    def _end_epoch(self) -> None:
        self._state.ending = True
        self._loop.on_advance_end()
        self._loop.on_iteration_done()

    def _make_guard(self) -> None:
        trainer, loader = self._trainer, self._loader()
        if not any(group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups):
            raise UsageError(
                "rollback.protect got a Trainer without an optimizer", hint="return one from configure_optimizers"
            )
        self._state.state_dict()  # refuses now what could not be kept later
        others = named("scheduler", (config.scheduler for config in trainer.lr_scheduler_configs))
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            others["scaler"] = scaler
        self._begin(
            "max_steps={}", model=trainer.model, optimizer=trainer.optimizers[0], loader=loader,
            max_steps=None if trainer.max_steps == -1 else trainer.max_steps, **others,
        )  # fmt: skip
        self.guard.without_prefetch_watch()
        self._state.saved = SavedFiles(self.guard.run)
        self.guard.keep(lightning_counts=self._state.counts, lightning=self._state, lightning_evaluated=self._evaluated)

    def _loader(self) -> DataLoader[Any]:
        """The one that is trained on, as far as Lightning is to read it. Raises UsageError for what cannot be kept."""
        combined = self._loop._combined_loader
        loader = combined.iterables
        if len(combined.flattened) != 1 or loader is not combined.flattened[0]:
            raise UsageError(
                f"rollback.protect got batches of a {type(loader).__name__} of {len(combined.flattened)} loaders",
                hint="train on one DataLoader, of a torch.utils.data.StackDataset(a=one, b=other) for dicts of batches "
                "like theirs; Subset(other, [i % len(other) for i in range(len(one))]) repeats a shorter one",
            )
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            kind = type(getattr(loader, "dataset", loader)).__name__
            raise UsageError(
                f"rollback.protect got batches of a {kind}, which is only read in order",
                hint="take a DataLoader of a data set with len() and __getitem__; a loop of your own over such data "
                "can have a rollback.Guard",
            )
        return limited_loader(loader, len(self))

    def _train_epoch(self) -> bool:
        """One epoch, from where the guard stands. False: training goes on in an earlier one."""
        while self._draw():
            self._epoch_loop.run(self)
            if self._stops and self._finish():
                return True
            if self._left_early:
                self._updates = -1  # Lightning drops the gradients of an update that it has left like that
                return True
        if self.guard.interrupted:
            return False
        self._state.go_on()
        self._end_passed_over()
        return True

    def _was_stopped(self) -> bool:
        """Whether a run is there again that was stopped between two batches, or behind an epoch's last one: only that
        epoch's end is left, which the process may not have lived to do, and which the state was kept before."""
        epoch = self._state.epoch
        if epoch is not None:  # the guard's may be the next one
            _count(self._loop.epoch_progress, epoch, epoch)
        return epoch is not None and (self._has_all_steps or self._stops)

    @property
    def _has_all_steps(self) -> bool:
        return bool(0 <= self._trainer.max_steps <= self._trainer.global_step)

    @property
    def _left_early(self) -> bool:
        """Whether `on_train_batch_start` has returned -1: nothing else makes a batch the last one before its time."""
        return bool(self._epoch_loop.batch_progress.is_last_batch and not self.done)

    @property
    def _stops(self) -> bool:
        return bool(self._trainer.should_stop and self._loop._can_stop_early)

    def _finish(self) -> bool:
        """Training is done, as Lightning sees it. False where the guard has put it elsewhere, or stops it soon."""
        self._leave_stop_to_guard()
        if not self._loop.done:
            return False
        by = "trainer.should_stop" if self._stops else f"max_epochs={self._loop.max_epochs}"
        self._finished = self._finished or self._has_all_steps or self.guard.finish(by)  # the steps: its own end
        return self._finished

    def _end_passed_over(self) -> None:
        """What Lightning does behind an epoch's last batch, where that was not trained on but passed over."""
        loop, batches = self._epoch_loop, self._trainer.num_training_batches
        stepped = loop._batches_that_stepped
        if 0 < loop.batch_progress.current.ready < batches and not loop._is_training_done:
            _count(loop.batch_progress, batches, self.guard.batch)
            loop.batch_progress.is_last_batch = True
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            loop.on_advance_end(self)
            loop._batches_that_stepped = stepped

    # Its batches -----------------------------------------------------------------------------------------------------

    def _draw(self) -> bool:
        """Whether there is another batch in this pass of the epoch."""
        if self._batch is _NONE:
            self._batch = next(self.guard, _NONE)
        return self._batch is not _NONE

    def __next__(self) -> tuple[Any, int, int]:
        if not self._draw():
            raise StopIteration
        batch, self._batch = self._batch, _NONE
        moved, updates = self._state.go_on(), self._trainer.global_step
        if moved or updates != self._updates:
            self._updates, self._micro = updates, 0
        self._micro, self._observed = self._micro + 1, False
        # Lightning finds validations, and the epoch's end, by what has been read.
        position = self.guard.batch_in_epoch
        _count(self._epoch_loop.batch_progress, position, self.guard.batch)
        self.fetched, self.done = position + 1, self.guard.last_in_epoch
        return batch, position, 0

    def setup(self, combined_loader: Any) -> None:
        combined_loader._iterator = self  # which it asks for its length

    def __len__(self) -> int:
        combined = self._loop._combined_loader
        return int(min(len(combined.flattened[0]), combined.limits[0]))  # `limit_train_batches`

    def __iter__(self) -> "_GuardedFit":
        return self

    def teardown(self) -> None:
        pass


def _count(progress: Any, current: int, total: int) -> None:
    """Put a progress of Lightning's to where so many are completed, and none has begun since."""
    for tracker, number in ((progress.current, current), (progress.total, total)):
        tracker.load_state_dict(dict.fromkeys(tracker.state_dict(), number))


protect = _GuardedFit.protect
