"""An order gives what torch's own samplers give, from any offset, and leaves every generator as they leave it."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from rollback.train.data import rng
from rollback.train.data.cursor.order import _Iterated, _Sliced, order_of

lengths = st.integers(1, 40)


@st.composite
def sliced_samplers(draw: Any) -> Callable[[], Sampler[int]]:
    """Makes, on each call, a fresh sampler of the kinds that have a fast path."""
    length, seed = draw(lengths), draw(st.integers(0, 5))
    kind = draw(st.sampled_from(["sequential", "random", "random with generator", "distributed"]))
    if kind == "sequential":
        return lambda: SequentialSampler(range(length))
    if kind == "random":
        return lambda: RandomSampler(range(length))
    if kind == "random with generator":
        return lambda: RandomSampler(range(length), generator=torch.Generator().manual_seed(seed))
    replicas = draw(st.integers(1, 7))
    rank, epoch = draw(st.integers(0, replicas - 1)), draw(st.integers(0, 3))
    # Dropping the tail of fewer samples than ranks leaves torch's sampler with a negative length.
    shuffle, drop_last = draw(st.booleans()), draw(st.booleans()) and length >= replicas

    def distributed() -> Sampler[int]:
        sampler: DistributedSampler[int] = DistributedSampler(
            range(length),
            replicas,
            rank,
            shuffle,
            seed,
            drop_last,  # type: ignore[arg-type]
        )
        sampler.set_epoch(epoch)
        return sampler

    return distributed


def take_all(order: Any) -> Iterator[Any]:
    while True:
        try:
            yield order.take()
        except StopIteration:
            return


@settings(max_examples=400, deadline=None)
@given(sliced_samplers(), st.integers(1, 12) | st.none(), st.booleans(), st.integers(0, 50))
def test_a_sliced_order_is_exactly_the_sampler_s_own(
    make: Callable[[], Sampler[int]], batch_size: int | None, drop_last: bool, offset: int
) -> None:
    def index_sampler() -> Any:
        return make() if batch_size is None else BatchSampler(make(), batch_size, drop_last)

    def generator_of(sampler: Any) -> torch.Generator | None:
        return getattr(getattr(sampler, "sampler", sampler), "generator", None)

    torch.manual_seed(1)
    real = index_sampler()
    expected = list(real)
    after = torch.get_rng_state()

    torch.manual_seed(1)
    ours = index_sampler()
    order = order_of(ours, lookahead=1)
    assert isinstance(order, _Sliced)
    order.begin()
    offset = min(offset, max(0, len(expected) - 1))
    order.seek(offset)
    assert list(take_all(order)) == expected[offset:]
    assert torch.equal(torch.get_rng_state(), after)
    if (generator := generator_of(real)) is not None:
        assert torch.equal(generator_of(ours).get_state(), generator.get_state())  # type: ignore[union-attr]


class Doubled(Sampler[int]):
    """Draws from the global states of Python and torch for every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(30):
            yield random.randrange(100) + 100 * int(torch.randint(2, ()))


class LikeRandom(RandomSampler):
    """A subclass may do anything, so its own iteration decides."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 2])


ITERATED: dict[str, Callable[[], Sampler[int]]] = {
    "with replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=70),
    "more than there are": lambda: RandomSampler(range(20), num_samples=50),
    "fewer than there are": lambda: RandomSampler(range(20), num_samples=7),
    "subset": lambda: SubsetRandomSampler(range(3, 20)),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.5, 0.4], 25),
    "subclass": lambda: LikeRandom(range(3)),
}


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("lookahead", [1, 4])
def test_any_other_sampler_is_run_and_leaves_the_same_random_states(name: str, lookahead: int) -> None:
    torch.manual_seed(2)
    expected = list(BatchSampler(ITERATED[name](), 3, False))
    after = torch.get_rng_state()
    for offset in range(len(expected)):
        torch.manual_seed(2)
        order = order_of(BatchSampler(ITERATED[name](), 3, False), lookahead)
        assert isinstance(order, _Iterated)
        order.begin()
        order.seek(offset)
        assert list(take_all(order)) == expected[offset:]
        assert torch.equal(torch.get_rng_state(), after)


def test_a_sampler_that_draws_as_it_goes_is_not_moved_by_what_the_model_draws() -> None:
    def order_with(between: Callable[[], object]) -> list[Any]:
        torch.manual_seed(2)
        random.seed(2)
        order = order_of(BatchSampler(Doubled(), 3, False), lookahead=2)
        order.begin()
        taken = []
        for batch in take_all(order):
            taken.append(batch)
            between()
        return taken

    assert order_with(lambda: None) == order_with(lambda: (torch.rand(5), random.random()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_the_samplers_of_accelerate_are_asked_without_a_swap_of_random_states(
    ranks: int, generator: torch.Generator | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")

    def index_sampler() -> Any:
        sampler = data_loader.SeedableRandomSampler(range(50), generator=generator, data_seed=3)
        batching = BatchSampler(sampler, 3, False)
        return batching if ranks == 1 else data_loader.BatchSamplerShard(batching, ranks, ranks - 1)

    expected, before = list(index_sampler()), torch.get_rng_state()
    order = order_of(index_sampler(), lookahead=1)
    order.begin()
    monkeypatch.setattr(rng.RandomStream, "__enter__", lambda _: pytest.fail("the random states were swapped"))
    taken = []
    for batch in take_all(order):
        taken.append(batch)
        torch.rand(5)  # as the model may
    assert taken == expected
    torch.set_rng_state(before)


def test_a_sampler_that_shares_the_generator_of_the_process_has_its_own_stream() -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    sampler = RandomSampler(range(20), replacement=True, num_samples=70, generator=torch.default_generator)
    order = order_of(data_loader.BatchSamplerShard(BatchSampler(sampler, 3, False)), lookahead=1)
    order.begin()
    before = torch.get_rng_state()
    list(take_all(order))
    assert torch.equal(torch.get_rng_state(), before)


def test_going_past_the_end_is_the_end() -> None:
    for sampler in (SequentialSampler(range(10)), SubsetRandomSampler(range(10))):
        order = order_of(BatchSampler(sampler, 3, False), lookahead=2)
        order.begin()
        order.seek(9)
        with pytest.raises(StopIteration):
            order.take()
