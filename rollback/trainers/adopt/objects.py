"""Which of the objects that a script has made are trained, and which else have a state that changes with training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rollback.errors import UsageError


def trained_objects(made: Sequence[Any]) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    """Model, optimizer, and further objects for a guard by name; made: those alive, in the order of their making.

    The model is the module that has most of what the optimizer trains, the outermost one of it. Modules beside it that
    have parameters or buffers are kept too: a criterion with weights, an average of the model.
    Raises UsageError where there are several optimizers.
    """
    optimizers = [thing for thing in made if isinstance(thing, Optimizer) and hasattr(thing, "param_groups")]
    if len(optimizers) != 1:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        raise UsageError(
            f"the script has {len(optimizers)} optimizers ({kinds}), and --adopt knows what an update is with one only",
            hint="make a rollback.Guard of the one whose steps count, and hand it the others by names of their own",
        )
    optimizer = optimizers[0]
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [thing for thing in made if isinstance(thing, nn.Module) and "_modules" in vars(thing)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    shares = [sum(id(p) in trained for p in module.parameters()) for module in roots]
    if not any(shares):
        raise UsageError(
            "the optimizer of the script trains parameters that are in no module",
            hint="make a rollback.Guard, and hand it the object that has them",
        )
    model = roots[shares.index(max(shares))]
    owned = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    others = [
        module for module in roots
        if module is not model and any(id(t) not in owned for t in (*module.parameters(), *module.buffers()))
    ]  # fmt: skip
    schedulers = [thing for thing in made if isinstance(thing, LRScheduler)]
    parts = {id(part) for scheduler in schedulers for part in getattr(scheduler, "_schedulers", ())}
    schedulers = [scheduler for scheduler in schedulers if id(scheduler) not in parts]
    scalers = [thing for thing in made if isinstance(thing, torch.amp.GradScaler) and thing.is_enabled()]
    named: dict[str, list[Any]] = {"scheduler": schedulers, "scaler": scalers, "module": others}
    objects = {
        name if place == 1 else f"{name}{place}": thing
        for name, things in named.items()
        for place, thing in enumerate(things, 1)
    }
    return model, optimizer, objects


@contextmanager
def gradients_kept(optimizer: Optimizer) -> Iterator[None]:
    """Behind it the gradients are what they were: no checkpoint has them, and a script may not clear them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [None if p.grad is None else p.grad.clone() for p in parameters]
    yield
    for parameter, gradient in zip(parameters, kept, strict=True):
        if gradient is not None and parameter.grad is not None:
            with torch.no_grad():
                parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient
