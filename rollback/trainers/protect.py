"""`rollback.protect`: finds out whose loop it is given, and hands it to the module that knows that loop."""

from __future__ import annotations

import importlib
from typing import Any

from rollback.errors import RollbackError, UsageError
from rollback.train import attach
from rollback.trainers.versions import require_version

_KNOWN = {
    ("transformers.trainer", "Trainer"): ("huggingface", "transformers", "accelerate"),
    ("accelerate.accelerator", "Accelerator"): ("accelerate", "accelerate"),
    ("lightning.pytorch.trainer.trainer", "Trainer"): ("lightning", "lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer"): ("lightning", "pytorch-lightning"),
    ("torchtitan.trainer", "Trainer"): ("torchtitan", "torchtitan"),
}
"""The class whose loop, or whose objects, a module of this room knows; that module, and the libraries that it stands
on. A subclass is known by what it inherits."""


def protect(*given: Any, **settings: Any) -> Any:
    """Put a guard behind a loop of another library; its script stays as it is.

        rollback.protect(trainer)                       # a Trainer of Hugging Face transformers; before trainer.train()
        rollback.protect(trainer)                       # a Trainer of Lightning; before trainer.fit(...)
        rollback.protect(trainer)                       # a Trainer of torchtitan; before trainer.train()
        model, optimizer, loader, scheduler = rollback.protect(accelerator, model, optimizer, loader, scheduler)

    given: the trainer alone, or an Accelerator and what its `prepare` has returned. Returns the trainer, or the objects
    behind the Accelerator in their order, the loader being one that hands out guarded batches. settings: further
    arguments of `Guard`: its settings, `run`, and objects with a state of their own by a name (`ema=ema`).

    All ranks alike, once for each training. Raises UsageError for what is not known, for a version of the library that
    is not supported, and for what its loop is set to do and a guard cannot go along with; what `Guard` raises besides.
    Nothing has been changed then.
    """
    try:
        module = module_of(given)
        return module.protect(*given, **settings)
    except RollbackError as error:
        attach.refuse(error)


def module_of(given: tuple[Any, ...]) -> Any:
    """The module of this room that knows what is given. Raises UsageError where none does."""
    for kind in type(given[0]).__mro__ if given else ():
        if known := _KNOWN.get((kind.__module__, kind.__qualname__)):
            module, *libraries = known
            for library in libraries:
                require_version(library)
            return importlib.import_module(f"rollback.trainers.{module}")
    what = f"a {type(given[0]).__module__}.{type(given[0]).__qualname__}" if given else "nothing"
    raise UsageError(
        f"rollback.protect got {what}, whose loop it does not know",
        hint="it takes a Trainer of Hugging Face transformers, of Lightning or of torchtitan, or an Accelerator and "
        "what its prepare() returned; in a loop of your own make a rollback.Guard",
    )
