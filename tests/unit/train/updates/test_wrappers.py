"""What lies around a model."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rollback.errors import UsageError
from rollback.train.updates.wrappers import ddp_inside, unwrap


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_module_inside_is_found_whatever_lies_around_it_and_in_which_order(alone: None) -> None:
    inner = nn.Linear(2, 2)
    assert unwrap(inner) is inner
    assert ddp_inside(inner) is None
    compiled = torch.compile(inner)
    assert unwrap(compiled) is inner
    assert ddp_inside(compiled) is None
    for replicas in (DistributedDataParallel(inner), DistributedDataParallel(compiled)):
        for model in (replicas, torch.compile(replicas)):
            assert unwrap(model) is inner
            assert ddp_inside(model) is replicas


class FullyShardedDataParallel(nn.Module):
    pass


class DeepSpeedEngine(nn.Module):
    """In place of the real one, which is known by its name."""


@pytest.mark.parametrize(
    ("part", "told"),
    [(FullyShardedDataParallel(), r"sharded by FSDP1 \({}\)"), (DeepSpeedEngine(), r"engine of DeepSpeed \({}\)")],
    ids=["FSDP1", "DeepSpeed"],
)
def test_a_model_that_is_sharded_in_ways_that_are_not_kept_is_refused(part: nn.Module, told: str) -> None:
    with pytest.raises(UsageError, match=told.format("all of it")):
        unwrap(part)
    with pytest.raises(UsageError, match=told.format(r"its module '1\.0'")):
        unwrap(nn.Sequential(nn.Linear(1, 1), nn.Sequential(part)))
