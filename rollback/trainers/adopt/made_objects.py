"""Of what the guard of a watched script is made: which of the objects that the script has made are trained, and which
else have a state that changes with training."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from rollback.errors import UsageError
from rollback.train.advice.script_tensors import ModelCopies, copies_of_script, tensors_in
from rollback.train.guard import Guard
from rollback.train.introspection import instances, own_variables
from rollback.train.sharded import FsdpModules
from rollback.train.start.arguments import check_whole
from rollback.train.state.stateful import trained_by
from rollback.train.updates.wrappers import outermost
from rollback.trainers.adopt.epoch_loop import EpochLoop
from rollback.trainers.protect import module_of


class CopiedWeights:
    """A list or a dict of tensors of the script, for a guard: it puts them back where they are.

    Raises ValueError where the script's holds others: what is then which copy, nobody could tell.
    """

    def __init__(self, held: Any) -> None:
        self._held = held

    def state_dict(self) -> dict[str, Tensor]:
        return {str(place): item for place, item in enumerate(tensors_in(self._held))}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        own = self.state_dict()
        shapes, kept = ({place: [*item.shape] for place, item in items.items()} for items in (own, state))
        if shapes != kept:
            raise ValueError(
                f"the script's tensors are of shapes {[*shapes.values()]} here, and {[*kept.values()]} there"
            )
        with torch.no_grad():
            for place, item in own.items():
                item.copy_(state[place])


class MadeObjects:
    """Modules, optimizers, schedulers, gradient scalers, loaders and loops over epochs, as long as they are there.

    A script may make a loss in each step: what is gone leaves nothing here. What lies in a cycle, as an optimizer and
    its scheduler do, is gone once the garbage collector has come by. It takes long where there is much, so it is only
    called where something has been made since. A loader does not count: the guard makes one for each epoch.
    """

    def __init__(self) -> None:
        self._made: dict[int, weakref.ref[Any]] = {}
        self._numbers = count()
        self._collected = False

    def note(self, thing: Any) -> None:
        number = next(self._numbers)
        self._made[number] = weakref.ref(thing, lambda _: self._made.pop(number, None))
        self._collected &= isinstance(thing, DataLoader)

    def alive(self) -> list[Any]:
        """In the order in which they were made."""
        if not self._collected:
            gc.collect()
            self._collected = True
        return [thing for reference in list(self._made.values()) if (thing := reference()) is not None]

    def has_several_optimizers(self) -> bool:
        """Beyond doubt: without any in a cycle that was dropped since the collector came by."""
        if len(optimizers_of(self.alive())) < 2:
            return False
        self._collected = False
        return len(optimizers_of(self.alive())) > 1

    def schedulers_of(self, optimizer: Optimizer) -> list[LRScheduler]:
        """Those that set its learning rate, and their parts."""
        schedulers = (thing for thing in self.alive() if isinstance(thing, LRScheduler))
        return [each for each in schedulers if getattr(each, "optimizer", None) is optimizer]

    def are_trained(self, *, in_any_mode: bool = False) -> bool:
        """Whether a module is in training mode, or in any, that an optimizer trains."""
        made = self.alive()
        trained = _trained_by(optimizers_of(made))
        modules = modules_of(made)
        FsdpModules(modules).reshard()  # an evaluation has left parameters there that no optimizer has
        in_mode = (module for module in modules if module.training or in_any_mode)
        return any(id(p) in trained for module in in_mode for p in module._parameters.values())


def optimizers_of(made: list[Any]) -> list[Optimizer]:
    """Torch's own: what wraps one, as Accelerate's does, has not begun one itself."""
    return [thing for thing in made if isinstance(thing, Optimizer) and "param_groups" in vars(thing)]


def trained_objects(made: list[Any]) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """Model, optimizer, and further objects for a guard by name; made: those alive, in the order of their making.

    The model is the module that has most of what the optimizer trains, the outermost one of it. Modules beside it that
    have parameters or buffers are kept too: a criterion with weights, an average of the model.
    Raises UsageError where there are several optimizers.
    """
    optimizers = optimizers_of(made)
    for optimizer in optimizers:
        check_whole(optimizer, "optimizer")  # one that makes another inside of it would be counted as two
    if len(optimizers) != 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise UsageError(
            f"the script has {len(optimizers)} optimizers ({kinds}), and --adopt knows what an update is with one only",
            hint="make a rollback.Guard of the one whose steps count, and hand it the others by names of their own",
        )
    trained, roots = _trained_by(optimizers), _roots(made)
    shares = [sum(id(p) in trained for p in module.parameters()) for module in roots]
    if not any(shares):
        raise UsageError(
            "the optimizer of the script trains parameters that are in no module",
            hint="make a rollback.Guard, and hand it the object that has them",
        )
    model = roots[shares.index(max(shares))]
    return model, optimizers[0], kept_besides(model, made)


def kept_besides(model: nn.Module, made: list[Any]) -> dict[str, Any]:
    """What else changes with the training of a model, for a guard by name; made: those alive, in their order."""
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others = [
        module for module in _roots(made)
        if module is not model and any(id(t) not in owned for t in (*module.parameters(), *module.buffers()))
    ]  # fmt: skip
    schedulers = [thing for thing in made if isinstance(thing, LRScheduler)]
    parts = {id(part) for scheduler in schedulers for part in getattr(scheduler, "_schedulers", ())}
    schedulers = [scheduler for scheduler in schedulers if id(scheduler) not in parts]
    scalers = [thing for thing in made if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled()]
    averages = _averages_of(model)
    known = [*others, *averages, *optimizers_of(made)]
    named: dict[str, list[Any]] = {
        "scheduler": schedulers, "scaler": scalers, "module": others, "average": averages,
        "copies": [CopiedWeights(held) for held in copies_of_script(model, known, own_variables()).values()],
    }  # fmt: skip
    return {
        name if place == 1 else f"{name}{place}": thing
        for name, things in named.items()
        for place, thing in enumerate(things, 1)
    }


def _averages_of(model: nn.Module) -> list[Any]:
    """Objects that are no modules, have a state that can be loaded, and in it copies of what the model has: the
    EMAModel of diffusers, torch_ema.

    Nothing tells of their making: they are looked for, and found in no order that a later start would find again. So
    they go by their class. Raises UsageError where there are several of one.
    """
    found = [thing for thing in instances(_has_own_state) if hasattr(thing, "__dict__")]
    if not found:
        return []
    copies = ModelCopies(model)
    averages: dict[str, Any] = {}
    for thing in found:
        if any(isinstance(value, list | tuple | dict) and copies.has(value) for value in vars(thing).values()):
            kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
            if averages.setdefault(kind, thing) is not thing:
                raise UsageError(
                    f"the script has several averages of its model that are of class {type(thing).__name__}, and "
                    "--adopt could not tell one from the other when the run goes on",
                    hint="make a rollback.Guard, and hand it each of them by a name of its own",
                )
    return [averages[kind] for kind in sorted(averages)]


def _has_own_state(kind: Any) -> bool:
    has = all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))
    return has and not issubclass(kind, nn.Module | Optimizer | LRScheduler)


def modules_of(made: list[Any]) -> list[nn.Module]:
    """Without those whose `__init__` has not called torch's own."""
    return [thing for thing in made if isinstance(thing, nn.Module) and "_modules" in vars(thing)]


def _roots(made: list[Any]) -> list[nn.Module]:
    """The modules that are part of no other one."""
    modules = modules_of(made)
    inner = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in inner]


def _trained_by(optimizers: list[Optimizer]) -> set[int]:
    return {id(item) for optimizer in optimizers for item in trained_by(optimizer)}


@dataclass(frozen=True)
class GuardParts:
    """As one rank has found them, before the ranks compare. make: collective; returns the guard, and what hands out its
    batches where that is another object."""

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


def guard_parts(loader: Any, made: list[Any], loop: EpochLoop | None = None, *, strict: bool = False) -> GuardParts:
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
    return GuardParts(
        model, optimizer, [f"{name}: {type(thing).__name__}" for name, thing in objects.items()],
        lambda: (Guard(model=model, optimizer=optimizer, loader=loader, **objects), None),
    )  # fmt: skip


def _prepared(loader: Any, made: list[Any]) -> GuardParts:
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
    return GuardParts(prepared[0], optimizers[0].optimizer, kinds, make)


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
