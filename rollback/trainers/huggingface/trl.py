"""What TRL's trainers hold besides a Trainer's own: models that follow the training, and completions of a generation.

A reference model that is synchronized with the trained one (`sync_ref_model=True`) is part of the training: it is
handed to the guard. Completions are made for several batches at once, and stay in the trainer's memory until they are
used up. No checkpoint has them; so each update has to begin with new ones. What a trainer adapts at each update, as the
weight of the entropy in its loss, decides about the next ones.
"""

from typing import Any

from torch import nn

from rollback.errors import UsageError
from rollback.train.updates.wrappers import unwrap

_SYNCHRONIZES = "SyncRefModelCallback"
_AVERAGES = "BEMACallback", "PEFTAdapterEMACallback"
_BESIDE = {"AsyncGRPOTrainer": "GRPOTrainer", "AsyncDistillationTrainer": "DistillationTrainer"}
"""For these a worker makes completions while they train, as many as it comes to. The other makes them itself."""
_COUNTERS = "_step", "_buffer_step"
"""A trainer with completions counts its batches in one of these."""
_ENTROPY = "entropy_coef", "_last_world_entropy"
_GATHERED = ("stats",)
"""Of OnlineDPOTrainer: lists of numbers by name. Any other trainer may hold something else by that name."""


def reference_models(trainer: Any) -> dict[str, nn.Module]:
    """The modules that a callback changes by what is trained, each by a name for the guard.

    Raises UsageError for a callback that holds such weights where a guard cannot put them back.
    """
    models: list[nn.Module] = []
    for item in trainer.callback_handler.callbacks:
        names = _kinds_of_trl(item)
        if names.intersection(_AVERAGES):
            raise UsageError(
                f"rollback.protect cannot guard this Trainer: its {type(item).__name__} averages the weights, and "
                "behind a rollback or a resume it would go on with an average of other steps",
                hint="take it out; rollback.protect(trainer, ema=...) keeps an average of your own that has state_dict "
                "and load_state_dict",
            )
        if _SYNCHRONIZES in names and item.ref_model is not None:
            model = unwrap(item.ref_model)
            if not any(model is known for known in models):
                models.append(model)
    return {f"ref_model_{number}" if number else "ref_model": model for number, model in enumerate(models)}


def adapted_attributes(trainer: Any) -> tuple[str, ...]:
    """Names of the trainer's attributes that it adapts at each update, or gathers for its next log. A weight that stays
    as it is is a setting, which the script of a resumed run may have changed."""
    entropy = _ENTROPY if getattr(trainer, "use_adaptive_entropy", False) else ()
    return (*entropy, *_GATHERED) if "OnlineDPOTrainer" in _kinds_of_trl(trainer) else entropy


def generates_text(trainer: Any) -> bool:
    """Whether it makes texts by the model that it trains. Of weights that are NaN that raises an error."""
    return hasattr(trainer, "generation_config") and bool(_kinds_of_trl(trainer))


def require_completions_of_one_update(trainer: Any) -> None:
    """Raises UsageError where completions outlast the update that they are made in, or are made beside it."""
    for kind in _kinds_of_trl(trainer).intersection(_BESIDE):
        raise UsageError(
            f"rollback.protect cannot guard an {kind}: a worker makes its completions while it trains, and "
            "which ones an update gets depends on time, so no rollback and no resume is exact",
            hint=f"use TRL's {_BESIDE[kind]}, which makes them itself, or run it unprotected",
        )
    every, accumulated = _batches_of_a_generation(trainer), trainer.args.gradient_accumulation_steps
    if every is None or accumulated % every == 0:
        return
    raise UsageError(
        f"rollback.protect cannot guard this Trainer: it makes completions for {every} batches (steps_per_generation x "
        f"num_iterations), and an update has {accumulated} (gradient_accumulation_steps), so updates use completions "
        "that were made before them, and no checkpoint has these",
        hint=f"choose gradient_accumulation_steps={every} or a multiple of it, and a smaller "
        "per_device_train_batch_size for updates of the same size; or lower steps_per_generation and num_iterations",
    )


def end_update(trainer: Any) -> None:
    """The next batch begins an update: it is to begin with new completions.

    It does so by itself, except behind an update that had fewer batches, as a skip window leaves it at an epoch's end.
    """
    every = _batches_of_a_generation(trainer)
    for name in _COUNTERS:
        if every is not None and name in vars(trainer):
            count = getattr(trainer, name)
            setattr(trainer, name, count + -count % every)


def _kinds_of_trl(item: Any) -> set[str]:
    return {kind.__name__ for kind in type(item).__mro__ if kind.__module__.startswith("trl.")}


def _batches_of_a_generation(trainer: Any) -> int | None:
    """How many batches get their completions at once. None: the trainer keeps none."""
    if "_buffered_inputs" not in vars(trainer):
        return None
    args = trainer.args
    steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    return int(steps) * int(getattr(trainer, "num_iterations", 1))
