"""The guard in the Trainer of torchtitan, with data parallelism: FSDP2 and HSDP.

Before each step torchtitan's loop asks `should_continue_training`, with all of the step before done and the counter not
raised yet. There the guard is asked for the batches of the next step, and so it judges, saves and goes back there: a
rollback only has to put the counters back, and the loop goes on.

    torchtitan                  here
    train                       refuses what cannot be kept exact; a stop of the ranks ends the script too
    checkpointer.load           as it is (weights to begin with); then the guard is made
    should_continue_training    first the batches of the next step are drawn from the guard
    batch_generator             as it is, over the guard's batches
    train_step                  is given them; its check of the loss is left to the verdict of the guard
    forward_backward_step       then the guard is told the loss
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torchtitan.trainer
from torchtitan.components.dataloader import DataloaderExhaustedError

from rollback.errors import UsageError
from rollback.train.sharded import local_of
from rollback.trainers.guarded_trainer import GuardedTrainer, named, refusing, require_none_of
from rollback.trainers.torchtitan.state import (
    JoinedOptimizer,
    TrainState,
    data_sets_of,
    make_rewindable,
    without_state_dict_hooks,
)

_NOT_FINITE = "Loss is not finite"
"""What torchtitan's check of the loss begins its message with."""
_PATIENCE = 2
"""Updates behind one without a finite loss until the guard has given its verdict: it comes with the next update."""
_LOOP = {"train": "a loop", "should_continue_training": "an end"}


def _require_known(trainer: Any) -> None:
    """Raises UsageError for what the Trainer is set to do, and a guard cannot go along with."""
    config, dims, kind = trainer.config, trainer.parallel_dims, type(trainer)
    own = [what for name, what in _LOOP.items() if getattr(kind, name) is not getattr(torchtitan.trainer.Trainer, name)]
    data = data_sets_of(trainer.dataloader)
    ending = sorted({type(item).__name__ for item in data if getattr(item, "infinite", None) is False})
    require_none_of((
        (hasattr(trainer, "ft_manager"), "it trains with torchft",
         "take torchtitan.trainer.Trainer: rollback launch starts ranks that are lost again, and all go on together"),
        (own, f"{kind.__name__} has {' and '.join(own)} of its own ({kind.__module__})",
         "protect a Trainer that inherits train and should_continue_training"),
        (dims.pp_enabled, f"pipeline_parallel_degree={dims.pp}, and the ranks have different models",
         "parallelism.pipeline_parallel_degree=1; data_parallel_shard_degree shards the model"),
        (dims.tp_enabled, f"tensor_parallel_degree={dims.tp}, and buffers are DTensors, of which the guard keeps none",
         "parallelism.tensor_parallel_degree=1; data_parallel_shard_degree shards the model"),
        (dims.cp_enabled, f"context_parallel_degree={dims.cp}, with which the guard was never tried",
         "parallelism.context_parallel_degree=1"),
        (dims.ep_enabled, f"expert_parallel_degree={dims.ep}, with which the guard was never tried",
         "parallelism.expert_parallel_degree=1"),
        (config.comm.mode != "default", f"comm.mode={config.comm.mode!r}: its ranks do not talk to each other by "
         "torch.distributed alone", 'comm.mode="default"'),
        (config.checkpoint.enable and not config.checkpoint.load_only, "it saves checkpoints of its own "
         f"({config.checkpoint.folder!r})", "checkpoint.enable=False: the guard has its checkpoints. To begin with the "
         "weights of a checkpoint, leave it enabled and set checkpoint.load_only=True"),
        (not config.training.disable_cuda_graphs, "it replays its steps as CUDA graphs, which hide them from the guard",
         "training.disable_cuda_graphs=True"),
        (trainer.metrics_processor.has_quantization, "it has quantized layers (float8, MXFP8, NVFP4), with which the "
         "guard was never tried", "build the model without converters"),
        (config.optimizer.implementation == "fused_opt_states_bf16", "its optimizer keeps a state in bfloat16, which "
         "torch loads in another precision", 'optimizer.implementation="fused"'),
        (ending, f"its data set ends ({', '.join(ending)} with infinite=False), and near its end its position is not "
         "exact", "dataloader.infinite=True; training.steps says where training ends"),
    ))  # fmt: skip


class _GuardedTraining(GuardedTrainer):
    """One training of one Trainer, and the iterable of its batches."""

    entry, step_name = "train", "trainer.step"
    require_known = staticmethod(_require_known)

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        super().__init__(trainer, settings)
        self._drawn: list[Any] = []
        """Batches of the next step."""
        self._state = TrainState(trainer, self._drawn)
        self._batches: Iterator[Any] = iter(())
        self._summands = 1
        """Into how many parts torchtitan divides the loss of a step: over ranks, and over what it accumulates."""
        self._exhausted: DataloaderExhaustedError | None = None
        self._left: RuntimeError | None = None
        """What the check of the loss has raised, until the guard's verdict."""
        self._left_at = 0
        self._stopped: SystemExit | None = None
        self._until_done = contextlib.ExitStack()

    def install(self) -> None:
        self._replace(self._trainer, "train", "should_continue_training", "train_step", "forward_backward_step")
        self._replace(self._trainer.checkpointer, "load")

    # In the place of torchtitan's methods ----------------------------------------------------------------------------

    def train(self) -> None:
        with refusing():
            self._require_first()
            self.require_known(self._trainer)
        with self._until_done:
            self._originals["train"]()
            if self._stopped is not None:
                raise self._stopped
            self.guard.close()

    def load(self, step: int = -1) -> Any:
        loaded = self._originals["load"](step)
        with self._noted(), refusing():
            self._make_guard()
        dims = self._trainer.parallel_dims
        self._summands = dims.dp_replicate * dims.dp_shard * self._trainer.gradient_accumulation_steps
        self._batches = self._trainer.batch_generator(self)
        return loaded

    def _make_guard(self) -> None:
        trainer, config = self._trainer, self._trainer.config
        if trainer.step:
            raise UsageError(
                f"the Trainer goes on from step {trainer.step} of its own checkpoints, and rollback.protect from the "
                "run directory",
                hint=f"checkpoint.enable=False, or move {config.checkpoint.folder!r} in {config.dump_folder!r}",
            )
        self._until_done.enter_context(without_state_dict_hooks(trainer.model_parts[0]))
        make_rewindable(trainer.dataloader)
        self._begin(
            "training.steps={}", model=trainer.model_parts[0], optimizer=JoinedOptimizer(trainer.optimizers),
            loader=trainer.dataloader, max_steps=config.training.steps, **named("scheduler", trainer.lr_schedulers),
        )  # fmt: skip
        self.guard.keep(torchtitan=self._state)

    def should_continue_training(self) -> bool:
        with self._noted():
            self._draw()
        if self._state.has_moved():
            self._left = None
        elif self._left is not None and (self._exhausted or self._trainer.step >= self._left_at + _PATIENCE):
            raise self._left  # the guard has left it alone: it only observes
        return bool(self._originals["should_continue_training"]())

    def train_step(self, data_iterator: Any) -> None:
        try:
            self._originals["train_step"](self._hand_out())
        except RuntimeError as error:
            if not str(error).startswith(_NOT_FINITE):
                raise
            if self._left is None:
                self._left, self._left_at = error, self._trainer.step

    def forward_backward_step(self, **given: Any) -> Any:
        loss = self._originals["forward_backward_step"](**given)
        self.guard.observe(local_of(loss).detach() * self._summands)
        return loss

    # Its batches -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return iter(self.guard)

    def _draw(self) -> None:
        """All batches of the next step, or the end of the data. Where the guard goes back, none of before is left."""
        self._drawn.clear()
        try:
            while len(self._drawn) < self._trainer.gradient_accumulation_steps:
                self._drawn.append(next(self._batches))
        except DataloaderExhaustedError as end:
            self._exhausted = end

    def _hand_out(self) -> Iterator[Any]:
        while self._drawn:
            yield self._drawn.pop(0)
        if self._exhausted is not None:
            raise self._exhausted

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """The guard may end this rank: torch's `record`, around `train`, takes an exit with status 0 for a return."""
        try:
            yield
        except SystemExit as stop:
            self._stopped = stop
            raise


protect = _GuardedTraining.protect
