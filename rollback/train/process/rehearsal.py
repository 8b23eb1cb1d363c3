"""Rehearsals: the first step of a resumed process may be one that does not count.

All that it changes is put back from the checkpoint.

DistributedDataParallel cuts its gradient buckets again after the first backward of every process, by the order of the
gradients (torch, `Reducer::rebuild_buckets`). With more than two ranks, the order of additions in an all-reduce depends
on this cut. So the first step of a resumed process would round its gradient in another way than the undisturbed run,
which had its final buckets long before. Doing the step, going back and doing it again gives the same buckets. With two
ranks a sum has only one order. Without the second cut no rehearsal is needed.
"""

from torch import nn

from rollback.train.updates.wrappers import ddp_inside


def needs_rehearsal(model: nn.Module, world_size: int, resumed_at: int) -> bool:
    """The same on all ranks. At step 0 the undisturbed run has the first cut too, so there is no rehearsal."""
    ddp = ddp_inside(model)
    if resumed_at == 0 or world_size <= 2 or ddp is None:
        return False
    return bool(ddp.static_graph or not ddp.find_unused_parameters)
