"""On which device the ranks' few blocking collectives are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollback.train.comm.ranks import Ranks


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A group of one rank, in a thread that has chosen the first GPU: as torch does where nobody calls set_device."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("bound", "backend", "expected"),
    [
        (None, "gloo", "cpu"),
        (None, "nccl", "cuda:0"),
        ("cuda:3", "nccl", "cuda:3"),
        ("cuda:3", "gloo", "cpu"),
    ],
)
def test_over_nccl_they_are_on_the_gpu_to_which_the_group_is_bound(
    group: Any, bound: str | None, backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another one all ranks would meet on the first GPU, which NCCL refuses."""
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    group.bound_device_id = torch.device(bound) if bound is not None else None
    try:
        assert Ranks().device == torch.device(expected)
    finally:
        group.bound_device_id = None


def test_what_each_rank_tells_is_brought_to_the_host_twice_however_many_ranks_there_are(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time a GPU is waited for. The lengths first, then all texts."""
    ranks, waits = Ranks(), []
    ranks.world_size = 3

    def gather(to: list[torch.Tensor], mine: torch.Tensor) -> None:
        for place in to:
            place.copy_(mine)

    def refuse(_: torch.Tensor) -> None:
        raise AssertionError("one number is waited for")

    cpu = torch.Tensor.cpu
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda item: waits.append(item) or cpu(item))
    monkeypatch.setattr(torch.Tensor, "item", refuse)
    assert ranks.from_each(["é", 1]) == [["é", 1]] * 3
    assert len(waits) == 2
