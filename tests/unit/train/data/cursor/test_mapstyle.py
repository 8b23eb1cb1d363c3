"""A map-style loader under a cursor: the same data in the same order, from any position, without a needless read."""

import contextlib
import copy
import faulthandler
import itertools
import json
import multiprocessing.util
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sharding import one_rank
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from rollback.errors import RunDoesNotFit, UsageError
from rollback.train.data import rng
from rollback.train.data.cursor import Cursor, cursor_for
from rollback.train.data.cursor.digest import Digest
from rollback.train.state import tree

EPOCHS = 3
LENGTH = 23


class Numbers(Dataset[int]):
    """Sample i is i. Reading a forbidden one is an error."""

    def __init__(self, length: int = LENGTH, forbidden: frozenset[int] = frozenset()) -> None:
        self.length = length
        self.forbidden = forbidden

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.forbidden:
            raise OSError(f"sample {index} was read")
        return index


class Augmented(Numbers):
    """Sample i is i and a draw from each library."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(2)


class Buckets:
    """A batch sampler of uneven batches, shuffled with Python's `random` as iteration begins."""

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[list[int]]:
        buckets = [list(range(start, min(start + 4, LENGTH))) for start in range(0, LENGTH, 4)] + [[2, 9]]
        random.shuffle(buckets)
        return iter(buckets)


class DrawsAtOnce(Sampler[int]):
    """Draws in `__iter__` itself, not when the first index is asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(LENGTH)[:17].tolist())


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in sequence": lambda: {"batch_size": 4},
    "in sequence, whole batches": lambda: {"batch_size": 4, "drop_last": True},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "shuffled, whole batches": lambda: {"batch_size": 5, "shuffle": True, "drop_last": True},
    "shuffled by a generator": lambda: {
        "batch_size": 4,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
    },
    "sampler with a generator": lambda: {
        "batch_size": 23,
        "sampler": RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(6)),
    },
    "distributed": lambda: {"batch_size": 3, "sampler": DistributedSampler(Numbers(), 2, 1, shuffle=True)},
    "distributed, whole batches": lambda: {
        "batch_size": 3,
        "drop_last": True,
        "sampler": DistributedSampler(Numbers(), 2, 1, shuffle=True, drop_last=True),
    },
    "with replacement": lambda: {
        "batch_size": 5,
        "sampler": RandomSampler(range(LENGTH), replacement=True, num_samples=70),
    },
    "with replacement by a generator": lambda: {
        "batch_size": 5,
        "sampler": RandomSampler(
            range(LENGTH), replacement=True, num_samples=70, generator=torch.Generator().manual_seed(4)
        ),
    },
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([0.1, 0.7, 0.2], 15)},
    "uneven batches": lambda: {"batch_sampler": Buckets()},
    "drawn at once": lambda: {"batch_size": 4, "sampler": DrawsAtOnce()},
    "without batches": lambda: {"batch_size": None, "shuffle": True},
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "1 persistent worker": {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True},
}
any_workers = pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
# Starting workers is what these tests spend their time on: with them, only loaders that differ in what they draw when,
# and with new ones in each epoch one of those by default.
WITH_WORKERS = [
    "shuffled",
    "shuffled by a generator",
    "distributed",
    "uneven batches",
    "drawn at once",
    "without batches",
]


def _marks(name: str, workers: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] if workers == "2 workers" and name != "shuffled" else []


def make_loader(name: str, dataset: Dataset[Any] | None = None, **options: Any) -> DataLoader[Any]:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    return DataLoader(Numbers() if dataset is None else dataset, **LOADERS[name](), **options)


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """What a user writes before each epoch."""
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


def plain(data: Any) -> Any:
    """A batch as Python values, which compare."""
    if isinstance(data, torch.Tensor):
        return data.tolist()
    return [plain(part) for part in data] if isinstance(data, (list, tuple)) else data


def model() -> None:
    """Draws from the random states of the process while the data are on their way, as dropout does."""
    random.random()
    np.random.rand()
    torch.rand(2)


def generator_states(loader: DataLoader[Any]) -> list[list[int]]:
    owners = (loader, loader.sampler)
    generators = [owner.generator for owner in owners if getattr(owner, "generator", None) is not None]
    return [generator.get_state().tolist() for generator in generators]


def process_states() -> str:
    numpy = np.random.get_state()
    return repr((random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist()))  # type: ignore[index,union-attr]


def skip_to_the_end(cursor: Cursor) -> list[Any]:
    skipped = []
    while True:
        try:
            skipped.append(cursor.skip())
        except StopIteration:
            return skipped


def unguarded(loader: DataLoader[Any], epochs: int = EPOCHS) -> list[Any]:
    batches = []
    for epoch in range(epochs):
        set_epoch(loader, epoch)
        for batch in loader:
            batches.append(plain(batch))
            model()
    return batches


def drive(cursor: Cursor, loader: DataLoader[Any], epochs: int = EPOCHS) -> Iterator[Any]:
    """The batches from the cursor's position to the end of the last epoch, as the guard asks for them."""
    while cursor.epoch < epochs:
        if not cursor.opened:
            set_epoch(loader, cursor.epoch)
            cursor.open_epoch()
        try:
            data = plain(cursor.next())
        except StopIteration:
            continue
        model()
        yield data


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(name, options, id=f"{name}, {workers}", marks=_marks(name, workers))
        for name in LOADERS
        for workers, options in WORKERS.items()
        if workers == "no workers" or name in WITH_WORKERS
    ],
)
def test_a_healthy_run_gets_what_an_unguarded_one_gets_and_every_position_can_be_gone_back_to(
    name: str, workers: dict[str, Any]
) -> None:
    loader = make_loader(name, **workers)
    expected = unguarded(loader)
    at_the_end, own_states = process_states(), generator_states(loader)

    loader = make_loader(name, **workers)
    cursor = cursor_for(loader)
    positions, got = [(cursor.state_dict(), rng.capture())], []
    for batch in drive(cursor, loader):
        got.append(batch)
        indices = cursor.indices()
        assert indices is not None
        assert list(indices) == (batch if isinstance(batch, list) else [batch])
        positions.append((cursor.state_dict(), rng.capture()))
    assert got == expected
    assert process_states() == at_the_end
    assert generator_states(loader) == own_states
    assert cursor.batch == len(expected)

    every = 1 if workers["num_workers"] == 0 else 5  # an odd number
    for state, random_states in positions[::-every]:
        before = process_states()
        cursor.load_state_dict(state)
        assert process_states() == before
        assert (cursor.epoch, cursor.offset, cursor.batch) == (state["epoch"], state["offset"], state["batch"])
        rng.restore(random_states)  # as the guard does
        got = list(itertools.islice(drive(cursor, loader), 2))
        assert got == expected[state["batch"] : state["batch"] + 2], "in this process"
    cursor.close()

    for state, random_states in positions[:: every * 2 + 1]:
        loader = make_loader(name, **workers)
        cursor = cursor_for(loader)
        cursor.load_state_dict(state)
        rng.restore(random_states)
        assert list(drive(cursor, loader)) == expected[state["batch"] :], "in a fresh process, to the end"
        assert process_states() == at_the_end
        assert generator_states(loader) == own_states


@pytest.mark.parametrize("name", ["shuffled by a generator", "with replacement by a generator"])
def test_a_loader_s_own_generator_is_where_it_would_be_at_that_position(name: str) -> None:
    loader = make_loader(name)
    cursor = cursor_for(loader)
    seen = [(cursor.state_dict(), generator_states(loader))]
    for _ in drive(cursor, loader):
        seen.append((cursor.state_dict(), generator_states(loader)))
    for state, own_states in reversed(seen):
        cursor.load_state_dict(state)
        assert generator_states(loader) == own_states


@pytest.mark.parametrize("name", ["shuffled", "distributed", "uneven batches", "without batches"])
def test_skipping_names_the_indices_and_reads_nothing(name: str) -> None:
    expected = unguarded(make_loader(name), epochs=1)
    loader = make_loader(name, Numbers(forbidden=frozenset(range(LENGTH))))
    cursor = cursor_for(loader)
    cursor.open_epoch()
    skipped = skip_to_the_end(cursor)
    assert skipped == [tuple(batch) if isinstance(batch, list) else (batch,) for batch in expected]
    assert (cursor.epoch, cursor.offset, cursor.batch) == (1, 0, len(expected))


@any_workers
@pytest.mark.parametrize("planned", [True, False])
def test_after_a_skip_the_data_go_on_behind_it(workers: dict[str, Any], planned: bool) -> None:
    loader = make_loader("in sequence", **workers)
    expected = unguarded(loader, epochs=2)
    # Batches 2 and 3 hold samples 8 to 15. Announced, they are never read, however far workers read ahead.
    unread = frozenset(range(8, 16)) if planned or workers["num_workers"] == 0 else frozenset()
    loader = make_loader("in sequence", Numbers(forbidden=unread), **workers)
    cursor = cursor_for(loader)
    if planned:
        cursor.plan_skips(2, 3)
    cursor.open_epoch()
    got = [plain(cursor.next()), plain(cursor.next())]
    assert [cursor.skip(), cursor.skip()] == [(8, 9, 10, 11), (12, 13, 14, 15)]
    assert cursor.indices() == (4, 5, 6, 7), "the batch last handed out, not the one skipped"
    got += [plain(cursor.next()), plain(cursor.next())]
    assert got == [expected[0], expected[1], expected[4], expected[5]]
    with pytest.raises(StopIteration):
        cursor.next()
    cursor.close()


def test_a_batch_that_was_to_be_skipped_can_still_be_read() -> None:
    loader = make_loader("shuffled", num_workers=2)
    expected = unguarded(loader, epochs=1)
    loader = make_loader("shuffled", num_workers=2)
    cursor = cursor_for(loader)
    cursor.plan_skips(1, 4)
    assert list(drive(cursor, loader, epochs=1)) == expected


class Hiccups(Augmented):
    """Raises at the first tries of a sample, behind what it has drawn. It has a generator of its own, too."""

    def __init__(self, tries: int) -> None:
        super().__init__()
        self.left = tries
        self.own = np.random.default_rng(5)

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index), float(self.own.normal()), random.gauss(0, 1), np.random.randn()
        if index == 9 and self.left:
            self.left -= 1
            raise OSError("the disk hiccups")
        return sample


def test_a_failure_to_read_that_passes_leaves_no_trace_in_what_is_drawn() -> None:
    def read(tries: int) -> list[str]:
        rng.seed_all("the same")
        cursor = cursor_for(DataLoader(Hiccups(tries), batch_size=4, shuffle=True, collate_fn=list))
        cursor.open_epoch()
        batches = []
        while True:
            try:
                batches.append(repr(cursor.next()))
            except OSError:
                continue
            except StopIteration:
                return [*batches, repr(random.random()), repr(np.random.randn()), repr(torch.rand(1))]

    assert read(tries=3) == read(tries=0)


@any_workers
def test_a_batch_that_cannot_be_read_can_be_passed_over(workers: dict[str, Any]) -> None:
    loader = make_loader("in sequence", Numbers(forbidden=frozenset({9})), **workers)
    cursor = cursor_for(loader)
    cursor.open_epoch()
    got = [plain(cursor.next()), plain(cursor.next())]
    for _ in range(2):
        with pytest.raises(OSError, match="sample 9 was read"):
            cursor.next()
        assert (cursor.offset, cursor.batch) == (2, 2), "the position stays before it"
    assert cursor.skip() == (8, 9, 10, 11)
    got.append(plain(cursor.next()))
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]]
    cursor.close()


def test_random_augmentation_in_workers_is_a_function_of_the_position() -> None:
    def augmented(**workers: Any) -> tuple[Cursor, DataLoader[Any]]:
        loader = make_loader("shuffled", Augmented(), **workers)
        return cursor_for(loader), loader

    cursor, loader = augmented(num_workers=1)
    states, expected = [], []
    for batch in drive(cursor, loader, epochs=2):
        expected.append(batch)
        states.append(cursor.state_dict())
    assert len({repr(batch[1:]) for batch in expected}) == len(expected), "each batch has draws of its own"

    more, loader = augmented(num_workers=2, prefetch_factor=5)
    assert list(drive(more, loader, epochs=2)) == expected, "whatever the number of workers"

    cursor.load_state_dict(states[2])
    again = [plain(cursor.next())]
    cursor.skip()
    again.append(plain(cursor.next()))
    assert again == [expected[3], expected[5]], "across a seek and a skip"
    cursor.close()


def test_without_workers_augmentation_draws_from_the_process_as_ever() -> None:
    loader = make_loader("shuffled", Augmented())
    expected = unguarded(loader, epochs=2)
    loader = make_loader("shuffled", Augmented())
    assert list(drive(cursor_for(loader), loader, epochs=2)) == expected


class Inspected(Numbers):
    """Its samples tell what a worker sees of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Inspected)
        assert len(info.dataset) == LENGTH
        return index + self.shift


class ReadsMany(Inspected):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [1000 + index + self.shift for index in indices]


def shift_by_ten(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.shift = 10


@pytest.mark.parametrize(
    ("dataset", "context", "first"),
    [(Inspected(), None, 10), (ReadsMany(), None, 1010), (Inspected(), "spawn", 10)],
    ids=["one by one", "many at once", "spawned"],
)
def test_workers_see_the_user_s_own_data_set(dataset: Any, context: str | None, first: int) -> None:
    loader = DataLoader(
        dataset, 4, num_workers=1, worker_init_fn=shift_by_ten, multiprocessing_context=context, timeout=60
    )
    cursor = cursor_for(loader)
    cursor.open_epoch()
    assert plain(cursor.next()) == [first, first + 1, first + 2, first + 3]
    cursor.close()


def abort_at_the_end(_: int) -> None:
    faulthandler.disable()  # or pytest's one prints a traceback among the results
    multiprocessing.util.Finalize(None, os.abort, exitpriority=1)


def test_a_worker_that_crashes_while_it_ends_ends_nothing_else() -> None:
    cursor = cursor_for(DataLoader(Inspected(), 4, num_workers=1, worker_init_fn=abort_at_the_end, timeout=60))
    cursor.open_epoch()
    cursor.next()
    cursor.close()


def worker_pids(cursor: Any) -> list[int]:
    return [worker.pid for worker in cursor._clone._iterator._workers]


def test_workers_are_kept_through_a_seek_and_ended_with_the_epoch() -> None:
    loader = make_loader("shuffled", num_workers=1)
    cursor: Any = cursor_for(loader)
    cursor.open_epoch()
    cursor.next()
    state, pids = cursor.state_dict(), worker_pids(cursor)
    cursor.next()
    cursor.load_state_dict(state)
    cursor.next()
    assert worker_pids(cursor) == pids
    workers = cursor._clone._iterator._workers
    skip_to_the_end(cursor)
    assert not any(worker.is_alive() for worker in workers)


def test_persistent_workers_live_on_through_epochs_and_seeks() -> None:
    loader = make_loader("shuffled", num_workers=1, persistent_workers=True)
    cursor: Any = cursor_for(loader)
    cursor.open_epoch()
    cursor.next()
    state, pids = cursor.state_dict(), worker_pids(cursor)
    skip_to_the_end(cursor)
    cursor.open_epoch()
    cursor.next()
    cursor.load_state_dict(state)
    cursor.next()
    assert worker_pids(cursor) == pids
    workers = cursor._clone._iterator._workers
    cursor.close()
    assert not any(worker.is_alive() for worker in workers)


def test_set_epoch_is_repeated_when_a_rollback_crosses_an_epoch_s_start() -> None:
    loader = make_loader("distributed")
    expected = unguarded(loader)
    per_epoch = len(expected) // EPOCHS
    loader = make_loader("distributed")
    cursor = cursor_for(loader)
    stream = drive(cursor, loader)
    states = []
    for _ in range(2 * per_epoch + 2):
        states.append(cursor.state_dict())
        next(stream)
    assert loader.sampler.epoch == 2  # type: ignore[attr-defined]

    cursor.load_state_dict(states[2])
    got = []
    while cursor.epoch < EPOCHS:  # the user's loop is still inside epoch 2 and calls set_epoch no more
        try:
            got.append(plain(cursor.next()))
        except StopIteration:
            if cursor.epoch < EPOCHS:
                cursor.open_epoch()
    assert got == expected[2:]


def test_set_epoch_is_repeated_after_a_rollback_to_between_two_epochs() -> None:
    loader = make_loader("distributed")
    cursor = cursor_for(loader)
    between, openings = [], []
    for epoch in range(EPOCHS):
        set_epoch(loader, epoch)
        between.append(cursor.state_dict())
        cursor.open_epoch()
        openings.append(skip_to_the_end(cursor))
    cursor.load_state_dict(between[1])
    cursor.open_epoch()
    assert skip_to_the_end(cursor) == openings[1]
    cursor.open_epoch()
    assert skip_to_the_end(cursor) == openings[2]


def test_set_epoch_is_repeated_for_an_epoch_that_an_earlier_process_began() -> None:
    loader = make_loader("distributed")
    cursor = cursor_for(loader)
    states = []
    for _ in drive(cursor, loader, epochs=2):
        states.append(cursor.state_dict())
    in_epoch_1 = next(state for state in states if state["epoch"] == 1 and state["opened"])

    resumed = cursor_for(make_loader("distributed"))
    resumed.load_state_dict(in_epoch_1)
    expected = skip_to_the_end(resumed)
    resumed.load_state_dict(states[0])  # a rollback into epoch 0, which this process never began
    skip_to_the_end(resumed)
    resumed.open_epoch()
    resumed.skip()
    assert skip_to_the_end(resumed) == expected


def test_set_epoch_called_by_the_user_after_a_rollback_stands() -> None:
    loader = make_loader("distributed")
    sampler: Any = loader.sampler
    cursor = cursor_for(loader)
    between = []
    for _ in drive(cursor, loader, epochs=2):
        between.append(cursor.state_dict())
    cursor.load_state_dict(between[0])
    skip_to_the_end(cursor)
    sampler.set_epoch(17)
    cursor.open_epoch()
    first = cursor.skip()
    assert sampler.epoch == 17
    assert first == tuple(list(sampler)[:3])


def test_an_epoch_gone_back_to_at_its_very_beginning_is_not_opened_twice() -> None:
    loader = make_loader("shuffled")
    cursor = cursor_for(loader)
    cursor.open_epoch()
    state = cursor.state_dict()
    expected = plain(cursor.next())
    cursor.load_state_dict(state)
    before = process_states()
    cursor.open_epoch()
    assert process_states() == before
    assert plain(cursor.next()) == expected
    cursor.open_epoch()
    assert process_states() != before, "begun anew once it has been used"


def test_another_order_than_before_is_refused() -> None:
    cursor = cursor_for(make_loader("shuffled"))
    cursor.open_epoch()
    cursor.next()
    state = cursor.state_dict()
    other = cursor_for(make_loader("shuffled", Numbers(LENGTH + 1)))
    with pytest.raises(RunDoesNotFit, match="other indices"):
        other.load_state_dict(state)


def test_where_another_order_is_refused_at_the_next_batch_no_sample_is_named_for_it() -> None:
    """The failure record asks, also where no other order was ever begun: the order may still be put right by then."""
    cursor = cursor_for(make_loader("shuffled"))
    cursor.open_epoch()
    skip_to_the_end(cursor)
    cursor.open_epoch()
    cursor.next()
    other = cursor_for(make_loader("shuffled", Numbers(LENGTH + 1)))
    other.load_state_dict(cursor.state_dict())
    with pytest.raises(RunDoesNotFit, match="other indices"):
        other.next()
    assert other.indices(reading=True) is None


def test_a_loader_with_another_generator_than_before_is_refused() -> None:
    cursor = cursor_for(make_loader("shuffled by a generator"))
    cursor.open_epoch()
    with pytest.raises(RunDoesNotFit, match=r"held 1 random generator .* hold 0 now"):
        cursor_for(make_loader("shuffled")).load_state_dict(cursor.state_dict())


class OfFiles(Dataset[float]):
    """Makes a generator for each of its files when that is first read."""

    def __init__(self) -> None:
        self.of_files: dict[int, random.Random] = {}

    def __getitem__(self, index: int) -> float:
        return self.of_files.setdefault(index // 6, random.Random(index // 6)).random()


def test_generators_that_the_first_read_does_not_make_all_again_are_refused() -> None:
    cursor, resumed = (cursor_for(DataLoader(OfFiles(), 3, sampler=range(LENGTH))) for _ in range(2))
    cursor.open_epoch()
    for _ in range(3):
        cursor.next()
    resumed.load_state_dict(cursor.state_dict())
    with pytest.raises(RunDoesNotFit, match=r"held 2 random generators .* hold 1 now"):
        resumed.next()


class Forgetful(Sampler[int]):
    """Its order depends on how often it has been asked, which no random state tells."""

    asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(range(self.asked, self.asked + 12))


def test_a_sampler_whose_order_cannot_be_made_again_is_refused_at_its_first_opening() -> None:
    cursor = cursor_for(DataLoader(Numbers(), 3, sampler=Forgetful()))
    with pytest.raises(UsageError, match="drawn twice") as refusal:
        cursor.open_epoch()
    assert "Forgetful" in refusal.value.message


def test_a_sampler_whose_order_cannot_be_made_again_is_refused_at_a_position() -> None:
    cursor = cursor_for(DataLoader(Numbers(), 3))
    cursor.open_epoch()
    cursor.next()
    with pytest.raises(RunDoesNotFit, match="other indices"):
        cursor_for(DataLoader(Numbers(), 3, sampler=Forgetful())).load_state_dict(cursor.state_dict())


class GoesOnByItself(Sampler[int]):
    """Seeded by an epoch that it raises itself when it has been drawn to its end, as Accelerate's seedable sampler."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.set_epoch(self.epoch + 1)

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_raises_its_epoch_by_itself_has_it_back_when_its_order_has_been_tried(workers: int) -> None:
    """The epoch is shorter than the trial."""
    loader = DataLoader(Numbers(12), batch_size=4, sampler=GoesOnByItself(12), num_workers=workers)
    cursor = cursor_for(loader)
    drawn = []
    for _ in range(2):
        cursor.open_epoch()
        drawn.append([cursor.next().tolist() for _ in range(3)])
        with pytest.raises(StopIteration):
            cursor.next()
    cursor.close()
    expected = [torch.randperm(12, generator=torch.Generator().manual_seed(epoch)) for epoch in range(2)]
    assert [list(itertools.chain(*batches)) for batches in drawn] == [order.tolist() for order in expected]


class WithGenerator(Sampler[int]):
    """Shuffles by a generator that it keeps under a name of its own."""

    def __init__(self, own: Any) -> None:
        self.source = own

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            match self.source:
                case np.random.Generator():
                    yield int(self.source.integers(23))
                case np.random.RandomState():
                    yield int(self.source.randint(23))
                case random.Random():
                    yield self.source.randrange(23)
                case _:
                    yield int(torch.randint(23, (), generator=self.source))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
        lambda: random.Random(1),
        lambda: torch.Generator().manual_seed(1),
    ],
    ids=["numpy", "numpy, old", "python", "torch"],
)
def test_a_generator_that_a_sampler_keeps_is_put_back_with_the_position(make: Callable[[], Any]) -> None:
    def loader() -> Cursor:
        return cursor_for(DataLoader(Numbers(), 3, sampler=WithGenerator(make())))

    cursor = loader()
    cursor.open_epoch()
    skip_to_the_end(cursor)
    cursor.open_epoch()
    cursor.next()
    tensors: dict[str, Any] = {}
    kept = tree.decode(tree.encode(cursor.state_dict(), "cursor", tensors), tensors.__getitem__)
    expected = [repr(cursor.next()) for _ in range(3)]
    fresh = loader()
    fresh.load_state_dict(kept)
    assert [repr(fresh.next()) for _ in range(3)] == expected


class Reusing(Sampler[list[int]]):
    """Fills the same list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(12):
            batch.append(index)
            if len(batch) == 3:
                yield batch
                batch.clear()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_may_hand_out_the_same_list_again_and_again(workers: int) -> None:
    cursor = cursor_for(DataLoader(Numbers(), batch_sampler=Reusing(), num_workers=workers))
    cursor.open_epoch()
    got = []
    for _ in range(4):
        cursor.next()
        got.append(cursor.indices())
    with pytest.raises(StopIteration):
        cursor.next()
    assert got == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    cursor.close()


def test_keys_that_are_not_integers_are_compared_too() -> None:
    def loader(keys: str) -> Cursor:
        return cursor_for(DataLoader({key: ord(key) for key in "abcdef"}, 2, sampler=list(keys)))  # type: ignore[arg-type]

    cursor = loader("abcdef")
    cursor.open_epoch()
    cursor.next()
    loader("abcdef").load_state_dict(cursor.state_dict())
    with pytest.raises(RunDoesNotFit, match="other indices"):
        loader("bacdef").load_state_dict(cursor.state_dict())


class Seeds(Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        assert worker is not None
        return worker.seed


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_have_the_seeds_that_they_would_have_without_us_also_after_a_resume(persistent: bool) -> None:
    def loader() -> Any:
        return DataLoader(Seeds(), 3, num_workers=2, persistent_workers=persistent)

    start = rng.capture()
    plain = loader()
    expected = [[batch.tolist() for batch in plain] for _ in range(2)]
    assert persistent or expected[0] != expected[1]
    rng.restore(start)
    cursor, comparer = cursor_for(loader()), Recorded()
    cursor.comparer = comparer
    got: list[list[Any]] = []
    for _ in range(2):
        cursor.open_epoch()
        first = cursor.next()
        comparer.digests[cursor.batch - 1] = Digest(first).value
        got.append([first.tolist()])
        state = cursor.state_dict()
        got[-1].append(cursor.next().tolist())
        with pytest.raises(StopIteration):
            cursor.next()
    cursor.close()
    assert got == expected
    assert comparer.asked == [0], "read again, by the same worker"
    fresh = cursor_for(loader())
    fresh.load_state_dict(state)
    # Which worker reads a batch may be another one; that its seed is one of the same epoch may not.
    assert set(fresh.next().tolist()) <= {seed for batch in expected[1] for seed in batch}
    fresh.close()


class Recorded:
    """A comparer that knows what a cursor has handed out."""

    def __init__(self) -> None:
        self.digests: dict[int, int | None] = {}
        self.asked: list[int] = []

    def knows(self, batch: int) -> bool:
        return batch in self.digests

    def check(self, batch: int, data: Any) -> None:
        self.asked.append(batch)
        if Digest(data).value != self.digests[batch]:
            raise RunDoesNotFit("moved")


class Moving(Dataset[Any]):
    def __init__(self, by: int = 0, noise: bool = False) -> None:
        self.by, self.noise = by, noise
        self.own = np.random.default_rng(7)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index + self.by)]) + (torch.rand(1) + self.own.random() if self.noise else 0)


@pytest.mark.parametrize("noise", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_process_reads_the_batch_before_its_position_again(workers: int, noise: bool) -> None:
    def loader(by: int = 0) -> Cursor:
        return cursor_for(DataLoader(Moving(by, noise), 2, num_workers=workers))

    comparer, cursor = Recorded(), loader()
    cursor.open_epoch()
    for batch in range(3):
        comparer.digests[batch] = Digest(cursor.next()).value
    state, random_states = cursor.state_dict(), rng.capture()
    expected = [repr(cursor.next()) for _ in range(3)]
    cursor.close()

    resumed = loader()
    resumed.comparer = comparer
    resumed.load_state_dict(state)
    rng.restore(random_states)
    assert [repr(resumed.next()) for _ in range(3)] == expected, "and draws nothing by that"
    assert comparer.asked == ([] if noise and not workers else [2])
    resumed.close()

    if workers or not noise:
        moved = loader(by=1)
        moved.comparer = comparer
        moved.load_state_dict(state)
        with pytest.raises(RunDoesNotFit, match="moved"):
            moved.next()
        moved.close()


class Masking:
    """Its draws are from a generator that its first call makes, as transformers' collator that masks words has one."""

    generator: torch.Generator | None = None

    def __call__(self, samples: list[int]) -> Any:
        self.generator = self.generator or torch.Generator().manual_seed(7)
        return torch.tensor(samples), torch.rand(len(samples), generator=self.generator)


def read(cursor: Cursor, count: int) -> list[Any]:
    """The next batches; an epoch is opened where none is open."""
    found: list[Any] = []
    while len(found) < count:
        if not cursor.opened:
            cursor.open_epoch()
        with contextlib.suppress(StopIteration):
            found.append(cursor.next())
    return found


@pytest.mark.parametrize("place", ["in an epoch", "in an epoch, nothing to compare with", "between two epochs"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_a_collator_makes_at_its_first_call_goes_with_the_position(workers: int, place: str) -> None:
    def loader() -> Cursor:
        return cursor_for(DataLoader(Numbers(8), 2, num_workers=workers, collate_fn=Masking()))

    comparer, cursor = Recorded(), loader()
    cursor.open_epoch()
    first = cursor.state_dict()
    for batch in range(3):
        comparer.digests[batch] = Digest(read(cursor, 1)[0]).value
    if place == "between two epochs":
        read(cursor, 1)
        with pytest.raises(StopIteration):
            cursor.next()
    state, random_states = cursor.state_dict(), rng.capture()
    expected = repr(read(cursor, 5))
    cursor.load_state_dict(state)
    rng.restore(random_states)
    assert repr(read(cursor, 5)) == expected, "in the same process"
    cursor.load_state_dict(first)
    assert [Digest(read(cursor, 1)[0]).value for _ in range(3)] == [*comparer.digests.values()], "to its beginning"
    cursor.close()

    resumed = loader()
    resumed.comparer = comparer if place == "in an epoch" else None
    resumed.load_state_dict(state)
    rng.restore(random_states)
    assert resumed.state_dict()["data_generators"] == state["data_generators"], "before the first batch is read"
    assert repr(read(resumed, 5)) == expected
    assert comparer.asked == ([2] if workers and resumed.comparer else [])
    resumed.close()


def test_a_data_set_that_follows_the_epoch_may_give_another_batch_before_an_epoch_s_start() -> None:
    data = Told(8)
    cursor, comparer = cursor_for(DataLoader(data, 2)), Recorded()
    cursor.comparer = comparer
    cursor.open_epoch()
    for batch in range(4):
        comparer.digests[batch] = Digest(cursor.next()).value
    with pytest.raises(StopIteration):
        cursor.next()
    cursor.open_epoch()
    data.by = 1.0
    cursor.load_state_dict(cursor.state_dict())
    for batch in range(4, 8):
        comparer.digests[batch] = Digest(cursor.next()).value
    assert comparer.asked == [0, 4]


class Counting(Numbers):
    reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index * self.reads


class InClosure(Numbers):
    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(5)
        self.draw = lambda: float(generator.normal())

    def __getitem__(self, index: int) -> Any:
        return index + self.draw()


class Told(Numbers):
    by = 0.0

    def __getitem__(self, index: int) -> Any:
        return index + self.by


@pytest.mark.parametrize(("data", "workers"), [(Counting, 0), (InClosure, 0), (Told, 0), (InClosure, 1)])
def test_data_that_do_not_come_back_are_refused_behind_the_first_batch_of_a_run(
    data: Callable[[], Any], workers: int
) -> None:
    """And not by a rollback in the middle of a night."""
    told, comparer = data(), Recorded()
    cursor = cursor_for(DataLoader(told, 2, num_workers=workers))
    cursor.comparer = comparer
    cursor.open_epoch()
    comparer.digests[0] = Digest(cursor.next()).value
    told.by = 0.5
    with pytest.raises(UsageError, match="another one when it is read again"):
        cursor.next()
    cursor.close()


class FromThirdBatch(Numbers):
    """Depends on a count of its reads, for which nothing has shown at first."""

    reads = 0

    def __getitem__(self, index: int) -> int:
        self.reads += index > 5
        return index * (1 + self.reads)


@pytest.mark.parametrize("passes_over", [False, True])
@pytest.mark.parametrize(("data", "back_to"), [(Told, 3), (FromThirdBatch, 4)])
def test_data_that_do_not_come_back_are_refused_behind_a_rollback(
    data: Callable[[], Any], back_to: int, passes_over: bool
) -> None:
    """Where all batches up to the incident are passed over, the draw log knows none of those that come."""
    told, comparer = data(), Recorded()
    cursor = cursor_for(DataLoader(told, 2))
    cursor.comparer = comparer
    cursor.open_epoch()
    for batch in range(5):
        if batch == back_to:
            state = cursor.state_dict()
        told.by = (batch > 1) * batch / 9
        comparer.digests[batch] = Digest(cursor.next()).value
    cursor.load_state_dict(state)
    with pytest.raises(RunDoesNotFit):
        cursor.skip() if passes_over else cursor.next()


def test_a_batch_that_was_passed_over_is_not_read_again() -> None:
    cursor = cursor_for(DataLoader(Numbers(forbidden=frozenset({4})), 2))
    cursor.open_epoch()
    for _ in range(2):
        last = cursor.next()
    state = cursor.state_dict()
    resumed = cursor_for(DataLoader(Numbers(forbidden=frozenset({4})), 2))
    resumed.comparer = Recorded()
    resumed.comparer.digests |= {1: Digest(last).value, 2: 0}
    resumed.load_state_dict(state)
    resumed.skip()
    assert resumed.next().tolist() == [6, 7]
    assert resumed.comparer.asked == [1]


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: ConcatDataset([part])])
def test_a_split_without_a_seed_is_another_data_set(wrap: Callable[[Any], Any]) -> None:
    def split(seed: int) -> Any:
        part, _ = random_split(Numbers(), [12, 11], torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return cursor_for(DataLoader(wrap(part), 3)).describe()

    assert split(1) == split(1)
    assert split(1) != split(2)


def test_a_shorter_epoch_than_before_is_refused() -> None:
    cursor = cursor_for(make_loader("in sequence"))
    cursor.open_epoch()
    for _ in range(5):
        cursor.skip()
    other = cursor_for(DataLoader(Numbers(9), 4))
    with pytest.raises(RunDoesNotFit, match="fewer batches"):
        other.load_state_dict(cursor.state_dict())


@pytest.mark.parametrize("offset", [0, 1])
def test_a_data_set_that_has_grown_since_then_is_refused_unless_the_script_makes_it_as_it_was(offset: int) -> None:
    data = Numbers(8)
    cursor = cursor_for(DataLoader(data, 4))
    cursor.open_epoch()
    for _ in range(offset):
        cursor.skip()
    before, left = cursor.state_dict(), skip_to_the_end(cursor)
    data.length = 12
    cursor.load_state_dict(before)
    with pytest.raises(RunDoesNotFit, match=r"another number of samples \(12, not 8\) than at the checkpoint"):
        cursor.skip()
    data.length = 8
    cursor.begin_pass()
    assert skip_to_the_end(cursor) == left


@pytest.mark.parametrize("sampler", [range(8), SubsetRandomSampler(range(8), torch.Generator().manual_seed(1))])
def test_a_data_set_may_outgrow_a_sampler_that_has_indices_alone(sampler: Any) -> None:
    data = Numbers(8)
    cursor = cursor_for(DataLoader(data, 4, sampler=sampler))
    cursor.open_epoch()
    before, left = cursor.state_dict(), skip_to_the_end(cursor)
    data.length = 12
    cursor.load_state_dict(before)
    assert skip_to_the_end(cursor) == left


class Backwards(Sampler[int]):
    def __init__(self, data: Numbers) -> None:
        self.data = data

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data) - 1, -1, -1))


def test_a_sampler_of_one_s_own_that_has_the_data_set_may_go_by_its_length() -> None:
    data = Numbers(8)
    cursor = cursor_for(DataLoader(data, 4, sampler=Backwards(data)))
    cursor.open_epoch()
    before = cursor.state_dict()
    data.length = 12
    cursor.load_state_dict(before)
    with pytest.raises(RunDoesNotFit):
        cursor.skip()


def test_a_batch_size_that_the_script_sets_in_front_of_each_epoch_may_be_set_again() -> None:
    def cursor_with(size: int) -> tuple[Cursor, Any]:
        batching = BatchSampler(RandomSampler(Numbers(), generator=torch.Generator().manual_seed(1)), size, False)
        return cursor_for(DataLoader(Numbers(), batch_sampler=batching)), batching

    cursor, batching = cursor_with(4)
    cursor.open_epoch()
    for _ in range(5):
        cursor.skip()
    first, left = cursor.state_dict(), skip_to_the_end(cursor)
    batching.batch_size = 6
    cursor.open_epoch()
    cursor.skip()
    second, later = cursor.state_dict(), skip_to_the_end(cursor)

    cursor.load_state_dict(first)
    with pytest.raises(RunDoesNotFit, match="fewer batches"):
        cursor.skip()
    batching.batch_size = 4
    cursor.begin_pass()
    assert skip_to_the_end(cursor) == left

    resumed, batching = cursor_with(4)
    resumed.load_state_dict(second)
    told = resumed.state_dict()  # of a checkpoint that is taken before the first batch is asked for
    assert told["last_indices"] == second["last_indices"]
    batching.batch_size = 6
    resumed.begin_pass()
    assert skip_to_the_end(resumed) == later


@any_workers
def test_a_batch_size_that_is_changed_in_the_midst_of_an_epoch_is_refused(workers: dict[str, Any]) -> None:
    batching = BatchSampler(RandomSampler(Numbers()), 4, False)
    cursor = cursor_for(DataLoader(Numbers(), batch_sampler=batching, **workers))
    cursor.open_epoch()
    cursor.next()
    batching.batch_size = 6
    with pytest.raises(UsageError, match="changed from 4 to 6 in the midst of an epoch"):
        cursor.next()
    batching.batch_size = 4
    for _ in range(5):
        cursor.next()
    batching.batch_size = 6  # for the epoch to come
    with pytest.raises(StopIteration):
        cursor.next()


def test_the_data_are_described_by_what_tells_another_data_set() -> None:
    assert cursor_for(make_loader("shuffled")).describe() == {
        "kind": "map-style",
        "length": 23,
        "batch_size": 4,
        "drop_last": False,
        "sampler": "RandomSampler",
        "batches": 6,
    }
    assert cursor_for(make_loader("uneven batches")).describe()["sampler"] == "Buckets"


@pytest.mark.parametrize(("shares", "told"), [(1, None), (2, 2)])
def test_how_many_share_the_data_is_told_where_not_each_rank_has_a_share(shares: int, told: int | None) -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(8), shares, 0)
    with one_rank():
        assert cursor_for(DataLoader(Numbers(8), 4, sampler=sampler)).describe().get("shares") == told


@pytest.mark.parametrize("name", ["shuffled by a generator", "distributed", "uneven batches"])
def test_a_position_is_a_tree_that_a_checkpoint_can_hold(name: str) -> None:
    cursor = cursor_for(make_loader(name))
    cursor.open_epoch()
    cursor.next()
    state = cursor.state_dict()
    json.dumps(state, default=lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf)
    kept = copy.deepcopy(state)
    skip_to_the_end(cursor)
    assert repr(state) == repr(kept), "and later batches do not change it"


def test_batches_are_refused_while_no_epoch_is_open() -> None:
    cursor = cursor_for(make_loader("shuffled"))
    with pytest.raises(RuntimeError, match="open_epoch"):
        cursor.next()


class Growing(Sampler[list[int]]):
    """Of epoch e it has e + 1 batches."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.epoch + 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * place, 2 * place + 1] for place in range(len(self))])


def test_each_epoch_ends_where_its_sampler_says_also_behind_a_way_back() -> None:
    sampler = Growing()
    cursor = cursor_for(DataLoader(Numbers(), batch_sampler=sampler))
    ends, states = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        cursor.open_epoch()
        states.append(cursor.state_dict())
        ends.append((cursor.epoch_batches, cursor.epoch_end))
        skip_to_the_end(cursor)
        assert cursor.epoch_end == cursor.batch
    assert ends == [(1, 1), (2, 3), (3, 6)]
    cursor.load_state_dict(states[1])
    assert (cursor.epoch_batches, cursor.epoch_end) == ends[1]


class ByWorker(Numbers):
    """Sample i is i and the number of the worker that has read it. failing: a worker, and its read of sample 0 that
    raises."""

    def __init__(self, failing: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.reads, self.failing = 0, failing

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        self.reads += index == 0
        if index == 0 and (info.id, self.reads) == self.failing:
            raise OSError("the disk was away for a moment")
        return index, info.id


def test_what_cannot_be_compared_is_read_by_the_workers_that_would_have_read_it() -> None:
    cursor = cursor_for(DataLoader(ByWorker(), 2, num_workers=3))
    cursor.comparer = Recorded()  # which never knows anything
    cursor.open_epoch()
    got = [cursor.next() for _ in range(4)]
    cursor.close()
    assert [batch[0].tolist() for batch in got] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [batch[1][0].item() for batch in got] == [0, 1, 2, 0]


@pytest.mark.parametrize("failing", [(1, 1), (0, 2)])
def test_a_script_that_catches_what_reading_the_first_batch_again_raises_gets_the_second_one(
    failing: tuple[int, int],
) -> None:
    """Two workers read it, one of them twice."""
    cursor, comparer = cursor_for(DataLoader(ByWorker(failing), 2, num_workers=2)), Recorded()
    cursor.comparer = comparer
    cursor.open_epoch()
    comparer.digests[0] = Digest(cursor.next()).value
    with pytest.raises(OSError, match="away for a moment"):
        cursor.next()
    assert cursor.next()[0].tolist() == [2, 3]
    assert cursor.next()[0].tolist() == [4, 5]
    cursor.close()
