"""The script's loop over epochs, led."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollback.trainers.adopt.epoch_loop import EpochLoop, EpochMoved, in_place_of


def begun(_: EpochLoop) -> None:
    """Somebody is told."""


def new_loop(numbers: range) -> EpochLoop:
    return EpochLoop(numbers, begun)


def going(*places: int) -> Callable[[int], Iterator[int]]:
    return lambda count: iter(places)


def test_it_is_the_range_as_long_as_nobody_steers() -> None:
    loop = EpochLoop(range(2, 8, 2), begun)
    assert (list(loop), loop.over, len(loop), loop.stop) == ([2, 4, 6], True, 3, 8)


def test_its_iteration_is_told_of_and_only_the_first_body_can_be_led() -> None:
    told: list[EpochLoop] = []
    loop = EpochLoop(range(3), told.append)
    bodies = iter(loop)
    assert told == [loop]
    assert not loop.at_first
    next(bodies)
    assert loop.at_first
    next(bodies)
    assert not loop.at_first


def test_a_steered_loop_goes_where_the_guard_says_and_is_over_with_it() -> None:
    loop = EpochLoop(range(10, 14), begun)
    bodies = iter(loop)
    assert next(bodies) == 10
    loop.follow(10, {10}, going(0, 1, 0, 2))
    assert not loop.at_first
    assert [(number, loop.again) for number in bodies] == [(11, False), (10, True), (12, False)]
    assert loop.over


def test_a_run_that_resumes_leaves_the_first_body_for_its_own() -> None:
    loop = EpochLoop(range(5), begun)
    bodies = iter(loop)
    next(bodies)
    with pytest.raises(EpochMoved):
        loop.follow(0, {0}, going(3, 4))
    assert [(number, loop.place) for number in bodies] == [(3, 3), (4, 4)]


def test_no_rank_stays_in_its_first_body_where_the_script_begins_elsewhere_on_another_one() -> None:
    """Else the others alone would come to the loader a second time, and ask of all ranks what that means."""
    loop = EpochLoop(range(3, 6), begun)
    bodies = iter(loop)
    assert next(bodies) == 3
    with pytest.raises(EpochMoved):
        loop.follow(0, {3, 0}, going(3, 4))
    assert [*bodies] == [3, 4]


def test_a_run_that_is_complete_has_no_body_at_all() -> None:
    loop = EpochLoop(range(2), begun)
    bodies = iter(loop)
    next(bodies)
    with pytest.raises(EpochMoved):
        loop.follow(0, {0}, going())
    assert [*bodies] == []
    assert loop.over


def test_a_script_that_begins_elsewhere_than_the_run_did_is_led_by_the_runs_numbers() -> None:
    loop = EpochLoop(range(4, 7), begun)
    bodies = iter(loop)
    next(bodies)
    counts: list[int] = []
    with pytest.raises(EpochMoved):
        loop.follow(1, {loop.first}, lambda count: counts.append(count) or iter([1, 3, 5]))  # type: ignore[func-returns-value]
    assert [(number, loop.place) for number in bodies] == [(2, 1), (4, 3), (6, 5)]
    assert counts == [6]


def test_a_body_that_has_begun_with_the_number_of_where_the_run_stands_goes_on() -> None:
    loop = EpochLoop(range(4, 7), begun)
    bodies = iter(loop)
    next(bodies)
    loop.follow(1, {loop.first}, going(3, 4))
    assert loop.place == 3
    assert [*bodies] == [5]


def test_a_bar_over_a_range_stays_the_script_s_bar_and_its_epochs_are_where_the_guard_says() -> None:
    bar: Any = pytest.importorskip("tqdm").trange(4, file=io.StringIO())
    bodies, loop = in_place_of(bar, new_loop)
    assert loop is not None
    assert next(bodies) == 0
    loop.follow(0, {0}, going(0, 1, 0))
    assert [*bodies] == [1, 0]
    assert bar.n == 3, "bodies"
    again, _ = in_place_of(bar, new_loop)
    assert [*again] == [0, 1, 2, 3], "what it goes over is its own"


def test_a_body_is_told_from_the_next_one_by_whether_it_has_taken_batches() -> None:
    loop = EpochLoop(range(3), begun)
    next(iter(loop))
    loop.taken = True
    assert next(loop) == 1
    assert not loop.taken


@pytest.mark.parametrize("numbers", [[0, 1], range(0), iter(range(3))])
def test_what_is_no_range_is_left_to_the_script(numbers: Any) -> None:
    assert in_place_of(numbers, new_loop) == (numbers, None)
