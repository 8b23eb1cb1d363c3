"""Which samples incidents have in common, and who stands in for those that are left out."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, SubsetRandomSampler

from rollback.facts.training import Incident, SampleQuarantine
from rollback.suspects import beside_later_ones, left_out_at, quarantine_after, suspects
from rollback.train.data.cursor import cursor_for
from rollback.train.data.quarantine import Replacements, unreadable


def incident(number: int, batch: int, samples: tuple[int, ...]) -> Incident:
    return Incident(
        incident=number, verdict="nonfinite", cause="loss", rule="r", value=None, threshold=None, explanation="",
        window=(), ranks=(), onset_step=batch, onset_batch=batch, detection_step=batch, detection_batch=batch,
        step=batch + 1, timeline=0, in_hand=True, samples=samples,
    )  # fmt: skip


def quarantine(**given: Any) -> SampleQuarantine:
    fields = {"batch": 0, "samples": (), "added": (), "released": (), "who": "w", "why": ""}
    return SampleQuarantine(**{**fields, **given})


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([], {}),
        ([(10, (1, 2, 3))], {}),
        ([(10, (1, 2)), (60, (3, 4))], {}),
        ([(10, (1, 2)), (60, (2, 3))], {2: (0, 1)}),
        # Two bad samples in turn, 1 and 5: each explains its own two.
        ([(10, (1, 2)), (30, (5, 6)), (60, (1, 3)), (90, (5, 7))], {1: (0, 2), 5: (1, 3)}),
        # 9 is in two batches by chance. It is let go when 1, which was left out later, explains one of them...
        ([(10, (1, 9)), (30, (5, 9))], {9: (0, 1)}),
        ([(10, (1, 9)), (30, (5, 9)), (60, (1, 3))], {1: (0, 2)}),
        # ... and the other one has its own.
        ([(10, (1, 9)), (30, (5, 9)), (60, (1, 3)), (90, (5, 7))], {1: (0, 2), 5: (1, 3)}),
        # Of two that explain as many, the one with the later ones counts: what was left out meanwhile has not done it.
        ([(10, (1,)), (30, (2,)), (50, (2,)), (70, (1,)), (90, (1, 2))], {1: (0, 3, 4), 2: (1, 2)}),
        # Those that cannot be told apart are all suspected.
        ([(10, (1, 2, 3)), (60, (2, 3, 4))], {2: (0, 1), 3: (0, 1)}),
        # The same batch again, after a replay, says nothing new.
        ([(10, (1, 2)), (10, (1, 2))], {}),
        ([(10, (1, 2)), (10, (1, 2)), (60, (2, 3))], {2: (1, 2)}),
        # What is not known of an incident speaks for nobody.
        ([(10, (1, 2)), (60, ()), (90, (2,))], {2: (0, 2)}),
    ],
)
def test_suspects(batches: list[tuple[int, tuple[int, ...]]], expected: dict[int, tuple[int, ...]]) -> None:
    assert suspects(incident(n, batch, samples) for n, (batch, samples) in enumerate(batches)) == expected


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_bad_samples_are_found_by_their_second_incident_whatever_else_the_batches_held(seed: int, count: int) -> None:
    """Of 4096 samples a few are bad; each epoch meets them again in other company, until they are left out."""
    dice = random.Random(seed)
    bad, told, left_out = set(dice.sample(range(4096), count)), [], set[int]()
    for epoch in range(count + 3):
        order = dice.sample(range(4096), 4096)
        for batch in range(256):
            samples = {*order[16 * batch : 16 * batch + 16]} - left_out
            if samples & bad:
                told.append(incident(len(told), 256 * epoch + batch, tuple(sorted(samples))))
                left_out = {*suspects(told)}
    assert bad <= left_out
    assert len(told) <= 2 * count + 2, "an innocent neighbour may be suspected by chance, and one incident more tells"


def test_orders_stand_beside_suspicion_and_what_was_let_go_by_order_stays_so() -> None:
    suspected = {1: (0, 1), 2: (0, 1)}
    assert quarantine_after([], suspected, 0) == (1, 2)
    assert quarantine_after([quarantine(added=(7,))], suspected, 0) == (1, 2, 7)
    assert quarantine_after([quarantine(added=(7,)), quarantine(released=(7, 2))], suspected, 0) == (1,)
    assert quarantine_after([quarantine(released=(2,)), quarantine(added=(2,))], {}, 0) == (2,)
    assert quarantine_after([quarantine(added=(1, 2), incident=3)], {}, 0) == (), "what was suspected is so no longer"
    for_later = [quarantine(batch=24, added=(7,)), quarantine(batch=40, released=(7,))]
    assert [quarantine_after(for_later, {5: (0, 1)}, batch) for batch in (23, 24, 40)] == [(5,), (5, 7), (5,)]


def test_the_next_sample_that_is_not_left_out_stands_in() -> None:
    replacements = Replacements([(0, frozenset({3, 4})), (5, frozenset({9}))], 10)
    assert replacements.instead([1, 3, 4, 9], 4) == [1, 5, 5, 9]
    assert replacements.instead([1, 3, 4, 9], 5) == [1, 3, 4, 0]
    assert replacements.instead(3, 0) == 5
    assert replacements.instead(["a", (3, 1)], 0) == ["a", (3, 1)], "no indices"
    assert Replacements([(0, frozenset(range(10)))], 10).instead([1], 0) == [1]


def test_what_was_decided_last_holds_from_its_batch_on() -> None:
    """A rollback further back may decide anew for batches that an earlier decision was for."""
    replacements = Replacements([(500, frozenset({1})), (450, frozenset({1, 2}))], 10)
    assert [replacements.instead([1, 2], batch) for batch in (449, 450, 600)] == [[1, 2], [3, 3], [3, 3]]


class Readable(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return index


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise ValueError(index)
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_as_many_and_as_large_and_a_resume_finds_its_place(workers: int) -> None:
    listed = [(3, frozenset({13})), (7, frozenset({13, 30}))]

    def read(position: int | None = None, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        cursor = cursor_for(DataLoader(Numbers(), batch_size=4, num_workers=workers))
        cursor.leave_out(listed)
        if state is None:
            cursor.open_epoch()
        else:
            cursor.load_state_dict(state)
        taken = [cursor.next().tolist() for _ in range((position or 10) - cursor.batch)]
        kept = cursor.state_dict()
        cursor.close()
        return taken, kept

    whole, _ = read()
    assert [len(batch) for batch in whole] == [4] * 10
    assert whole[3] == [12, 14, 14, 15]
    assert whole[7] == [28, 29, 31, 31]
    for position in (4, 8):
        before, state = read(position)
        assert before + read(state=state)[0] == whole


HELD_OUT = frozenset(range(1, 40, 3))


class InGroups(Sampler[list[int]]):
    """Batches of four, each of ten samples that belong together, as those of one length; some are held out."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in (20, 0, 30, 10):
            group = [first + int(number) for number in torch.randperm(10) if first + int(number) not in HELD_OUT]
            for start in range(0, 6, self.size):
                yield group[start : start + self.size]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [3, 1])
def test_of_a_sampler_of_a_part_a_sample_that_it_gives_stands_in(size: int, workers: int) -> None:
    """The next one in the data set might be of the validation, or not fit into the batch."""
    left_out = frozenset({0, 3, 6, 9, 12, 15, 24})  # all but two of a group: its batches of one have none left

    def read(position: int | None = None, state: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        torch.manual_seed(0)
        cursor = cursor_for(DataLoader(Readable(), batch_sampler=InGroups(size), num_workers=workers))
        cursor.leave_out([(0, left_out)])
        if state is None:
            cursor.open_epoch()
        else:
            cursor.load_state_dict(state)
        taken = [cursor.next().tolist() for _ in range((position or 24 // size) - cursor.batch)]
        kept = cursor.state_dict()
        cursor.close()
        return taken, kept

    whole, _ = read()
    assert [len(batch) for batch in whole] == [size] * (24 // size)
    assert not {sample for batch in whole for sample in batch} & (HELD_OUT | left_out)
    if size > 1:
        assert all(len({sample // 10 for sample in batch}) == 1 for batch in whole), "they belong together"
    for position in (2, 3):
        before, state = read(position)
        assert before + read(state=state)[0] == whole


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(0, 40, 2)), SequentialSampler(range(20))])
def test_no_sample_is_taken_from_beyond_a_sampler_of_torch_s_own(sampler: Any) -> None:
    cursor = cursor_for(DataLoader(Readable(), batch_size=4, sampler=sampler))
    given = {*sampler}
    cursor.leave_out([(0, frozenset({0, 18, 19}))])
    cursor.open_epoch()
    assert {sample for _ in range(5) for sample in cursor.next().tolist()} <= given - {0, 18, 19}


def test_who_stands_in_goes_by_the_length_that_the_data_set_has_in_the_epoch() -> None:
    """A resume begins with the data set as the script makes it, and not as it was when the sample was left out."""

    class Growing(Readable):
        length = 8

        def set_epoch(self, epoch: int) -> None:
            self.length = 8 * (epoch + 1)

        def __len__(self) -> int:
            return self.length

    def read(*, late: bool) -> list[Any]:
        data = Growing()
        cursor = cursor_for(DataLoader(data, batch_size=4))
        if not late:
            cursor.leave_out([(0, frozenset({7, 11}))])
        taken = []
        for epoch in range(2):
            data.set_epoch(epoch)
            if late and epoch:
                cursor.leave_out([(0, frozenset({7, 11}))])
            cursor.open_epoch()
            taken = [cursor.next().tolist() for _ in range(2 * (epoch + 1))]
        return taken

    assert read(late=False) == read(late=True) == [[0, 1, 2, 3], [4, 5, 6, 8], [8, 9, 10, 12], [12, 13, 14, 15]]


def test_what_a_worker_has_read_ahead_is_read_again_without_it() -> None:
    cursor = cursor_for(DataLoader(Numbers(), batch_size=4, num_workers=2))
    cursor.open_epoch()
    cursor.next()
    cursor.leave_out([(2, frozenset({8, 13}))])
    assert [cursor.next().tolist() for _ in range(3)] == [[4, 5, 6, 7], [9, 9, 10, 11], [12, 14, 14, 15]]
    cursor.close()


def test_what_cannot_be_read_is_told_from_the_rest_of_its_batch() -> None:
    assert unreadable(Numbers(), [11, 12, 13, 14]) == [13]


@given(st.data())
def test_an_order_changes_what_later_ones_say_by_its_own_samples_and_ends_none_of_them(data: st.DataObject) -> None:
    lists = st.frozensets(st.integers(0, 5))
    later = data.draw(st.lists(st.tuples(st.integers(0, 30), lists), max_size=5))
    facts = [quarantine(batch=batch, samples=tuple(sorted(samples))) for batch, samples in later]
    batch, added = data.draw(st.integers(0, 30)), data.draw(lists)
    released = data.draw(lists) - added
    here = ({*left_out_at(facts, batch)} | added) - released
    new = quarantine(batch=batch, samples=tuple(sorted(here)), added=tuple(added), released=tuple(released))
    after = [*facts, *beside_later_ones(facts, new)]
    for at in range(35):
        before = {*left_out_at(facts, at)}
        assert {*left_out_at(after, at)} == ((before | added) - released if at >= batch else before)


def test_what_goes_on_from_a_later_batch_is_told_with_its_own_change_and_whose_order_it_was() -> None:
    facts = [
        quarantine(batch=24, samples=(7,), added=(7,), who="settings"),
        quarantine(batch=40, samples=(), released=(7,), who="suspicion", incident=3),
    ]
    new = quarantine(batch=12, samples=(9,), added=(9,), who="ann@site", request="r")
    first, second, third = beside_later_ones(facts, new)
    assert first == new
    assert second == quarantine(batch=24, samples=(7, 9), added=(7,), who="ann@site", why="as before, by settings")
    assert third == quarantine(
        batch=40, samples=(9,), released=(7,), who="ann@site", why="as before, by suspicion", incident=3
    )
