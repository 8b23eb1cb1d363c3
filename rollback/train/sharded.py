"""Sharded tensors (DTensor): this rank's part of one, and one made again around a part.

A checkpoint keeps each rank's part as it lies; nothing is gathered. FSDP2 (`fully_shard`), HSDP and tensor parallelism
all hold their parameters in DTensors; which part a rank has is theirs to say.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rollback.checkpoints.format.parts import Box, Part, whole
from rollback.errors import UsageError
from rollback.facts.fact import Sharding


def is_sharded(item: object) -> bool:
    """Whether it is a DTensor. Who has none has not imported what makes them."""
    if type(item) is Tensor or type(item) is nn.Parameter:
        return False  # this is asked of each tensor in each step
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(item, module.DTensor)


def local_of(item: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in its own memory; any other tensor as it is."""
    return item._local_tensor if is_sharded(item) else item  # type: ignore[attr-defined]


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
    part, local = _part(tuple(item.shape), item.device_mesh, item.placements), item._local_tensor
    if not local.numel() and not part.box.size:  # torch does not say alike of which shape nothing is
        part = Part(part.shape, Box(part.box.at, tuple(local.shape)))
    if type(local) not in (Tensor, nn.Parameter) or part.box.shape != tuple(local.shape):
        raise UsageError(
            f"this rank's part of the DTensor {name!r} is a {type(local).__name__} of {list(local.shape)}; with its "
            f"placements {item.placements} it would be a Tensor of {list(part.box.shape)}",
            hint="the guard keeps what torch's own fully_shard and parallelize_module have sharded",
        )
    return part


@lru_cache(maxsize=4096)  # torch takes a tenth of a millisecond for each tensor, and layers are alike
def _part(of: tuple[int, ...], mesh: Any, placements: Any) -> Part:
    compute = sys.modules["torch.distributed.tensor"]._utils.compute_local_shape_and_global_offset
    shape, at = compute(of, mesh, placements)
    # A rank without a part has an offset behind the end.
    return Part(of, Box(tuple(map(min, at, of)), tuple(shape)))


def sharded_like(local: Tensor, model: Any) -> Tensor:
    """A DTensor of this part, sharded as `model` is."""
    made: Tensor = type(model).from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )
    return made


def like_of(model: Any, shape: tuple[int, ...]) -> Tensor:
    """`model` itself where it has this shape. Else a stand-in without memory, for what an optimizer keeps for each row
    of a parameter: sharded as the parameter is, along the sides that both have alike, and on each rank along others."""
    if (of := tuple(model.shape)) == shape:
        return model  # type: ignore[no-any-return]
    item = local_of(model).detach().new_empty(())
    if not is_sharded(model):
        return item.expand(shape)
    whole_here = sys.modules["torch.distributed.tensor"].Replicate()
    sides = (getattr(placement, "dim", None) for placement in model.placements)
    placements = tuple(
        placement if side is None or shape[side : side + 1] == of[side : side + 1] else whole_here
        for side, placement in zip(sides, model.placements, strict=True)
    )
    here = _part(shape, model.device_mesh, placements).box.shape
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = type(model).from_local(
        item.expand(here), model.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return made


def is_sharded_alike(item: Any, model: Any) -> bool:
    """Whether each rank has the same part of two tensors of one shape, of which `item` is sharded."""
    if not is_sharded(model) or item.device_mesh != model.device_mesh:
        return False
    each = zip(item.placements, model.placements, model.device_mesh.shape, strict=True)
    return all(one == other or ranks == 1 for one, other, ranks in each)


def holders_of(item: Any) -> tuple[int, ...]:
    """The ranks of a sharded tensor's mesh that have the same part as this one, this one included, in order. They are
    the same on each of these ranks."""
    return _holders(item.device_mesh, tuple(placement.is_replicate() for placement in item.placements))


@lru_cache
def _holders(mesh: Any, replicated: tuple[bool, ...]) -> tuple[int, ...]:
    here = [slice(None) if alike else at for alike, at in zip(replicated, mesh.get_coordinate(), strict=True)]
    return tuple(sorted(mesh.mesh[tuple(here)].reshape(-1).tolist()))


def copies_of(item: Tensor, world_size: int) -> int:
    """How many ranks have the same elements as this one."""
    if not is_sharded(item):
        return world_size
    of_mesh: int = item.device_mesh.size()  # type: ignore[attr-defined]
    return len(holders_of(item)) * (world_size // of_mesh)


def sharding_of(model: nn.Module) -> Sharding | None:
    """How a model is spread over the ranks; None: this rank holds all of it."""
    parameters: list[Any] = list(model.parameters())
    sharded = [p for p in parameters if is_sharded(p) and not all(each.is_replicate() for each in p.placements)]
    if not sharded:
        return None
    meshes = sorted({_in_words(item.device_mesh) for item in sharded})
    return Sharding(parameters=len(parameters), sharded=len(sharded), meshes=tuple(meshes))


def _in_words(mesh: Any) -> str:
    if mesh.mesh_dim_names is None:
        return " x ".join(map(str, mesh.shape)) + " ranks"
    return " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))


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


def version_of(item: Tensor) -> int:
    """A number that grows with each write in place. What torch writes to a sharded tensor, it does not count on the
    part that it is written to."""
    return item._version + item._local_tensor._version if is_sharded(item) else item._version  # type: ignore[attr-defined]


def storage_version(gradient: Tensor) -> tuple[int, int]:
    """A value that changes when a gradient is replaced or written to."""
    if not is_sharded(gradient):
        return gradient.data_ptr(), gradient._version
    return local_of(gradient).data_ptr(), version_of(gradient)


def detached(item: Tensor) -> Tensor:
    """Without its graph; of a sharded tensor, this rank's part."""
    return local_of(item).detach()


class FsdpModules:
    """What FSDP2 keeps beside the parameters of some modules, which it has sharded or not: whole parameters behind a
    forward, and gradients that it has not summed over the ranks yet."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        of_fsdp = sys.modules.get("torch.distributed.fsdp")
        kind = getattr(of_fsdp, "FSDPModule", None)  # who has none has not imported it
        within = {inner for module in modules for inner in module.modules()} if kind is not None else ()
        self._modules: list[Any] = [module for module in within if isinstance(module, kind)]  # type: ignore[arg-type]

    def reshard(self) -> None:
        """Put this rank's parts in their places. Behind a forward without a backward, as of an evaluation, FSDP2 leaves
        other parameters there, than the ones that the optimizer has."""
        for module in self._modules:
            module.reshard()

    def _groups(self) -> Iterator[Any]:
        for module in self._modules:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch had at most one, once
            yield from filter(None, (state._fsdp_param_group,) if groups is None else groups)

    def gradients(self) -> Iterator[tuple[Any, str]]:
        """Objects and their attributes where gradients lie that no parameter of the optimizer has, as those of an
        accumulation with `set_requires_gradient_sync(False)`. The next backward that sums adds them."""
        for group in self._groups():
            for parameter in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 it is the whole one's
                    yield parameter, "unsharded_accumulated_grad"
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    yield whole, "grad"
            yield group, "_partial_reduce_output"  # with `set_requires_all_reduce(False)`

    def layouts(self) -> Iterator[tuple[Any, str]]:
        """Objects and their attributes, dictionaries, that say where in a `_partial_reduce_output` the gradient of each
        parameter lies. They change when a backward reaches other parameters. torch has none before 2.15."""
        name = "_partial_reduce_output_layout"
        return ((group, name) for group in self._groups() if hasattr(group, name))
