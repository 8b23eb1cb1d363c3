"""What is watched of a script: the objects that it makes, the loaders that it iterates, backward, updates.

All stays as it is for a script that is not adopted, and for what an adoption does not concern. Ranks only; once.
"""

import functools
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from rollback.train.guard import Guard
from rollback.trainers.adopt.adoption import Adoption
from rollback.trainers.adopt.epoch_loop import EpochLoop


def watch(adoption: Adoption) -> None:
    """From now on."""
    for kind in (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader, EpochLoop):
        _note_instances(kind, adoption.made.note)
    _replace(DataLoader, "__iter__", adoption.iterate)
    _replace(Optimizer, "load_state_dict", adoption.load)
    _replace(torch.autograd, "backward", adoption.backward)
    _replace(torch.amp.GradScaler, "scale", adoption.losses.scale)
    _replace(Guard, "__init__", adoption.script_makes_guard)
    _replace(torch.distributed, "destroy_process_group", adoption.leave_group)
    register_optimizer_step_pre_hook(lambda optimizer, *_: adoption.before_update(optimizer))
    sys.meta_path.insert(0, _WhenImported(adoption))


_FABRIC, _FITS = {"_FabricDataLoader.__iter__": "iterate_counted"}, {"Trainer.fit": "library_trains"}
_LIBRARIES: dict[str, dict[str, str]] = {
    "accelerate.data_loader": {
        "DataLoaderShard.__iter__": "iterate_prepared", "DataLoaderDispatcher.__iter__": "iterate_prepared",
        "skip_first_batches": "own_resume.shorten",
    },
    "lightning.fabric.wrappers": _FABRIC, "lightning_fabric.wrappers": _FABRIC,
    "lightning.pytorch.trainer.trainer": _FITS, "pytorch_lightning.trainer.trainer": _FITS,
    "torchdata.stateful_dataloader.stateful_dataloader": {"StatefulDataLoader.__iter__": "iterate"},
    "transformers.trainer": {"Trainer.train": "library_trains"},
}  # fmt: skip
"""By their modules: what is watched of each once it is imported, and by what of the adoption. A StatefulDataLoader
overrides a DataLoader whole."""


def watch_library(adoption: Adoption, name: str, module: Any) -> None:
    """The module of that name is imported."""
    for what, by in _LIBRARIES[name].items():
        name_of_owner, _, attribute = what.rpartition(".")
        owner = getattr(module, name_of_owner) if name_of_owner else module
        if attribute != "__iter__" or attribute in vars(owner):  # one that is inherited is a DataLoader's, as above
            _replace(owner, attribute, attrgetter(by)(adoption))


def _replace(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """`instead` is called in place of owner.name, with what that was before the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*given: Any, **others: Any) -> Any:
        return instead(original, *given, **others)

    setattr(owner, name, watched)


def _note_instances(kind: Any, note: Callable[[Any], None]) -> None:
    """Tell of each object of a class when it is made, whatever its constructor does; also of copies."""

    def __new__(cls: type, *given: Any, **others: Any) -> Any:
        make = super(kind, cls).__new__
        made = object.__new__(cls) if make is object.__new__ else make(cls, *given, **others)
        note(made)
        return made

    kind.__new__ = __new__


class _WhenImported:
    """Watches `_LIBRARIES`, and imports nothing itself."""

    def __init__(self, adoption: Adoption) -> None:
        self._adoption = adoption

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _LIBRARIES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        found = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        if found is None or found.loader is None:
            return None
        run = found.loader.exec_module

        def run_and_act(module: Any) -> None:
            run(module)
            watch_library(self._adoption, name, module)

        found.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return found
