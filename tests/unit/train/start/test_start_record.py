"""What a start adds to the record of samples that are left out."""

import pytest

from rollback.config import SamplesFrom, Settings
from rollback.facts.training import Blamed, SampleQuarantine, Window
from rollback.train.start.start_record import given_too_late, left_out_by_order


def settings(*orders: tuple[int, tuple[int, ...]]) -> Settings:
    return Settings(skip_samples=tuple(SamplesFrom(batch=batch, samples=samples) for batch, samples in orders))


def blamed(*samples: int) -> Blamed:
    window = Window(first=8, last=8)
    return Blamed(
        window=window, batch=8, rank=0, step=4, fingerprint="f", error="E: torn", attempts=(1, 2), samples=samples
    )


def in_force(orders: list[SampleQuarantine]) -> list[tuple[int, tuple[int, ...]]]:
    return [(order.batch, order.samples) for order in orders]


AGAIN = [(10, (5,)), (20, ()), (30, (5,))]


def test_a_sample_that_was_left_out_released_and_left_out_again_is_so_from_each_batch_on() -> None:
    assert in_force(left_out_by_order([], settings(*AGAIN), [], 0)) == AGAIN


@pytest.mark.parametrize("batch", [0, 25, 90])
def test_a_later_start_adds_nothing_to_the_same_orders(batch: int) -> None:
    """Wherever the first one began, and whatever an operator has ordered since."""
    recorded = left_out_by_order([], settings(*AGAIN), [blamed(7)], batch)
    recorded.append(
        SampleQuarantine(batch=99, samples=(), added=(), released=(5, 7), who="ann@site", why="mended", request="r")
    )
    assert left_out_by_order(recorded, settings(*AGAIN), [blamed(7)], 120) == []


def test_of_orders_of_which_some_are_on_record_the_others_are_added() -> None:
    recorded = left_out_by_order([], settings(*AGAIN[:2]), [], 0)
    assert in_force(left_out_by_order(recorded, settings(*AGAIN), [], 0)) == AGAIN[2:]


def test_what_the_supervisor_leaves_out_ends_no_order_for_later_batches() -> None:
    recorded = left_out_by_order([], settings((10, (5,)), (20, ())), [], 0)
    new = left_out_by_order(recorded, settings((10, (5,)), (20, ())), [blamed(7)], 2)
    assert in_force(new) == [(8, (7,)), (10, (5, 7)), (20, (7,))]


def test_what_the_supervisor_blames_is_left_out_though_its_last_order_had_to_say_the_same_of_a_later_batch() -> None:
    """Else the sample raises in each attempt to come, and the record calls it left out."""
    orders = settings((10, (5,)), (20, ()))
    recorded = left_out_by_order([], orders, [], 0)
    recorded += left_out_by_order(recorded, orders, [blamed(7)], 2)
    again = blamed(5).model_copy(update={"window": Window(first=25, last=25), "batch": 25, "attempts": (3, 4)})
    assert in_force(left_out_by_order(recorded, orders, [blamed(7), again], 22)) == [(25, (5, 7))]


def test_of_whole_lists_the_one_that_is_given_last_counts_from_its_batch_on() -> None:
    """As a run has them that went back: `--skips-of` gives them in the order in which it had them."""
    lists = [(120, (5,)), (60, (5, 6))]
    assert in_force(left_out_by_order([], settings(*lists), [], 0)) == lists


@pytest.mark.parametrize(
    ("first", "last", "late"),
    [(60, 70, None), (10, 20, "10:20"), (50, 70, "50:59"), (30, 35, None), (30, 41, "30:41")],
)
def test_of_a_window_that_is_given_late_it_is_said_what_is_part_of_the_run_already(
    first: int, last: int, late: str | None
) -> None:
    said = given_too_late(Window(first=first, last=last), [Window(first=30, last=40)], 60)
    assert said == late or (late is not None and f": batches {late} are part of the run already" in (said or ""))
