"""Sharded tensors of a checkpoint that no live object has yet, as an average of the weights that begins later than the
guard: how they are sharded follows from the parameters, or the restore is refused."""

from collections.abc import Sequence

from torch import Tensor

from rollback.checkpoints.format.parts import Part
from rollback.errors import StateRefused
from rollback.train.sharded import is_sharded, part_of
from rollback.train.state.image import tensor_in_words
from rollback.train.state.state import TrainingState


def like_parameters(
    key: str, shape: tuple[int, ...], state: TrainingState, stored: Sequence[Part] | None = None
) -> Tensor:
    """What the tensor of this name and shape is like: the parameters of its shape. stored: its parts, where as many
    ranks as now have stored them. Raises StateRefused where there is none, where some are sharded in another way, or
    where no rank has stored the part that this one would have."""
    alike = [item for item in state.parameters if tuple(item.shape) == shape]
    ways = {(item.device_mesh, item.placements) if is_sharded(item) else None for item in alike}  # type: ignore[attr-defined]
    known = len(ways) == 1
    if known and stored is not None and is_sharded(alike[0]):
        known = part_of(alike[0], key) in stored
    if not known:
        raise StateRefused(
            f"the checkpoint has {tensor_in_words(key, state.trained_names(), state.classes)}, a sharded one, and this "
            "job has no such tensor yet: it seems to be made later than the guard, and how it is sharded cannot be "
            "told from the parameters",
            hint="make it before the guard is made; then the same command goes on",
        )
    return alike[0]
