"""What a watched script counts its batches as, and how many of them it takes."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any, SupportsIndex, cast

import numpy as np
import pytest

from rollback.errors import RollbackError
from rollback.train.guard import Guard
from rollback.trainers.adopt.enumeration import Enumeration, ScriptProgress, limit

LENGTH = 4


def passes(progress: ScriptProgress, *places: list[int]) -> Iterator[int]:
    """Passes over a guard that hands out the batches of these places in the data."""
    for taken in places:
        progress.passes += 1
        for place in taken:
            epoch, in_epoch = divmod(place, LENGTH)
            progress.guard = cast(Guard, SimpleNamespace(batch=place, epoch=epoch, batch_in_epoch=in_epoch))
            progress.batches += 1
            yield place


@pytest.mark.parametrize(
    ("places", "numbers"),
    [
        ([[0, 1, 2, 3]], [0, 1, 2, 3]),
        ([[0, 1, 2, 1, 2, 3]], [0, 1, 2, 1, 2, 3]),
        ([[0, 1, 2, 3], [4, 5, 6, 7], [8]], [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ([[0, 1, 2, 3], [4, 5, 2, 3, 4, 5]], [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]),
        ([[], [], [9, 10], [12]], [9, 10, 12]),
    ],
    ids=["one pass", "a rollback", "passes without end", "a rollback over an epoch's start", "a resume"],
)
@pytest.mark.parametrize("start", [0, 1])
def test_batches_are_counted_as_if_there_had_been_no_rollback_and_no_resume(
    places: list[list[int]], numbers: list[int], start: int
) -> None:
    progress = ScriptProgress()
    assert [*Enumeration(progress, passes(progress, *places), start)] == [
        (start + number, place)
        for number, place in zip(numbers, (place for taken in places for place in taken), strict=True)
    ]


def test_behind_a_resume_epochs_of_different_lengths_are_counted_as_they_are() -> None:
    progress = ScriptProgress()

    def resumed() -> Iterator[int]:
        for place in range(23, 26):  # behind epochs of 10 and 11 batches, in the third one
            progress.guard = cast(Guard, SimpleNamespace(batch=place, epoch=2, batch_in_epoch=place - 21))
            progress.batches, progress.passes = progress.batches + 1, 3
            yield place

    assert [*Enumeration(progress, resumed())] == [(23, 23), (24, 24), (25, 25)]


def test_each_enumeration_of_one_pass_counts_the_epoch() -> None:
    progress = ScriptProgress()
    assert [*Enumeration(progress, passes(progress, []))] == []
    assert [number for number, _ in Enumeration(progress, passes(progress, [6, 7]))] == [2, 3]
    assert [number for number, _ in Enumeration(progress, passes(progress, [8, 9, 7, 8]))] == [0, 1, 3, 0]


def test_an_enumeration_that_begins_in_the_midst_of_a_pass_counts_from_there() -> None:
    progress = ScriptProgress()
    batches = passes(progress, [0, 1, 2, 3], [4, 5])
    next(batches)
    assert [number for number, _ in Enumeration(progress, batches)] == [0, 1, 2, 3, 4]


def test_items_of_several_batches_each_are_counted_as_they_come() -> None:
    """As a generator makes them that gathers the batches of an update."""
    progress = ScriptProgress()
    batches = passes(progress, [4, 5, 6, 7])
    assert [*Enumeration(progress, zip(batches, batches, strict=True))] == [(0, (4, 5)), (1, (6, 7))]


def test_what_is_no_batch_of_the_guard_is_counted_as_it_comes() -> None:
    progress = ScriptProgress()

    def both() -> Iterator[Any]:
        yield "looked at"
        yield from passes(progress, [2, 3])
        yield "evaluated"

    counted = Enumeration(progress, both())
    assert [number for number, _ in counted] == [0, 2, 3, 4]
    assert [*Enumeration(progress, "ab")] == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("count", [3, np.int64(3)])
@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ([[0, 1, 2, 3]], [0, 1, 2]),
        ([[0, 1, 0, 1, 2, 3]], [0, 1, 0, 1, 2]),
        ([[], [], [9, 10, 11]], [9, 10]),
        ([[0, 3]], [0]),
    ],
    ids=["one pass", "a rollback", "a resume", "the last one is skipped"],
)
def test_a_limit_holds_for_places_in_the_epoch_and_not_for_what_was_handed_out(
    places: list[list[int]], taken: list[int], count: SupportsIndex
) -> None:
    limited, numbered = ScriptProgress(), ScriptProgress()
    empty = iter(passes(limited, *places[:-1])), iter(passes(numbered, *places[:-1]))
    assert [[*batches] for batches in empty] == [[], []]
    batches = passes(limited, places[-1])
    assert [*limit(limited, islice, batches, count)] == taken
    assert [*batches] == places[-1][len(taken) + (taken == [0]) :]  # none is drawn behind the last one
    pairs = limit(numbered, zip, range(5, 8), passes(numbered, places[-1]), strict=False)
    assert [*pairs] == [(5 + place % LENGTH, place) for place in taken]


@pytest.mark.parametrize("count", [0, 2, 3])
def test_where_the_numbers_come_second_one_batch_is_drawn_behind_the_last_one(count: int) -> None:
    places, progress = [0, 1, 0, 1, 2, 3], ScriptProgress()
    batches = passes(progress, places)
    taken = {0: [], 2: [0, 1, 0, 1], 3: [0, 1, 0, 1, 2]}[count]
    pairs = limit(progress, zip, batches, range(5, 5 + count))
    assert [*pairs] == [(place, 5 + place) for place in taken]
    assert [*batches] == places[len(taken) + 1 :]
    assert progress.limited


def test_a_limit_of_many_passes_is_one_of_the_whole_data() -> None:
    progress = ScriptProgress()
    places = [0, 1, 2, 3], [4, 5, 2, 3, 4, 5, 6]
    assert [*limit(progress, islice, passes(progress, *places), 6)] == [0, 1, 2, 3, 4, 5]
    assert [*limit(ScriptProgress(), islice, "abc", 2)] == ["a", "b"]
    assert [*limit(ScriptProgress(), islice, "abc", None)] == ["a", "b", "c"]


def test_a_limit_of_one_pass_that_has_gone_back_over_its_start_ends_this_attempt() -> None:
    progress = ScriptProgress()
    assert [*limit(progress, islice, passes(progress, [0, 1, 2, 3]), 3)] == [0, 1, 2]
    batches = limit(progress, islice, passes(progress, [4, 5, 1, 2, 3]), 3)
    assert [next(batches) for _ in range(4)] == [4, 5, 1, 2]
    with pytest.raises(RollbackError, match="into an earlier epoch"):
        next(batches)


@pytest.mark.parametrize(
    ("places", "short"),
    [
        ([[0, 1, 2, 3]], False),
        ([[0, 1, 2, 3], [4, 5, 6, 7]], False),
        ([[1, 2, 3]], True),
        ([[0, 1, 2, 3], [4, 6, 7]], True),
        ([[0, 1, 2]], True),
        ([[0, 1, 2, 3], []], True),
        ([[]], True),
    ],
    ids=[
        "whole",
        "both whole",
        "a resume",
        "one is skipped",
        "the last one is skipped",
        "all are",
        "a resume, all are",
    ],
)
def test_a_pass_of_less_than_an_epoch_falls_short(places: list[list[int]], short: bool) -> None:
    progress, moved = ScriptProgress(), 0
    for number, taken in enumerate(places):
        in_hand = bool(moved)
        stands = SimpleNamespace(batch=moved - in_hand, batch_in_epoch=0, awaits_epoch=False, finished=False)
        progress.guard = cast(Guard, stands)
        progress.note_guard_pass(progress.guard)
        for place in taken:
            stands.batch, stands.batch_in_epoch = place, place % LENGTH
            progress.note_batch(progress.guard)
        moved = LENGTH * (number + 1)
        stands.batch, stands.batch_in_epoch = moved - 1, 0
    assert progress.falls_short() == short


@pytest.mark.parametrize(
    ("holds", "updates", "stale"),
    [(True, (), True), (True, (2,), True), (True, (3,), False), (False, (), False)],
    ids=["no update", "a batch behind one", "all in one", "no list"],
)
@pytest.mark.parametrize("next_batch", [True, False], ids=["a batch", "the end"])
def test_a_list_that_has_batches_of_an_update_that_is_undone_cannot_go_on(
    holds: bool, updates: tuple[int, ...], stale: bool, next_batch: bool
) -> None:
    acts: list[Callable[[object], object]] = []
    guard = cast(Guard, SimpleNamespace(batch=0, batch_in_epoch=0, on_rollback=acts.append))
    progress = ScriptProgress(holds=holds)
    progress.set_guard(guard)
    progress.note_guard_pass(guard)
    for number in range(3):
        progress.note_batch(guard)
        if number + 1 in updates:
            progress.note_update()
    (goes_back,) = acts
    goes_back(None)
    goes_on = partial(progress.note_batch, guard) if next_batch else progress.require_none_stale
    with pytest.raises(RollbackError, match="gathered for its next update") if stale else nullcontext():
        goes_on()
    progress.note_guard_pass(guard)
    progress.note_batch(guard)
