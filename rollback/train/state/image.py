"""The image of a training state: two trees and the tensors that they refer to, by name.

`shared` is the same on all ranks and is stored once: parameters, optimizer, the other objects, the sentinel, the
counters. `local` differs between ranks, and each rank stores its own: random states, cursor, kept values, and the
buffers of all modules, which its own forwards write to. Of a sharded tensor, in `shared`, each rank stores its part.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from rollback.checkpoints.format.parts import Part
from rollback.errors import UsageError
from rollback.train.sharded import detached, is_sharded, part_of
from rollback.train.state.tree import Json

PARAMETERS = "shared/model/"
STILL = (PARAMETERS, "shared/optimizer/state/")
"""What changes in an optimizer's step and nowhere else."""
LOCAL = "local/"
"""What each rank stores for itself."""
BUFFERS = ("local/buffers/", "local/nonpersistent_buffers/")
IN_PLACE = (*STILL, *BUFFERS)
"""What a restore writes into the tensors that are there."""


@dataclass(frozen=True)
class Image:
    """A state as two JSON trees and the tensors that they refer to: the live tensors, no copies."""

    shared: Json
    local: Json
    shared_tensors: dict[str, Tensor]
    local_tensors: dict[str, Tensor]
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Where this rank's part of each sharded tensor lies in the whole. The parts are among `local_tensors`."""
    sharded: Mapping[str, Tensor] = field(default_factory=dict)
    """The sharded tensors."""
    frozen: frozenset[str] = frozenset()
    """Names of `shared_tensors` that nothing trains, as far as torch can tell: see `TrainingState._frozen_memory`."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Of the objects beside model and optimizer, by name."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.shared_tensors.values(), *self.local_tensors.values())


def require_one_gpu(tensors: Iterable[Tensor]) -> None:
    """Raise UsageError where what a process keeps lies on several GPUs: copies are made on a stream of one device."""
    on_gpus = sorted({str(item.device) for item in tensors if item.device.type == "cuda"})
    if len(on_gpus) > 1:
        raise UsageError(
            f"what the guard keeps lies on {len(on_gpus)} GPUs of this process: {', '.join(on_gpus)}",
            hint="a rank trains on one GPU: put what is handed over there, or leave out what never changes; a model "
            "that is larger is sharded over ranks with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def take_parts(shared: dict[str, Tensor], local: dict[str, Tensor]) -> tuple[dict[str, Part], dict[str, Tensor]]:
    """Of the sharded tensors among `shared`, put this rank's parts into `local` instead, and say where they lie. And
    the sharded tensors."""
    for name in filter(lambda name: is_sharded(local[name]), local):
        raise UsageError(
            f"the tensor {name!r} is a DTensor, and each rank keeps its own: parts of it would be lost",
            hint="make it a parameter, or a plain tensor",
        )
    sharded = {name: item for name, item in shared.items() if is_sharded(item)}
    for name, item in sharded.items():
        local[name] = detached(item)
        del shared[name]
    return {name: part_of(item, name) for name, item in sharded.items()}, sharded


def tensor_in_words(name: str, trained: Sequence[str | None], classes: Mapping[str, str]) -> str:
    """A tensor of an image in words, by its name there. trained: `TrainingState.trained_names`. classes: the image's;
    the names of objects may be others' than the script's, as --adopt gives them."""
    match name.split("/"):
        case ["shared", "model", *path]:
            return f"the parameter {'/'.join(path)!r}"
        case ["shared", "optimizer", "state", index, *path] if index.isdecimal() and int(index) < len(trained):
            return f"the optimizer's {'/'.join(path)!r} of {trained[int(index)] or '?'!r}"
        case ["local", "buffers", *path] | ["local", "nonpersistent_buffers", "model", *path]:
            return f"the buffer {'/'.join(path)!r}"
        case [_, "objects" | "object_buffers" | "nonpersistent_buffers", owner, *path] if owner in classes:
            return f"the tensor {'.'.join(path)!r} of the {classes[owner]} that is kept as {owner!r}"
        case [_, _, *path]:
            return f"the tensor {'.'.join(path)!r}"
    return repr(name)
