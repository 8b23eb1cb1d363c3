"""Of what the guard of a watched script is made: found on each rank, before the ranks compare it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from rollback.errors import UsageError
from rollback.system.collector import instances
from rollback.train.guard import Guard
from rollback.train.updates.wrappers import outermost
from rollback.trainers.adopt.epochs import EpochLoop
from rollback.trainers.adopt.objects import kept_besides, modules_of, trained_objects
from rollback.trainers.protect import module_of


@dataclass(frozen=True)
class GuardPlan:
    """Of one rank. make: collective; returns the guard, and what hands out its batches where that is another object."""

    model: nn.Module
    optimizer: Optimizer
    objects: list[str]
    """Kinds of all that the guard is given besides, by name."""
    make: Callable[[], tuple[Guard, Any]]

    def seen(self, last: int | None) -> dict[str, Any]:
        """What the ranks compare. last: the number of the last epoch, where that is known."""
        return {
            "the last epoch": last, "the model": type(self.model).__name__,
            "the optimizer": type(self.optimizer).__name__, "what is kept besides": self.objects,
        }  # fmt: skip


def plan_for(loader: Any, made: list[Any], loop: EpochLoop | None = None, *, strict: bool = False) -> GuardPlan:
    """loader: the one that is trained on. made: the script's objects, in the order of their making. loop: over epochs,
    one of them. strict: whether another order of the data is refused. Raises UsageError for what cannot be kept."""
    if type(loader).__module__.partition(".")[0] == "accelerate":
        if getattr(loader, "use_stateful_dataloader", False) and strict:
            raise UsageError(
                "the script tells Accelerate use_stateful_dataloader=True: its data's order is drawn in prepare(), "
                "and under a guard when the epoch begins, so that it is another one than without rollback",
                hint="leave use_stateful_dataloader out: a run that goes on needs it no more. --adopt without =strict "
                "trains in that other order, which is the same each time",
            )
        return _prepared(loader, made)
    if isinstance(loader.dataset, IterableDataset) and not hasattr(loader.dataset, "load_state_dict"):
        raise UsageError(
            f"the script trains on a {type(loader.dataset).__name__}, which is only read in order: what it keeps "
            "for itself while it is read cannot be put back",
            hint="a data set with len() and __getitem__, or one with state_dict and load_state_dict",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"the script trains on a {type(loader).__name__}, which iterates in its own way",
            hint="a torch DataLoader; other loaders can be handed to a rollback.Guard",
        )
    places = {id(thing): place for place, thing in enumerate(made)}
    if loop is not None and len(loop) > 1 and places.get(id(loop), len(made)) < places.get(id(loader), -1):
        raise UsageError(
            f"the script makes its {type(loader).__name__} in its loop over epochs, anew for each: the guard of the "
            "first one alone would see one epoch",
            hint="make the loader once, in front of that loop",
        )
    model, optimizer, objects = trained_objects(made)
    return GuardPlan(
        model, optimizer, [f"{name}: {type(thing).__name__}" for name, thing in objects.items()],
        lambda: (Guard(model=model, optimizer=optimizer, loader=loader, **objects), None),
    )  # fmt: skip


def _prepared(loader: Any, made: list[Any]) -> GuardPlan:
    """Of what Accelerate has prepared, and what else changes with it: an average of the model, a scheduler."""
    accelerators = instances(lambda kind: kind.__name__ == "Accelerator")
    if len(accelerators) != 1:
        raise UsageError(
            f"the script has {len(accelerators)} objects of class Accelerator, and --adopt goes by one",
            hint="rollback.protect(accelerator, ...) takes what one of them has prepared",
        )
    (accelerator,) = accelerators
    models, optimizers = accelerator._models, accelerator._optimizers
    if len(models) != 1 or len(optimizers) != 1:
        raise UsageError(
            f"the script has prepared {len(models)} models and {len(optimizers)} optimizers, and --adopt knows what an "
            "update is with one of each only",
            hint="rollback.protect(accelerator, ...) takes the one model, its optimizer and its loader",
        )
    # Accelerate notes the model that it was given, and returns that in DDP.
    model = outermost(models[0], modules_of(made))
    prepared = [model, *optimizers, loader, *accelerator._schedulers]
    known = [
        *accelerator._custom_objects,
        accelerator.scaler,
        *(getattr(each, "scheduler", each) for each in accelerator._schedulers),
    ]
    besides = {
        f"unprepared_{name}": thing
        for name, thing in kept_besides(model, made).items()
        if not any(thing is other for other in known)
    }

    def make() -> tuple[Guard, Any]:
        try:
            given = module_of((accelerator,)).protect(accelerator, *prepared, **besides)
        except UsageError as error:
            raise UsageError(error.message.replace("rollback.protect got", "the script has"), hint=error.hint) from None
        del accelerator.skip_first_batches  # what that is for, is known when the script iterates it: `OwnResume`
        batches = given[next(place for place, item in enumerate(prepared) if item is loader)]
        return batches.guard, batches

    kinds = [type(thing).__name__ for thing in (*prepared, *besides.values())]
    return GuardPlan(prepared[0], optimizers[0].optimizer, kinds, make)


@dataclass(frozen=True)
class Adopted:
    """What is under guard. prepared: what hands out the guard's batches, where Accelerate has prepared the loader."""

    guard: Guard
    model: nn.Module
    optimizer: Optimizer
    schedulers: list[LRScheduler]
    """Of that optimizer, at the start."""
    loader: Any
    prepared: Any
