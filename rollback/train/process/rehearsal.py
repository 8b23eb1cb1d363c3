"""Whether the first step of a resumed process is only a rehearsal, done twice.

DistributedDataParallel cuts its gradient buckets anew after the first backward of every process, by the order in which
gradients came (torch, `Reducer::rebuild_buckets`). With more than two ranks the cut decides in which order an
all-reduce adds up, so the resumed process would round the gradient of its first step otherwise than the undisturbed
run did, which had its new buckets long before. Taking that step, going back and taking it again leaves the buckets as
they were there. With two ranks a sum has one order only, and without the second cut there is nothing to rehearse.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def needs_rehearsal(model: nn.Module, world_size: int, resumed_at: int) -> bool:
    """The same on all ranks. At step 0 the undisturbed run had the first cut as well, so nothing is rehearsed."""
    if resumed_at == 0 or world_size <= 2 or not isinstance(model, DistributedDataParallel):
        return False
    return bool(model.static_graph or not model.find_unused_parameters)
