"""Models that are sharded over one rank: DTensors, with all that FSDP2 does to them, in the test's own process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fully_sharded(model: nn.Module) -> nn.Module:
    """The model, its layers each for itself."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model
