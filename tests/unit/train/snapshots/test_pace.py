"""How often snapshots are taken: what they cost stays within what was allowed, and the pace does not flutter."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from toy import facts

import rollback
from rollback.config import FIRST_PACE
from rollback.facts.training import Committed, Paced
from rollback.train.snapshots.schedule import CEILING, SnapshotPace

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


def test_a_pace_that_flutters_is_journalled_with_a_snapshot_and_not_with_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where steps take milliseconds: the journal of a small job could reach the limit within days."""

    def flutter(pace: SnapshotPace, stall: float, step_seconds: float) -> bool:
        pace.every = 430 - pace.every if pace.every != FIRST_PACE else 400
        return True

    monkeypatch.setattr(SnapshotPace, "measure", flutter)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(1, 4)] * 300, run=tmp_path / "run")
    for batch in guard:
        guard.observe(model(batch).square().mean())
        optimizer.step()
    guard.close()
    paced = facts(tmp_path / "run", Paced)
    assert 0 < len(paced) <= len(facts(tmp_path / "run", Committed))
    assert {fact.every for fact in paced} == {30}, "by which the snapshots came"
