"""What Lightning can be told to do, and a guard cannot go along with."""

from typing import Any

from rollback.errors import UsageError
from rollback.train.comm.ranks import announced_ranks
from rollback.trainers.guarded_trainer import refusing, require_none_of

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_KNOWN_STRATEGY = 'strategy="ddp", one device, or FSDP2 by ModelParallelStrategy(N, tensor_parallel_size=1)'
_OWN_PROCESSES = 'strategy="ddp", and one process for each device: rollback launch --nproc N'
_CALLBACKS = {
    "StochasticWeightAveraging": "average the weights of several checkpoints behind the run (rollback ring export)",
    "WeightAveraging": "hand over an average of your own: rollback.protect(trainer, ema=ema)",
    "ModelPruning": "prune behind the run",
    "BaseFinetuning": "make the optimizer with all groups (lr=0 for one whose time comes later), and unfreeze layers "
    "in a callback of your own, by `if epoch >= N`",
    "BatchSizeFinder": "find the batch size before, with another Trainer (with --adopt: by a script of its own)",
    "LearningRateFinder": "find the learning rate before, with another Trainer (with --adopt: by a script of its own)",
}
"""Callbacks that train, or change what is trained, in a way that no checkpoint of a guard has."""


def require_known(trainer: Any) -> None:
    """Raises UsageError for what the Trainer is set to do, and a guard cannot go along with."""
    strategy = trainer.strategy
    kind, launcher = type(strategy).__name__, type(strategy.launcher).__name__
    ranks = announced_ranks()
    taking_one_batch = getattr(strategy, "_tensor_parallel_size", 1)
    require_none_of((
        (trainer.fit_loop.epoch_progress.current.ready > 0, "it has trained already, unprotected",
         "call rollback.protect before trainer.fit(); what was trained so far can begin the run of another Trainer"),
        (kind not in _STRATEGIES, f"its strategy is {kind}", _KNOWN_STRATEGY),
        (taking_one_batch != 1, f"several ranks take one batch (tensor_parallel_size={taking_one_batch!r})",
         _KNOWN_STRATEGY),
        (kind == "SingleDeviceStrategy" and ranks > 1, f"it trains on one device by itself, in each of {ranks} ranks",
         "Trainer(devices=N), which is also what --nproc gets; Lightning's \"auto\" is one device on a CPU"),
        (launcher == "_MultiProcessingLauncher", "it forks or spawns its ranks", _OWN_PROCESSES),
        (trainer.fast_dev_run, "fast_dev_run trains a few batches to try the script", "protect the real run"),
        (trainer.overfit_batches > 0, f"overfit_batches={trainer.overfit_batches} replaces the sampler",
         "train on a torch.utils.data.Subset"),
        (trainer.reload_dataloaders_every_n_epochs, "reload_dataloaders_every_n_epochs makes another loader in mid-run",
         "one loader for the whole run; a sampler or data set with set_epoch may choose other samples in each epoch"),
        (getattr(trainer, "_val_check_time_interval", None) is not None,
         "val_check_interval is a time: a run that goes back would validate elsewhere",
         "a number of batches, or a share of the epoch"),
    ))  # fmt: skip
    _require_known_callbacks(trainer)


def _require_known_callbacks(trainer: Any) -> None:
    found = {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}
    require_none_of(
        (name in found, f"the callback {name} changes what is trained", hint) for name, hint in _CALLBACKS.items()
    )


def refuse_unknown_callbacks(trainer: Any) -> None:
    """The same for callbacks that the module has brought by its `configure_callbacks`, before they do anything. They
    also come with a validation or a test, which they do not change."""
    if trainer.state.fn == "fit":
        with refusing(status=1):
            _require_known_callbacks(trainer)


def require_known_module(module: Any) -> None:
    if not module.automatic_optimization:
        raise UsageError(
            f"rollback.protect got a Trainer for {type(module).__name__}, which optimizes by hand "
            "(automatic_optimization=False)",
            hint="return the loss from training_step and let Lightning make the update, with one optimizer (groups of "
            "parameters may have a learning rate each); or make a rollback.Guard in a loop of your own",
        )
