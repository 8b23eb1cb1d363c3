"""What is watched of a script: the objects that it makes, the loaders that it iterates, backward, clipping, updates.

All stays as it is for a script that is not adopted, and for what an adoption does not concern. Ranks only; once.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from rollback.train.guard import Guard
from rollback.trainers.adopt.adoption import Adoption


def watch(adoption: Adoption) -> None:
    """From now on."""
    for kind in (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler, DataLoader):
        _note_instances(kind, adoption.made.note)
    _replace(DataLoader, "__iter__", adoption.iterate)
    _replace(Optimizer, "load_state_dict", adoption.load)
    _replace(torch.autograd, "backward", adoption.backward)
    _replace(torch.amp.GradScaler, "scale", adoption.losses.scale)
    for module in (nn.utils, nn.utils.clip_grad):
        _replace(module, "clip_grad_norm_", adoption.clip)
    _replace(Guard, "__init__", adoption.script_makes_guard)
    _replace(torch.distributed, "destroy_process_group", adoption.leave_group)
    register_optimizer_step_pre_hook(lambda optimizer, *_: adoption.before_update(optimizer))
    sys.meta_path.insert(0, _WhenImported(adoption))


def _watch_accelerate(adoption: Adoption, module: Any) -> None:
    for kind in (module.DataLoaderShard, module.DataLoaderDispatcher):
        if "__iter__" in vars(kind):
            _replace(kind, "__iter__", adoption.iterate_prepared)
    _replace(module, "skip_first_batches", adoption.own_resume.shorten)


def watch_fabric(adoption: Adoption, module: Any) -> None:
    _replace(module._FabricDataLoader, "__iter__", adoption.iterate_counted)


def _watch_torchdata(adoption: Adoption, module: Any) -> None:
    _replace(module.StatefulDataLoader, "__iter__", adoption.iterate)  # a DataLoader that overrides it whole


def _watch_trainer(entry: str, adoption: Adoption, module: Any) -> None:
    _replace(module.Trainer, entry, adoption.library_trains)


_LIBRARIES: dict[str, Callable[[Adoption, Any], None]] = {
    "accelerate.data_loader": _watch_accelerate,
    **dict.fromkeys(("lightning.fabric.wrappers", "lightning_fabric.wrappers"), watch_fabric),
    "torchdata.stateful_dataloader.stateful_dataloader": _watch_torchdata,
    "transformers.trainer": functools.partial(_watch_trainer, "train"),
    "lightning.pytorch.trainer.trainer": functools.partial(_watch_trainer, "fit"),
    "pytorch_lightning.trainer.trainer": functools.partial(_watch_trainer, "fit"),
}
"""By their modules: what is watched of each once it is imported."""


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
        if (watch_module := _LIBRARIES.get(name)) is None:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        found = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        if found is None or found.loader is None:
            return None
        run = found.loader.exec_module

        def run_and_act(module: Any) -> None:
            run(module)
            watch_module(self._adoption, module)

        found.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return found
