"""Folding facts: what is good, what is pending, what is skipped."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_run import incident, rollback_plan
from rollback.errors import JournalDamaged
from rollback.events import (
    BecameGood,
    Committed,
    Concluded,
    Evicted,
    Fact,
    Incident,
    Planned,
    Quarantined,
    Record,
    Restored,
    SkipAdded,
    Window,
)
from rollback.rundir.history import History, fold, merge_windows

C0, C1, C2 = "c000000-s00000000", "c000001-s00000020", "c000002-s00000040"


def commit(name: str, step: int) -> Committed:
    return Committed(checkpoint=name, step=step, batch=2 * step, timeline=0, bytes=1, seconds=0.1)


def restored(number: int, name: str, step: int) -> Restored:
    return Restored(
        incident=number, checkpoint=name, step=step, batch=2 * step, steps_lost=9, seconds=0.1, route="in_process"
    )


def records(facts: Iterable[Fact], attempt: int = 1) -> list[Record]:
    return [
        Record(seq=seq, at="2030-01-01T00:00:00+00:00", attempt=attempt, fact=fact) for seq, fact in enumerate(facts)
    ]


CHECKPOINTS = [commit(C0, 0), commit(C1, 20), commit(C2, 40), BecameGood(checkpoint=C1, step=20)]
STORY: list[Fact] = [
    *CHECKPOINTS,
    incident(1, 45, 49),
    rollback_plan(1, C1, 20, (40, 101), discards=(C2,)),
    restored(1, C1, 20),
    Concluded(incident=1, outcome="recovered", step=150),
]


def test_nothing_has_happened_yet() -> None:
    history = fold([])
    assert (history.cases, history.timeline, history.last_attempt, history.pending) == ([], 0, 0, None)


def test_a_checkpoint_is_a_candidate_until_a_line_says_that_it_is_good_and_step_0_is_good_at_once() -> None:
    history = fold(records(CHECKPOINTS))
    assert history.good == {C0, C1}
    assert set(history.committed) == {C0, C1, C2}


def test_what_was_quarantined_is_good_no_more_and_what_was_evicted_may_be_kept_elsewhere() -> None:
    gone = [Evicted(checkpoint=C0, reason="the ring is full"), Quarantined(checkpoint=C1, reason="flipped bit")]
    history = fold(records([*CHECKPOINTS, *gone]))
    assert history.good == {C0}
    assert history.gone == {C0, C1}


@pytest.mark.parametrize("facts", range(len(CHECKPOINTS), len(STORY) + 1))
def test_a_rollback_is_pending_from_its_plan_to_its_restore(facts: int) -> None:
    history = fold(records(STORY[:facts]))
    planned = facts >= len(CHECKPOINTS) + 2
    done = facts >= len(CHECKPOINTS) + 3
    assert (history.pending is not None) == (planned and not done)
    assert history.timeline == (1 if planned else 0)
    assert history.discarded == ({C2} if planned else set())
    assert history.skip_list == ([Window(first=40, last=101)] if planned else [])


@pytest.mark.parametrize(
    ("action", "pending", "skips"), [("retry", True, 0), ("stop", False, 0), ("observe", False, 0)]
)
def test_only_a_rollback_skips_and_only_rollback_and_retry_are_carried_out(
    action: str, pending: bool, skips: int
) -> None:
    answer = rollback_plan(1, C1, 20, (40, 101), discards=(C2,)).model_copy(update={"action": action})
    history = fold(records([*CHECKPOINTS, incident(1, 45, 49), answer]))
    assert (history.pending is not None) == pending
    assert len(history.skip_list) == skips
    assert (C2 in history.discarded) == (action != "observe")


def test_a_checkpoint_beyond_the_restored_one_is_good_no_more() -> None:
    history = fold(records([*CHECKPOINTS, BecameGood(checkpoint=C2, step=40), *STORY[len(CHECKPOINTS) :]]))
    assert history.good == {C0, C1}


def test_a_plan_that_replaces_another_is_the_one_that_counts() -> None:
    facts = [
        *CHECKPOINTS, incident(1, 45, 49), rollback_plan(1, C1, 20, (40, 101)),
        Quarantined(checkpoint=C1, reason="damaged"), rollback_plan(1, C0, 0, (0, 101)),
    ]  # fmt: skip
    history = fold(records(facts))
    assert history.pending is not None
    assert history.pending.checkpoint == C0
    assert history.skip_list == [Window(first=0, last=101)]
    assert len(history.cases) == 1


def test_the_users_windows_are_in_the_skip_list_too() -> None:
    added = SkipAdded(window=Window(first=7, last=9), who="user", why="duplicates")
    assert fold(records([*STORY, added])).skip_list == [Window(first=7, last=9), Window(first=40, last=101)]


@pytest.mark.parametrize("fact", STORY[-3:])
def test_a_fact_about_an_incident_that_nobody_reported_is_damage(fact: Planned | Restored | Concluded) -> None:
    assert not isinstance(fact, Incident)
    with pytest.raises(JournalDamaged, match="incident 1"):
        fold(records([*CHECKPOINTS, fact]))


@given(st.integers(0, len(STORY)))
def test_folding_in_two_parts_is_folding_at_once(cut: int) -> None:
    at_once = fold(records(STORY))
    whole = records(STORY)
    in_parts = fold(whole[cut:], fold(whole[:cut], History()))
    assert in_parts == at_once


windows = st.tuples(st.integers(0, 60), st.integers(0, 10)).map(lambda pair: Window(first=pair[0], last=sum(pair)))


@given(st.lists(windows, max_size=8))
def test_merged_windows_hold_the_same_batches_and_neither_touch_nor_overlap(given_windows: list[Window]) -> None:
    merged = merge_windows(given_windows)
    for batch in range(80):
        assert any(batch in window for window in merged) == any(batch in window for window in given_windows)
    assert all(one.last + 1 < other.first for one, other in pairwise(merged))
