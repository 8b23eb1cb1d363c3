"""Sharded tensors (DTensor): this rank's part of one, and one made again around a part.

A checkpoint keeps each rank's part as it lies; nothing is gathered. FSDP2 (`fully_shard`), HSDP and tensor parallelism
all hold their parameters in DTensors; which part a rank has is theirs to say.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from rollback.checkpoints.parts import Box, Part, whole
from rollback.errors import UsageError


def is_sharded(item: object) -> bool:
    """Whether it is a DTensor. Who has none has not imported what makes them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(item, module.DTensor)


def local_of(item: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in its own memory; any other tensor as it is."""
    return item._local_tensor if is_sharded(item) else item  # type: ignore[attr-defined]


def whole_of(item: Tensor) -> Tensor:
    """All of a sharded tensor. Collective where it is one; any other tensor as it is."""
    return item.full_tensor() if is_sharded(item) else item  # type: ignore[attr-defined]


def part_of(item: Any, name: str) -> Part:
    """Where this rank's part of the tensor `name` lies in the whole, which it is where that is not sharded. Raises
    UsageError where it is not one box of it."""
    if not is_sharded(item):
        return whole(tuple(item.shape))
    if any(placement.is_partial() for placement in item.placements):
        raise UsageError(
            f"the tensor {name!r} is a DTensor whose parts are summands ({item.placements}), not parts of it",
            hint="redistribute it to Shard or Replicate placements before the guard is made",
        )
    compute = sys.modules["torch.distributed.tensor"]._utils.compute_local_shape_and_global_offset
    shape, at = compute(tuple(item.shape), item.device_mesh, item.placements)
    local = item._local_tensor
    if type(local) not in (Tensor, nn.Parameter) or tuple(shape) != tuple(local.shape):
        raise UsageError(
            f"this rank's part of the DTensor {name!r} is a {type(local).__name__} of {list(local.shape)}; with its "
            f"placements {item.placements} it would be a Tensor of {list(shape)}",
            hint="the guard keeps what torch's own fully_shard and parallelize_module have sharded",
        )
    # A rank without a part has an offset behind the end.
    return Part(tuple(item.shape), Box(tuple(map(min, at, item.shape)), tuple(shape)))


def sharded_like(local: Tensor, model: Any) -> Tensor:
    """A DTensor of this part, sharded as `model` is."""
    made: Tensor = type(model).from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
    return made


def copies_of(item: Tensor, world_size: int) -> int:
    """How many ranks have the same elements as this one."""
    if not is_sharded(item):
        return world_size
    mesh: Any = item.device_mesh  # type: ignore[attr-defined]
    count: int = world_size // mesh.size()
    for dimension, placement in enumerate(item.placements):  # type: ignore[attr-defined]
        count *= mesh.size(dimension) if placement.is_replicate() else 1
    return count


def refuse_unsupported(model: nn.Module) -> None:
    """Raises UsageError for kinds of sharding whose parts are not DTensors."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}  # by names, so that nothing is imported for it
        where = f"its module {name!r}" if name else "all of it"
        if "FullyShardedDataParallel" in kinds:
            raise UsageError(
                f"the model is sharded by FSDP1 ({where}), whose flat parameters the guard does not keep",
                hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2), which has the same options",
            )
        if kinds & {"DeepSpeedEngine", "PipelineEngine"}:
            raise UsageError(
                f"the model is an engine of DeepSpeed ({where}), which keeps its parameters and optimizer to itself",
                hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2), or keep DeepSpeed's own checkpoints",
            )


def detached(item: Tensor) -> Tensor:
    """Without its graph; of a sharded tensor, this rank's part."""
    return local_of(item).detach()
