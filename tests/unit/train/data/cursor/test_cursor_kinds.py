"""Loaders that are not map-style: each is gone back in by what it has, or refused before any harm is done."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor import Cursor, cursor_for


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def get_batch() -> Any:
    """As nanoGPT's, with a draw from each library."""
    return torch.randint(1000, (3,)), {"numpy": np.random.rand(2), "python": [random.random()]}


def endless() -> Iterator[Any]:
    while True:
        yield get_batch()


class Shards(IterableDataset[int]):
    """Twelve samples, shuffled with Python's `random` as they are read."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(12))
        while left:
            yield left.pop(random.randrange(len(left)))


class OwnGenerator(IterableDataset[int]):
    """Twelve samples, in an order that each pass draws anew from a generator of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.sample(range(12), 12)


class InOrder(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(14)


class Reader:
    """A streaming reader that keeps its own position."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 7:
            self.position += 1
            yield self.position * 11
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class StatefulSampler(Sampler[int]):
    """As torchdata documents it: draws from a generator of its own, and goes on where it stands."""

    def __init__(self) -> None:
        self.generator, self.given = torch.Generator().manual_seed(3), 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        while self.given < len(self):
            self.given += 1
            yield int(torch.randint(100, (), generator=self.generator))
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.generator.set_state(state["generator"])


def with_stateful_sampler(**settings: Any) -> Any:
    return StatefulDataLoader(range(100), batch_size=3, sampler=StatefulSampler(), **settings)  # type: ignore[arg-type]


def augmenting(**settings: Any) -> Any:
    """torchdata's nodes, of which one draws in this process; with a `ParallelMapper` of these settings."""
    node: Any = nodes.SamplerWrapper(RandomSampler(range(14)))
    if settings:
        node = nodes.ParallelMapper(node, abs, prebatch=2, **settings)
    node = nodes.Mapper(node, lambda item: item + torch.rand(1))
    return nodes.Loader(nodes.Mapper(nodes.Batcher(node, 3), torch.stack))


def prefetched(sampler: Any, draw: Callable[[Any], Any] = torch.tensor) -> Any:
    """torchdata's nodes, of which one draws in a thread."""
    node: Any = nodes.Mapper(nodes.SamplerWrapper(sampler), draw)
    return nodes.Loader(nodes.Prefetcher(nodes.Batcher(node, 3), prefetch_factor=2))


def mixed(stop_criteria: str, sampler: Callable[[range], Any]) -> Any:
    parts = {
        str(first): nodes.SamplerWrapper(sampler(range(first, first + 7))) for first in (0, 100)
    }  # a sampler gives numbers from 0 on: which part they are of does not count here
    weights = dict.fromkeys(parts, 0.5)
    node: Any = nodes.MultiNodeWeightedSampler(parts, weights, stop_criteria=stop_criteria)
    return nodes.Loader(nodes.Batcher(node, 3))


def own_order(samples: range) -> Any:
    return RandomSampler(samples, generator=torch.Generator().manual_seed(samples[0]))


def by_epoch(samples: range) -> Any:
    return DistributedSampler(samples, num_replicas=1, rank=0)  # type: ignore[arg-type]


LOADERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "callable": ("drawn", lambda: get_batch),
    "generator": ("drawn", endless),
    "list": ("re-iterated", lambda: [torch.tensor([i]) for i in range(5)]),
    "iterable data set": ("re-iterated", lambda: DataLoader(Shards(), batch_size=3)),
    "iterable data set, worker": ("re-iterated", lambda: DataLoader(Shards(), batch_size=3, num_workers=1)),
    "iterable data set, persistent worker": (
        "re-iterated",
        lambda: DataLoader(Shards(), batch_size=3, num_workers=1, persistent_workers=True),
    ),
    "iterable data set, generator of its own": ("re-iterated", lambda: DataLoader(OwnGenerator(), batch_size=3)),
    "stateful reader": ("stateful", Reader),
    "StatefulDataLoader": ("map-style", lambda: StatefulDataLoader(range(14), batch_size=3, shuffle=True)),  # type: ignore[arg-type]
    "StatefulDataLoader, iterable": ("re-iterated", lambda: StatefulDataLoader(InOrder(), batch_size=3)),
    "nodes that draw": ("stateful", augmenting),
    "nodes over a sampler with a generator of its own": (
        "stateful",
        lambda: nodes.Loader(nodes.Batcher(nodes.Mapper(nodes.SamplerWrapper(own_order(range(14))), abs), 3)),
    ),
    "nodes that are read by a thread": ("stateful", lambda: prefetched(by_epoch(range(14)))),
    "nodes that mix parts": ("stateful", lambda: mixed("ALL_DATASETS_EXHAUSTED", own_order)),
    "nodes that mix parts, over and over": ("stateful", lambda: mixed("CYCLE_FOREVER", by_epoch)),
    "StatefulDataLoader, worker": (
        "map-style",
        lambda: StatefulDataLoader(range(14), batch_size=3, shuffle=True, num_workers=1),  # type: ignore[arg-type]
    ),
    "StatefulDataLoader, stateful sampler": ("stateful", with_stateful_sampler),
    "StatefulDataLoader, stateful sampler, worker": ("stateful", lambda: with_stateful_sampler(num_workers=1)),
}


def drive(cursor: Cursor, count: int, model: Callable[[], object] = lambda: None) -> list[str]:
    """The next `count` batches, in a form that compares; `model` runs after each."""
    batches: list[str] = []
    while len(batches) < count:
        if not cursor.opened:
            cursor.open_epoch()
        try:
            batches.append(repr(cursor.next()))
        except StopIteration:
            continue
        model()
    return batches


def model() -> None:
    get_batch()


def states() -> str:
    numpy: Any = np.random.get_state()
    return repr((random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()))


@pytest.mark.parametrize("name", LOADERS)
def test_each_kind_goes_back_to_every_position(name: str) -> None:
    kind, make = LOADERS[name]
    start = rng.capture()
    cursor = cursor_for(make())
    assert cursor.describe()["kind"] == kind
    positions, expected = [], []
    for _ in range(11):
        positions.append((cursor.state_dict(), rng.capture()))
        expected += drive(cursor, 1, model)
    every = 5 if "worker" in name else 1

    for state, random_states in positions[::-every]:
        before = states()
        cursor.load_state_dict(state)
        assert states() == before
        rng.restore(random_states)  # as the guard does
        assert cursor.batch == state["batch"]
        assert drive(cursor, 11 - cursor.batch, model) == expected[state["batch"] :], "in this process"
    cursor.close()

    for state, random_states in positions[::every]:
        rng.restore(start)  # as the script does: torchdata's loader seeds itself when it is made
        fresh = cursor_for(make())
        fresh.load_state_dict(state)
        rng.restore(random_states)
        assert drive(fresh, 11 - fresh.batch, model) == expected[state["batch"] :], "in a fresh one"
        fresh.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_batch_of_a_sampler_that_goes_on_where_it_stands_is_lost(workers: int) -> None:
    loader = with_stateful_sampler(num_workers=workers)
    expected = [repr(batch) for _ in range(2) for batch in loader]
    cursor = cursor_for(with_stateful_sampler(num_workers=workers))
    assert drive(cursor, len(expected)) == expected
    assert cursor.epoch == 1  # the second of them, and its last batch was the last of those
    cursor.close()


@pytest.mark.parametrize("in_this_process", [True, False])
def test_an_epoch_that_follows_a_position_between_two_is_drawn_from_the_same_generator(in_this_process: bool) -> None:
    def make() -> DataLoader[int]:
        return DataLoader(OwnGenerator(), batch_size=3)

    cursor = cursor_for(make())
    drive(cursor, 4)
    with pytest.raises(StopIteration):
        cursor.next()
    between = cursor.state_dict()
    expected = drive(cursor, 6)

    other = cursor if in_this_process else cursor_for(make())
    other.load_state_dict(between)
    assert drive(other, 6) == expected


class EpochReader(Reader):
    """Has other data in each epoch, and keeps its number."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield 1000 * self.epoch + number

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch = state["epoch"]


@pytest.mark.parametrize("behind", [0, 3])
def test_a_position_between_two_epochs_does_not_undo_what_the_script_says_of_the_next(behind: int) -> None:
    reader = EpochReader()
    cursor = cursor_for(reader)
    reader.set_epoch(behind)
    drive(cursor, 7)
    with pytest.raises(StopIteration):
        cursor.next()
    fresh_reader = EpochReader()
    fresh = cursor_for(fresh_reader)
    fresh.load_state_dict(cursor.state_dict())
    fresh_reader.set_epoch(behind + 1)
    reader.set_epoch(behind + 1)
    assert drive(fresh, 7) == drive(cursor, 7)


class SeededReader(Reader):
    """Seeds itself in `__iter__`, and keeps only its position."""

    def __iter__(self) -> Iterator[int]:
        seed = random.randrange(10**9)
        return (number ^ seed for number in super().__iter__())


def test_a_stateful_loader_that_seeds_itself_begins_again_from_the_same_random_states() -> None:
    cursor = cursor_for(SeededReader())
    drive(cursor, 2)
    state = cursor.state_dict()
    expected = drive(cursor, 3)
    fresh = cursor_for(SeededReader())
    fresh.load_state_dict(state)
    assert drive(fresh, 3) == expected


@pytest.mark.parametrize("name", ["callable", "generator", "list", "iterable data set", "stateful reader"])
def test_a_skip_passes_over_exactly_one_batch(name: str) -> None:
    _, make = LOADERS[name]
    cursor = cursor_for(make())
    cursor.open_epoch()
    state = cursor.state_dict()
    expected = drive(cursor, 4)
    cursor.load_state_dict(state)
    got = drive(cursor, 1)
    assert cursor.skip() is None
    assert cursor.skip() is None
    got += drive(cursor, 1)
    assert got == [expected[0], expected[3]]
    assert cursor.batch == 4


@pytest.mark.parametrize("name", ["callable", "generator", "iterable data set"])
def test_a_batch_is_the_same_whatever_the_model_draws(name: str) -> None:
    _, make = LOADERS[name]
    start = rng.capture()
    quiet = drive(cursor_for(make()), 4)
    rng.restore(start)
    assert drive(cursor_for(make()), 4, model) == quiet


def test_a_callable_gives_what_it_would_give_without_us_where_only_it_draws() -> None:
    start = rng.capture()
    unguarded = [repr(get_batch()) for _ in range(5)]
    rng.restore(start)
    assert drive(cursor_for(get_batch), 5) == unguarded


def test_the_model_does_not_draw_the_numbers_that_the_data_drew() -> None:
    cursor = cursor_for(get_batch)
    cursor.open_epoch()
    assert repr(get_batch()) != repr(cursor.next())


def test_an_iterable_is_iterated_under_the_random_states_of_the_process() -> None:
    start = rng.capture()
    list(iter(DataLoader([1, 2])))  # type: ignore[arg-type]
    after = states()
    rng.restore(start)
    drive(cursor_for(DataLoader(Shards(), batch_size=12)), 1)
    assert states() == after, "a base seed was drawn, and nothing else"


def test_a_callable_that_fails_can_be_tried_again_or_passed_over() -> None:
    failing: set[int] = set()

    def fragile() -> int:
        drawn = random.randrange(10**6)
        if drawn in failing:
            raise OSError(f"{drawn} cannot be read")
        return drawn

    cursor = cursor_for(fragile)
    cursor.open_epoch()
    state = cursor.state_dict()
    expected = [cursor.next() for _ in range(3)]
    cursor.load_state_dict(state)
    failing.add(expected[1])
    got = [cursor.next()]
    for _ in range(2):
        with pytest.raises(OSError, match=str(expected[1])):
            cursor.next()
    assert cursor.batch == 1
    cursor.skip()
    got.append(cursor.next())
    assert got == [expected[0], expected[2]]


def test_a_generator_that_has_raised_where_a_batch_was_passed_over_has_not_come_to_the_end_of_the_data() -> None:
    def fragile() -> Iterator[int]:
        for _ in range(3):  # two are drawn to be compared
            yield random.randrange(10**6)
        raise OSError("it cannot be read")

    cursor = cursor_for(fragile())
    cursor.open_epoch()
    cursor.next()
    cursor.skip()
    for go_on in (cursor.next, cursor.skip):
        with pytest.raises(UsageError, match="its iterator does not outlive that"):
            go_on()


def counting() -> Callable[[], int]:
    counter = iter(range(1000))
    return lambda: next(counter)


def own_generator() -> Callable[[], Any]:
    own = torch.Generator().manual_seed(0)
    return lambda: {"x": (torch.rand(2, generator=own), random.random())}


@pytest.mark.parametrize(
    "make",
    [
        counting,
        own_generator,
        lambda: iter([torch.rand(2) for _ in range(5)]),
        lambda: (random.random() + number for number in range(9)),
        lambda: iter([1]),
    ],
    ids=["a counter", "a generator of its own", "a list's iterator", "augments what it walks through", "one batch"],
)
def test_what_hides_a_position_is_refused_at_the_first_batch(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="drawn twice") as refusal:
        cursor_for(make()).open_epoch()
    assert "state_dict" in str(refusal.value)


@pytest.mark.parametrize(("make", "of_loader"), [(lambda: itertools.cycle([1, 2]), True), (counting, False)])
def test_who_hands_over_an_iterator_is_told_to_hand_over_what_it_goes_through(
    make: Callable[[], Any], of_loader: bool
) -> None:
    with pytest.raises(UsageError, match="drawn twice") as refusal:
        cursor_for(make()).open_epoch()
    assert ("hand over the loader: `batches = " in str(refusal.value.hint)) == of_loader


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("in_order", [True, False])
def test_nodes_whose_workers_race_are_refused_by_name(workers: int, in_order: bool) -> None:
    loader = augmenting(num_workers=workers, in_order=in_order)
    refused = pytest.raises(UsageError, match=r"ParallelMapper\(in_order=False\)")
    with refused if workers > 1 and not in_order else contextlib.nullcontext():
        cursor_for(loader)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: mixed("ALL_DATASETS_EXHAUSTED", RandomSampler), "a MultiNodeWeightedSampler"),
        (lambda: mixed("CYCLE_FOREVER", RandomSampler), "a MultiNodeWeightedSampler"),
        (lambda: mixed("CYCLE_FOREVER", own_order), "a MultiNodeWeightedSampler"),
        (lambda: prefetched(own_order(range(14))), "a Prefetcher or ParallelMapper"),
    ],
)
def test_nodes_over_a_sampler_whose_order_nobody_could_make_again_are_refused_by_name(
    make: Callable[[], Any], where: str
) -> None:
    with pytest.raises(UsageError, match=f"go back in {where} of torchdata.nodes over a RandomSampler"):
        cursor_for(make())


def test_threads_of_nodes_that_draw_beside_the_model_are_refused_at_the_first_batches() -> None:
    cursor = cursor_for(prefetched(RandomSampler(range(14)), lambda item: item + torch.rand(1)))
    with pytest.raises(UsageError, match="a thread of a Prefetcher or ParallelMapper draws"):
        drive(cursor, 3)


def test_values_that_are_not_numbers_do_not_count_as_another_batch() -> None:
    nan = float("nan")
    cursor_for(lambda: (torch.tensor([nan, 1.0]), np.array([nan]), {"x": [nan, "text", None, 3]})).open_epoch()


def test_an_iterator_without_batches_is_just_empty() -> None:
    cursor = cursor_for(iter([]))
    cursor.open_epoch()
    with pytest.raises(StopIteration):
        cursor.next()


def test_a_generator_that_has_come_to_its_end_is_empty_from_then_on() -> None:
    """It has raised nothing: a script with more epochs goes on, and without a guard it has no further batch either."""
    cursor = cursor_for(random.random() for _ in range(4))  # two are drawn to be compared
    cursor.open_epoch()
    assert [type(cursor.next()) for _ in range(2)] == [float] * 2
    for epoch in (1, 2):
        with pytest.raises(StopIteration):
            cursor.next()
        assert (cursor.epoch, cursor.batch) == (epoch, 2)
        cursor.open_epoch()


class Once:
    """Gives the same half-used iterator each time."""

    def __init__(self) -> None:
        self.batches = iter(range(9))

    def __iter__(self) -> Iterator[int]:
        return self.batches


class OnAndOn:
    """An infinite loader as it is often written: it goes on where the last iteration stopped."""

    def __init__(self) -> None:
        self.iterator = iter(torch.arange(100))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield next(self.iterator)


class OwnEpochs:
    """Counts its epochs itself, and shuffles by the count."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        yield from torch.randperm(9, generator=torch.Generator().manual_seed(self.epoch))


@pytest.mark.parametrize("make", [Once, OnAndOn, OwnEpochs])
def test_an_iterable_that_does_not_begin_anew_is_refused_at_its_first_batch(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="iterated twice") as refusal:
        cursor_for(make()).open_epoch()
    assert "state_dict" in str(refusal.value)


def test_an_iterable_that_does_not_begin_anew_is_refused_in_a_resumed_process_too() -> None:
    cursor = cursor_for([0, 1, 2, 3])
    drive(cursor, 2)
    state = cursor.state_dict()
    resumed = cursor_for(Once())
    resumed.load_state_dict(state)
    resumed.next()
    resumed.load_state_dict(state)
    with pytest.raises(RunDoesNotFit, match="half-used"):
        resumed.next()


def test_an_iterable_with_fewer_batches_than_before_is_refused() -> None:
    cursor = cursor_for([1, 2, 3, 4])
    drive(cursor, 3)
    shorter = cursor_for([1, 2])
    shorter.load_state_dict(cursor.state_dict())
    with pytest.raises(RunDoesNotFit, match="ends after 2 batches"):
        shorter.next()


class LateFirstWorker(IterableDataset[int]):
    """Of two workers the first one begins when the second one is at its third sample, and so behind its first ones."""

    def __init__(self) -> None:
        self.second_is_on = torch.multiprocessing.get_context("fork").Event()

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        for number in range(info.id, 8, 2):
            if info.id == 0:
                self.second_is_on.wait()
            elif number == 5:
                self.second_is_on.set()
            yield number


def test_workers_that_need_not_keep_their_order_are_waited_for_in_turn() -> None:
    """Else no position could be gone back to."""
    loader = DataLoader(LateFirstWorker(), batch_size=None, num_workers=2, prefetch_factor=4, in_order=False)
    cursor = cursor_for(loader)
    cursor.batch = 1  # the first batch of a run is read twice
    assert drive(cursor, 8) == [*map(str, range(8))]


@pytest.mark.parametrize("name", ["list", "iterable data set", "iterable data set, worker", "stateful reader"])
def test_that_an_epoch_is_over_is_known_before_the_next_batch_is_asked_for(name: str) -> None:
    _, make = LOADERS[name]
    cursor, told = cursor_for(make()), []
    while not cursor.epoch:
        drive(cursor, 1)
        if not cursor.epoch:
            told.append(cursor.at_end)
    assert told == [False] * (len(told) - 1) + [True]
    cursor.close()


class Drawing(Reader):
    """Draws from the process's random states with each batch."""

    def __iter__(self) -> Iterator[Any]:
        return (number + random.random() for number in super().__iter__())


@pytest.mark.parametrize("make", [Drawing, lambda: DataLoader(Shards(), batch_size=3)], ids=["stateful", "re-iterated"])
def test_a_batch_read_ahead_leaves_position_state_and_random_states_where_they_were(make: Callable[[], Any]) -> None:
    start = rng.capture()
    expected = drive(cursor_for(make()), 3)
    rng.restore(start)
    cursor = cursor_for(make())
    got = drive(cursor, 1)

    def position() -> str:
        return repr({key: value for key, value in cursor.state_dict().items() if key != "draws"})

    before = states(), position()
    assert not cursor.at_end
    assert (states(), position()) == before
    state = cursor.state_dict()
    random_states = rng.capture()
    assert got + drive(cursor, 2) == expected
    rng.restore(random_states)
    fresh = cursor_for(make())
    fresh.load_state_dict(state)
    assert drive(fresh, 2) == expected[1:]


@pytest.mark.parametrize(
    "make",
    [Reader, Drawing, lambda: DataLoader(InOrder(), batch_size=3), lambda: DataLoader(Shards(), batch_size=3)],
    ids=["stateful", "stateful, drawing", "re-iterated", "re-iterated, drawing"],
)
def test_whether_a_batch_is_the_last_may_be_asked_before_the_model_draws(make: Callable[[], Any]) -> None:
    """What the model draws is no other than if it had not been asked, and each position can be gone back to."""

    def drive_asking(cursor: Cursor, count: int) -> list[tuple[str, bool, str]]:
        steps: list[tuple[str, bool, str]] = []
        while len(steps) < count:
            batch, before = drive(cursor, 1), states()
            last = cursor.is_last()
            assert states() == before
            model()
            steps.append((batch[0], last, states()))
            positions.append((cursor.state_dict(), rng.capture()))
        return steps

    positions: list[tuple[Any, Any]] = []
    cursor = cursor_for(make())
    expected = drive_asking(cursor, 9)
    assert any(last for _, last, _ in expected)
    for place, (position, random_states) in enumerate(positions[:8]):
        if expected[place][1]:
            continue  # no run goes on from behind an epoch's last batch
        for resumed in (cursor_for(make()), cursor):
            resumed.load_state_dict(position)
            rng.restore(random_states)
            assert drive_asking(resumed, 8 - place) == expected[place + 1 :]


def test_a_sample_that_cannot_be_read_ahead_is_raised_where_it_is_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("sample 7 cannot be read")

    class Broken:
        def __iter__(self) -> Iterator[int]:
            return broken()

    cursor = cursor_for(Broken())
    drive(cursor, 1)
    assert not cursor.at_end
    with pytest.raises(OSError, match="sample 7"):
        cursor.next()


class Fragile(IterableDataset[int]):
    """Raises once at its tenth sample, if it is to."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[int]:
        for sample in range(14):
            if sample == 9 and self.fails:
                self.fails = False
                raise OSError("the disk hiccups")
            yield sample * 10 + random.randrange(10)


class FragileReader(Fragile):
    """As a reader with a state, whose batches come from a generator."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def until_it_raises(cursor: Cursor, *, ahead: bool = False) -> list[str]:
    batches = []
    with contextlib.suppress(OSError):
        while True:
            batches += drive(cursor, 1)
            assert not (ahead and cursor.at_end)
    return batches


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("size", [None, 3], ids=["itself", "loader"])
def test_what_is_read_in_order_gives_the_same_batch_again_where_reading_has_raised(
    size: int | None, ahead: bool
) -> None:
    """And not the end of the epoch, which a generator that has raised gives."""

    def cursor(*, fails: bool) -> Cursor:
        data = Fragile(fails=fails)
        return cursor_for(data if size is None else DataLoader(data, batch_size=size))

    before = rng.capture()
    expected = drive(cursor(fails=False), 20)
    rng.restore(before)
    fragile = cursor(fails=True)
    got = until_it_raises(fragile, ahead=ahead)
    assert len(got) == 9 // (size or 1)
    assert got + drive(fragile, 20 - len(got)) == expected


def dies() -> Iterator[Any]:
    for _ in range(3):
        yield get_batch()
    raise OSError("the disk hiccups")


@pytest.mark.parametrize(
    "make",
    [lambda: FragileReader(fails=True), lambda: StatefulDataLoader(FragileReader(fails=True), batch_size=3), dies],
    ids=["stateful reader", "stateful loader", "generator"],
)
def test_an_iterator_that_does_not_outlive_what_it_raises_is_not_asked_again(make: Callable[[], Any]) -> None:
    """The end of the epoch, or a batch without its first samples, would pass for the batch that was asked for."""
    cursor = cursor_for(make())
    assert until_it_raises(cursor)
    for _ in range(2):
        with pytest.raises(UsageError, match="does not outlive that"):
            cursor.next()


class Wrapper:
    """Moves batches to a device, as many scripts do."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch.to("cpu")


class Secretive(Sampler[int]):
    """Keeps its epoch where nobody can read it."""

    def __init__(self) -> None:
        self._seeds = [0]

    def set_epoch(self, epoch: int) -> None:
        self._seeds = [epoch]

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12, generator=torch.Generator().manual_seed(self._seeds[0])).tolist()


@pytest.mark.parametrize("wrap", [Wrapper, lambda loader: loader], ids=["wrapped", "map-style"])
@pytest.mark.parametrize("sampler", [Secretive, lambda: DistributedSampler(range(12), 1, 0)], ids=["secret", "torch's"])  # type: ignore[arg-type]
def test_a_resumed_epoch_has_the_order_that_the_script_s_set_epoch_gives_it(
    wrap: Callable[[Any], Any], sampler: Callable[[], Any]
) -> None:
    def make() -> tuple[Any, Cursor]:
        made = sampler()
        return made, cursor_for(wrap(DataLoader(range(12), batch_size=2, sampler=made)))  # type: ignore[arg-type]

    made, cursor = make()
    for epoch in range(2):
        made.set_epoch(epoch)
        expected = drive(cursor, 6)
        if epoch == 0:
            with contextlib.suppress(StopIteration):
                cursor.next()
    made.set_epoch(1)
    made, cursor = make()
    made.set_epoch(0)
    drive(cursor, 6)
    with contextlib.suppress(StopIteration):
        cursor.next()
    made.set_epoch(1)
    drive(cursor, 2)
    state = cursor.state_dict()

    made, resumed = make()
    resumed.load_state_dict(state)
    made.set_epoch(1)  # what the script's loop does before its pass
    resumed.begin_pass()
    assert drive(resumed, 4) == expected[2:]


class Lazy(Reader):
    """Draws its order when its first batch is asked for, in the random states that there are then."""

    def __iter__(self) -> Iterator[int]:
        order = random.sample(range(9), 9)
        while self.position < 9:
            self.position += 1
            yield order[self.position - 1]


def test_a_lazy_stateful_loader_resumes_its_order_and_leaves_the_random_states_alone() -> None:
    cursor = cursor_for(Lazy())
    drive(cursor, 3)
    state, random_states = cursor.state_dict(), rng.capture()
    expected, after = drive(cursor, 3), states()
    rng.restore(random_states)
    fresh = cursor_for(Lazy())
    fresh.load_state_dict(state)
    assert drive(fresh, 3) == expected
    assert states() == after


class Noisy(Reader):
    """Draws an order from one generator as an epoch begins, and noise from others for all batches but some."""

    def __init__(self, others: int = 1) -> None:
        super().__init__()
        self.order, self.noise = random.Random(5), [np.random.default_rng(number) for number in range(others)]

    def __iter__(self) -> Iterator[Any]:
        order = self.order.sample(range(7), 7)
        for index in super().__iter__():
            yield order[index // 11 - 1], [each.random() for each in self.noise if index % 3]


def test_a_generator_function_goes_on_with_the_generators_that_it_draws_from_for_a_batch() -> None:
    for position in range(7):
        cursor = cursor_for(Noisy())
        drive(cursor, position)
        assert not cursor.at_end or position == 7  # as where a snapshot is due: the batch behind the first one tells
        state = cursor.state_dict()
        expected = drive(cursor, 12)
        for resumed in (cursor, cursor_for(Noisy())):
            resumed.load_state_dict(state)
            assert drive(resumed, 12) == expected, position


class NoisyStream(IterableDataset[Any]):
    def __init__(self, others: int) -> None:
        self.reader = Noisy(others)

    def __iter__(self) -> Iterator[Any]:
        self.reader.position = 0
        return iter(self.reader)


@pytest.mark.parametrize("make", [Noisy, lambda others: DataLoader(NoisyStream(others), batch_size=None)])
@pytest.mark.parametrize("opened", [True, False])
def test_another_number_of_generators_is_refused_or_accepted(make: Callable[[int], Any], opened: bool) -> None:
    cursor = cursor_for(make(2))
    drive(cursor, 3)
    if not opened:
        cursor.end_epoch()
    for others in (1, 3):
        resumed = cursor_for(make(others))
        with pytest.raises(RunDoesNotFit, match=rf"held 3 random generators .* hold {others + 1} now"):
            resumed.load_state_dict(cursor.state_dict())
        resumed.accepts_other_length = True
        resumed.load_state_dict(cursor.state_dict())
        assert len(drive(resumed, 6)) == 6


def test_a_callable_that_draws_otherwise_after_a_restart_is_refused() -> None:
    def drawing(size: int) -> Callable[[], Any]:
        return lambda: torch.randint(1000, (size,))

    cursor = cursor_for(drawing(3))
    drive(cursor, 2)
    with pytest.raises(RunDoesNotFit, match="drawn again"):
        cursor_for(drawing(4)).load_state_dict(cursor.state_dict())
    cursor_for(drawing(3)).load_state_dict(cursor.state_dict())


class Opaque:
    def __init__(self, number: int) -> None:
        self.number = number


def test_a_generator_of_objects_that_cannot_be_compared_is_refused_before_it_loses_any() -> None:
    with pytest.raises(UsageError, match="cannot be compared"):
        cursor_for(Opaque(number) for number in range(9)).open_epoch()


def test_a_script_that_draws_beside_its_data_is_told_so_at_once() -> None:
    cursor = cursor_for(get_batch)
    drive(cursor, 3)
    assert not list(cursor.remarks())
    random.random()
    drive(cursor, 1)
    assert [remark.code for remark in cursor.remarks()] == ["draws-beside-the-data"]


def test_a_dataloader_says_how_it_reads() -> None:
    said = cursor_for(DataLoader(Shards(), batch_size=3, num_workers=1)).describe()
    assert (said["batch_size"], said["workers"]) == (3, 1)


def test_a_checkpoint_of_another_kind_of_loader_is_refused() -> None:
    cursor = cursor_for([1, 2, 3])
    with pytest.raises(RunDoesNotFit, match="'re-iterated', this one is 'drawn'"):
        cursor_for(get_batch).load_state_dict(cursor.state_dict())


@pytest.mark.parametrize("loader", [7, None, "text", {"x": 1}, list], ids=repr)
def test_what_gives_no_batches_is_refused_with_what_is_accepted(loader: Any) -> None:
    with pytest.raises(UsageError, match="accepted are") as refusal:
        cursor_for(loader)
    assert "cannot read batches" in refusal.value.message


def test_a_loader_that_iterates_in_its_own_way_is_not_sought_by_index() -> None:
    class Reversed(DataLoader[int]):
        def __iter__(self) -> Any:
            return iter(list(super().__iter__())[::-1])

    cursor = cursor_for(Reversed(range(6), batch_size=2))  # type: ignore[arg-type]
    assert cursor.describe()["kind"] == "re-iterated"
    cursor.open_epoch()
    assert cursor.next().tolist() == [4, 5]


class Drawn(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1000, ()))


class ForNewProcess(DataLoader[Any]):
    """Can be sent to a position before it is first read."""

    at, has_begun = 0, False

    def __iter__(self) -> Any:
        self.has_begun = True
        for batch in itertools.islice(super().__iter__(), self.at, None):
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.has_begun:
            raise RuntimeError("load the state before the loop")
        self.at = state["at"]


def test_a_loader_of_the_script_s_own_with_workers_is_not_sent_back_in_a_new_run() -> None:
    cursor = cursor_for(ForNewProcess(range(14), batch_size=3, num_workers=1))  # type: ignore[arg-type]
    assert cursor.kind == "stateful"
    assert len(drive(cursor, 3)) == 3
    cursor.close()


def test_other_batches_behind_the_loader_s_own_state_are_refused_unless_they_are_accepted() -> None:
    def cursor_of_new_run() -> Cursor:
        return cursor_for(StatefulDataLoader(Drawn(), batch_size=3, sampler=StatefulSampler(), num_workers=1))

    refused, accepted = cursor_of_new_run(), cursor_of_new_run()
    with pytest.raises(UsageError, match=r"gives another one than before(.|\n)*--accept-data-change"):
        drive(refused, 3)
    accepted.accepts_other_length = True
    assert len(drive(accepted, 3)) == 3
    refused.close()
    accepted.close()
