"""`rollback.protect`: finds out whose loop it is given, and hands it to the module that knows that loop."""

import functools
import importlib.metadata
import re
from typing import Any

from rollback.errors import UsageError
from rollback.trainers.guarded_trainer import refusing

_KNOWN = {
    ("transformers.trainer", "Trainer"): ("huggingface.trainer", "transformers", "accelerate"),
    ("accelerate.accelerator", "Accelerator"): ("accelerate", "accelerate"),
    ("lightning.pytorch.trainer.trainer", "Trainer"): ("lightning.trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer"): ("lightning.trainer", "pytorch-lightning"),
    ("torchtitan.trainer", "Trainer"): ("torchtitan.trainer", "torchtitan"),
}
"""The class whose loop, or whose objects, a module of this room knows; that module, and the libraries that it stands
on. A subclass is known by what it inherits."""
SUPPORTED = {
    "transformers": ("5.3", "6"), "accelerate": ("1.3", "2"), "lightning": ("2.6", "3"),
    "pytorch-lightning": ("2.6", "3"), "torchtitan": ("0.3", "0.4"),
}  # fmt: skip
"""From the first of the two on, and below the second. transformers has `_run_epoch` since 5.3, and cannot do without
what accelerate has since 1.3."""


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
    with refusing():
        return module_of(given).protect(*given, **settings)


def protect_once(trainer: Any, entry: str) -> Any:
    """What trains under guard, in the place of the Trainer's `train` or `fit`. Raises as `protect` does.

    If the script calls `entry` again behind that training, it finds its Trainer as if it had never been protected.
    Nothing is taken out before, since what the script saves behind its training is still noted. A training that was
    broken off is still under guard, which refuses a second one."""
    guarded = getattr(protect(trainer), entry)

    @functools.wraps(guarded)
    def train_again(*given: Any, **others: Any) -> Any:
        guard = getattr(guarded.__self__, "guard", None)
        if guard is None or not guard.finished:
            return guarded(*given, **others)
        guarded.__self__.uninstall()
        return getattr(trainer, entry)(*given, **others)

    setattr(trainer, entry, train_again)
    return guarded


def module_of(given: tuple[Any, ...]) -> Any:
    """The module of this room that knows what is given. Raises UsageError where none does."""
    for kind in type(given[0]).__mro__ if given else ():
        if known := _KNOWN.get((kind.__module__, kind.__qualname__)):
            module, *libraries = known
            for library in libraries:
                _require_version(library)
            return importlib.import_module(f"rollback.trainers.{module}")
    what = f"a {type(given[0]).__module__}.{type(given[0]).__qualname__}" if given else "nothing"
    raise UsageError(
        f"rollback.protect got {what}, whose loop it does not know",
        hint="it takes a Trainer of Hugging Face transformers, of Lightning or of torchtitan, or an Accelerator and "
        "what its prepare() returned; in a loop of your own make a rollback.Guard",
    )


def _require_version(library: str) -> None:
    """Raises UsageError, with both numbers, where the installed version is not one that is supported."""
    first, below = SUPPORTED[library]
    try:
        installed = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        installed = "none: it runs from a source tree of an unknown version"
    if not _numbers(first) <= _numbers(installed) < _numbers(below):
        raise UsageError(
            f"rollback.protect knows the loop of {library} {first} and later, below {below}; installed is {installed}",
            hint=f"pip install '{library}>={first},<{below}'",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that it begins with: those of a version before its release are the release's own."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
