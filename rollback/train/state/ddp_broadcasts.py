"""Whether DDP gives all ranks rank 0's buffers in the next forward, as a checkpoint keeps it."""

from collections.abc import Mapping
from itertools import chain
from operator import attrgetter

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollback.train.updates.wrappers import replicas_in

_is_due = attrgetter("require_forward_param_sync")


class DdpBroadcasts:
    """Whether the next forward begins with rank 0's buffers on all ranks, of all DDP in these objects, which are as the
    script calls them. Nothing here is collective.

    DDP broadcasts them in a forward, but not behind a forward without gradients, as of an evaluation, or inside of
    `no_sync`. So what a rank's buffers become depends on the forward before a checkpoint. A new process has not run
    that one, and a rollback has run others since.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        found = {
            owner: replicas_in(module)
            for owner, module in objects.items() if isinstance(module, nn.Module)
        }  # fmt: skip
        self._wrappers = {owner: wrappers for owner, wrappers in found.items() if wrappers}

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """All of them."""
        return [*chain.from_iterable(self._wrappers.values())]

    @property
    def of_model(self) -> bool:
        """Whether a DDP is around the model, or in it."""
        return "model" in self._wrappers

    def state_dict(self) -> dict[str, list[bool]]:
        """For a checkpoint: by module, whether the next forward of each DDP in it begins so."""
        if not self._wrappers:
            return {}
        return {owner: [*map(_is_due, wrappers)] for owner, wrappers in self._wrappers.items()}

    def put_back(self, told: Mapping[str, list[bool]]) -> None:
        """Make it so again, where the script wraps its modules as it did then."""
        for owner, wrappers in self._wrappers.items():
            if len(due := told.get(owner, ())) == len(wrappers):
                for part, is_due in zip(wrappers, due, strict=True):
                    part.require_forward_param_sync = is_due
