"""What lies around a model: DistributedDataParallel, torch.compile, either of them around the other."""

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollback.train.sharded import refuse_unsupported

_is_due = attrgetter("require_forward_param_sync")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside. A checkpoint uses its names. Raises UsageError for a kind of sharding that is not kept."""
    *_, inner = _from_outside(model)
    refuse_unsupported(inner)
    return inner


def ddp_inside(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module, also inside torch.compile."""
    return next((each for each in _from_outside(model) if isinstance(each, DistributedDataParallel)), None)


def outermost(model: nn.Module, modules: Iterable[nn.Module]) -> nn.Module:
    """All that lies around a model, of `modules`; the model itself where nothing does."""
    chains = [list(_from_outside(module)) for module in modules]
    around = [chain for chain in chains if any(inner is model for inner in chain)]
    return max(around, key=len, default=[model])[0]


def _from_outside(model: nn.Module) -> Iterator[nn.Module]:
    inner: Any = model
    while isinstance(inner, nn.Module):
        yield inner
        inner = inner.module if isinstance(inner, DistributedDataParallel) else getattr(inner, "_orig_mod", None)


class Broadcasts:
    """Whether the next forward begins with rank 0's buffers on all ranks, of all DDP in these objects, which are as the
    script calls them. Nothing here is collective.

    DDP broadcasts them in a forward, but not behind a forward without gradients, as of an evaluation, or inside of
    `no_sync`. So what a rank's buffers become depends on the forward before a checkpoint. A new process has not run
    that one, and a rollback has run others since.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        found = {
            owner: [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
            for owner, module in objects.items() if isinstance(module, nn.Module)
        }  # fmt: skip
        self._wrappers = {owner: wrappers for owner, wrappers in found.items() if wrappers}

    @property
    def of_model(self) -> bool:
        """Whether a DDP is around the model, or in it."""
        return "model" in self._wrappers

    def told(self) -> dict[str, list[bool]]:
        """For a checkpoint: by module, whether the next forward of each DDP in it begins so."""
        told = {}
        for owner, wrappers in self._wrappers.items():
            told[owner] = [*map(_is_due, wrappers)]
        return told

    def put_back(self, told: Mapping[str, list[bool]]) -> None:
        """Make it so again, where the script wraps its modules as it did then."""
        for owner, wrappers in self._wrappers.items():
            if len(due := told.get(owner, ())) == len(wrappers):
                for part, is_due in zip(wrappers, due, strict=True):
                    part.require_forward_param_sync = is_due
