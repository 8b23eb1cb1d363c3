"""The copy of a snapshot on a device: what the training waits for, and what it does not. Skipped without a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_devices import NEEDS_GPU
from torch import Tensor

from rollback.checkpoints.format.layout import lay_out
from rollback.system.region import Region
from rollback.train.snapshots.capture import Capture, RankShare, view
from rollback.train.snapshots.copy_stream import on_host, pin

pytestmark = NEEDS_GPU
STILL, RESTLESS = "shared/model/weight", "local/buffers/mean"


@pytest.fixture
def regions() -> Iterator[list[Region]]:
    made: list[Region] = []
    yield made
    for region in made:
        region.close()


def begun(tensors: dict[str, Tensor], regions: list[Region]) -> tuple[Capture, Any]:
    """A capture of these, and what reads one of its copies."""
    share = RankShare(tensors, {}, {"local": "{}"})
    layout = lay_out(share.kinds(), 4096)
    regions.append(region := Region(layout.size))
    region.populate()
    assert pin(region, next(iter(tensors.values())).device)
    capture = Capture(share, layout, region, "overlapped")
    torch.cuda.synchronize()
    capture.start()
    return capture, lambda name: view(region, layout.entries[name])


def test_the_training_waits_for_what_it_may_change_and_for_nothing_else(regions: list[Region]) -> None:
    """A gigabyte takes the link 20 ms; most models have a buffer."""
    small = {STILL: torch.ones(8, device="cuda"), RESTLESS: torch.ones(8, device="cuda")}
    begun(small, regions)[0].finish()  # a driver does at the first time what later would be waited for
    large = {STILL: torch.ones(1 << 28, device="cuda"), RESTLESS: torch.ones(8, device="cuda")}
    capture, copied = begun(large, regions)
    large[RESTLESS].zero_()
    torch.cuda.current_stream().synchronize()
    assert not capture._arrived.query(), "the training has waited for all of it"
    capture.finish()
    assert torch.equal(copied(RESTLESS), torch.ones(8))
    assert torch.equal(copied(STILL), torch.ones(1 << 28))


def test_what_is_conjugated_lazily_is_copied_as_it_is(regions: list[Region]) -> None:
    for item in (
        torch.randn(1 << 20, dtype=torch.complex64, device="cuda").conj(),
        torch.zeros(8, device="cuda")._neg_view(),
    ):
        capture, copied = begun({RESTLESS: item}, regions)
        capture.finish()
        assert torch.equal(copied(RESTLESS), item.cpu().resolve_conj().resolve_neg())
        assert torch.equal(on_host(item), item.cpu().resolve_conj().resolve_neg())
