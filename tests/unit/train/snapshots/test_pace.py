"""How often snapshots are taken: what they cost stays within what was allowed, and the pace does not flutter."""

from hypothesis import given
from hypothesis import strategies as st

from rollback.train.snapshots.pace import CEILING, SnapshotPace

seconds = st.floats(1e-4, 100.0)
overheads = st.floats(0.001, 1.0)


@given(overheads, st.integers(1, 200), seconds, seconds)
def test_the_cost_is_within_the_allowance_or_the_pace_at_its_ceiling(
    overhead: float, floor: int, stall: float, step: float
) -> None:
    pace = SnapshotPace(overhead, floor)
    pace.measure(stall, step)
    assert floor <= pace.every <= CEILING
    assert stall <= overhead * step * pace.every * (1 + 1e-9) or pace.every == CEILING


@given(overheads, st.integers(1, 200), st.lists(st.tuples(seconds, seconds), max_size=20))
def test_ranks_that_are_fed_alike_answer_alike(
    overhead: float, floor: int, measured: list[tuple[float, float]]
) -> None:
    one, other = SnapshotPace(overhead, floor), SnapshotPace(overhead, floor)
    assert [one.measure(*pair) for pair in measured] == [other.measure(*pair) for pair in measured]
    assert one.every == other.every


@given(overheads, st.integers(1, 200), seconds, seconds)
def test_the_same_measurement_again_changes_nothing(overhead: float, floor: int, stall: float, step: float) -> None:
    pace = SnapshotPace(overhead, floor)
    pace.measure(stall, step)
    assert not pace.measure(stall, step)


def test_what_was_not_measured_changes_nothing() -> None:
    pace = SnapshotPace(0.01, 25)
    assert not pace.measure(0.0, 1.0)
    assert not pace.measure(1.0, 0.0)
    assert pace.every == 50


def test_cheap_snapshots_come_as_often_as_probation_lets_them_and_dear_ones_seldom() -> None:
    pace = SnapshotPace(0.01, 25)
    assert pace.measure(0.001, 1.0)
    assert pace.every == 25
    assert pace.measure(1.0, 1.0)
    assert 100 <= pace.every <= 115
