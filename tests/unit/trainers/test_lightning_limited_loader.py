"""A loader of which each epoch has its first batches only."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from rollback.trainers.lightning.limited_loader import limited_loader


@pytest.mark.parametrize("batch_size", [3, None])
def test_its_epochs_begin_as_those_of_the_whole_loader(batch_size: int | None) -> None:
    data = torch.arange(20)
    loader = DataLoader(data, batch_size, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    whole = [[batch.tolist() for batch in islice(loader, 4)] for _ in range(2)]
    loader.sampler.generator.manual_seed(1)  # type: ignore[attr-defined]
    shortened = limited_loader(loader, 4)
    torch.manual_seed(3)
    assert [[batch.tolist() for batch in shortened] for _ in range(2)] == whole
    assert (len(shortened), len(loader)) == (4, 20 if batch_size is None else 7)


def test_a_loader_that_has_no_more_is_left_alone() -> None:
    loader = DataLoader(torch.arange(4))
    assert limited_loader(loader, 4) is loader


class Counting(Sampler[list[int]]):
    """Says that it has `length` batches, has five, and counts the epochs that it was asked to the end."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.ends = 0

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([index] for index in range(5))
        self.ends += 1

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(("length", "batches"), [(3, 3), (5, 5), (9, 5)])
def test_nobody_asks_behind_the_length_that_a_sampler_says(length: int, batches: int) -> None:
    sampler = Counting(length)
    shortened = limited_loader(DataLoader(torch.arange(5), batch_sampler=sampler), length)
    assert (len(shortened), len(list(shortened)), sampler.ends) == (length, batches, int(length > 5))


def test_a_loader_asks_ahead_for_its_workers() -> None:
    sampler = Counting(4)
    loader = DataLoader(torch.arange(5), batch_sampler=sampler, num_workers=1, prefetch_factor=2)
    assert len(list(limited_loader(loader, 4).batch_sampler)) == 4  # type: ignore[arg-type]
    assert sampler.ends == 1


@pytest.mark.parametrize("length", [6, 7])
def test_a_generator_draws_what_it_draws_where_batches_are_counted(length: int) -> None:
    data = torch.arange(length)
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    counted, loader = (DataLoader(data, 2, shuffle=True, generator=generator) for generator in generators)
    for _ in range(3):
        assert [batch.tolist() for batch in limited_loader(loader, len(loader))] == [
            batch.tolist() for batch in islice(counted, len(counted))
        ]
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
