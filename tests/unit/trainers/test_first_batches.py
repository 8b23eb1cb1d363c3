"""A loader of which each epoch has its first batches only."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from rollback.trainers.first_batches import first_batches


@pytest.mark.parametrize("batch_size", [3, None])
def test_its_epochs_begin_as_those_of_the_whole_loader(batch_size: int | None) -> None:
    data = torch.arange(20)
    loader = DataLoader(data, batch_size, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    whole = [[batch.tolist() for batch in islice(loader, 4)] for _ in range(2)]
    loader.sampler.generator.manual_seed(1)  # type: ignore[attr-defined]
    shortened = first_batches(loader, 4)
    torch.manual_seed(3)
    assert [[batch.tolist() for batch in shortened] for _ in range(2)] == whole
    assert (len(shortened), len(loader)) == (4, 20 if batch_size is None else 7)


def test_a_loader_that_has_no_more_is_left_alone() -> None:
    loader = DataLoader(torch.arange(4))
    assert first_batches(loader, 4) is loader
