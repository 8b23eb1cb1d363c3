"""What lies around a model: DistributedDataParallel, torch.compile, either of them around the other."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollback.train.sharded import refuse_unsupported


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside. A checkpoint uses its names. Raises UsageError for a kind of sharding that is not kept."""
    *_, inner = _from_outside(model)
    refuse_unsupported(inner)
    return inner


def ddp_inside(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP module, also inside torch.compile."""
    return next((each for each in _from_outside(model) if isinstance(each, DistributedDataParallel)), None)


def replicas_in(module: nn.Module) -> list[DistributedDataParallel]:
    """All DDP modules: around it, and around parts of it."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]


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
