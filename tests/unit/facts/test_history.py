"""Folding facts: what is good, what is pending, what is skipped."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_run import attached, incident, rollback_plan
from rollback.errors import JournalDamaged
from rollback.facts.fact import InitialState
from rollback.facts.history import (
    Case,
    History,
    copy_of,
    fold,
    furthest_of,
    in_durable_ring,
    passed_over_by,
)
from rollback.facts.training import (
    Accepted,
    Advice,
    Answered,
    Attached,
    BecameGood,
    CheckpointLost,
    Committed,
    Concluded,
    Drained,
    Evicted,
    Fact,
    Fetched,
    Finished,
    Incident,
    JournalEntry,
    LeftDurableRing,
    PhaseAnnounced,
    Planned,
    Quarantined,
    Requested,
    Restored,
    SampleQuarantine,
    ScreenedOut,
    SkipAdded,
    Stopped,
    Window,
)

C0, C1, C2 = "c000000-s00000000", "c000001-s00000020", "c000002-s00000040"


def commit(name: str, step: int) -> Committed:
    return Committed(checkpoint=name, step=step, batch=2 * step, timeline=0, bytes=1, seconds=0.1)


def restored(number: int, name: str, step: int) -> Restored:
    return Restored(
        incident=number, checkpoint=name, step=step, batch=2 * step, steps_lost=9, seconds=0.1, route="in_process"
    )


def records(facts: Iterable[Fact], attempt: int = 1) -> list[JournalEntry]:
    return [
        JournalEntry(seq=seq, at="2030-01-01T00:00:00+00:00", attempt=attempt, fact=fact)
        for seq, fact in enumerate(facts)
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
    assert history.left_run_directory == {C0, C1}


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
    where = (
        rf"journal/train.jsonl, line {len(CHECKPOINTS) + 1} \({fact.kind}\) contradicts .*: incident: 1 is not reported"
    )
    with pytest.raises(JournalDamaged, match=where):
        fold(records([*CHECKPOINTS, fact]))


@given(st.integers(0, len(STORY)))
def test_folding_in_two_parts_is_folding_at_once(cut: int) -> None:
    at_once = fold(records(STORY))
    whole = records(STORY)
    in_parts = fold(whole[cut:], fold(whole[:cut], History()))
    assert in_parts == at_once


@given(st.integers(0, len(STORY)))
def test_what_a_copy_learns_changes_nothing_in_the_other(cut: int) -> None:
    whole = records(STORY)
    history = fold(whole[:cut])
    assert fold(whole[cut:], copy_of(history)) == fold(whole)
    assert history == fold(whole[:cut])


def test_a_copy_shares_nothing_that_can_change() -> None:
    plan = rollback_plan(1, C1, 20, None, screen=Window(first=40, last=101))
    drained = Drained(checkpoint=C1, step=20, place="file:///far", bytes=1, seconds=0.1)
    history = told(*STORY[:-3], plan, screened_out(90, 91, 111), drained, attached(C1, 20))

    def changeable(value: Any) -> Iterable[object]:
        if isinstance(value, (dict, list, set, History, Case)):
            yield value
        inner = vars(value) if isinstance(value, (History, Case)) else value
        for item in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
            yield from changeable(item)

    ours, theirs = ({id(item) for item in changeable(each)} for each in (history, copy_of(history)))
    assert len(ours) == len(theirs) > 15
    assert not ours & theirs


def test_a_checkpoint_that_has_left_a_ring_counts_again_once_it_is_copied_again() -> None:
    drained = Drained(checkpoint=C1, step=20, place="file:///far", bytes=1, seconds=0.1)
    left = LeftDurableRing(checkpoint=C1, place="file:///far", reason="the ring is full")
    assert in_durable_ring(told(drained, left)) == set()
    assert in_durable_ring(told(drained, left, drained)) == {C1}


# --- what became of incidents -----------------------------------------------------------------------------------------


def told(*facts: Fact) -> History:
    return fold(records(facts))


PLAN = rollback_plan(1, C1, 20, (40, 101))


@pytest.mark.parametrize(
    ("facts", "carried_out", "awaits"),
    [
        ([incident(1, 45, 49)], False, False),
        ([incident(1, 45, 49), PLAN], False, True),
        ([incident(1, 45, 49), PLAN, restored(1, C1, 20)], True, True),
        ([incident(1, 45, 49), PLAN.model_copy(update={"action": "retry"}), restored(1, C1, 20)], True, True),
        ([incident(1, 45, 49), PLAN.model_copy(update={"action": "stop"})], False, False),
        (STORY[-4:], True, False),
        ([incident(1, 45, 49, request="r"), PLAN, restored(1, C1, 20)], True, False),
    ],
)
def test_an_incident_awaits_its_outcome_from_its_plan_on_but_not_one_of_an_operator(
    facts: list[Fact], carried_out: bool, awaits: bool
) -> None:
    (case,) = told(*facts).cases
    assert (case.carried_out, case.awaits_outcome) == (carried_out, awaits)


def test_only_the_latest_incident_can_be_pending() -> None:
    later = rollback_plan(2, C0, 0, (0, 20))
    done = [incident(1, 45, 49), PLAN, restored(1, C1, 20)]
    assert told(*done, incident(2, 60, 61), later).pending == later
    assert told(incident(1, 45, 49), PLAN, incident(2, 60, 61), later, restored(2, C0, 0)).pending is None


def test_the_last_plan_is_that_of_a_trouble_and_not_one_that_was_only_observed_or_asked_for() -> None:
    observed = rollback_plan(2, C1, 20, (60, 70), action="observe")
    asked = rollback_plan(3, C1, 20, (80, 90))
    early = [incident(1, 45, 49), PLAN]
    later = [incident(2, 60, 61), observed, incident(3, 70, 71, request="r"), asked, incident(4, 80, 81)]
    assert told(*early, *later).last_plan == PLAN
    assert told(*later).last_plan is None
    again = rollback_plan(4, C0, 0, (0, 20))
    assert told(*early, *later, again).last_plan == again


def test_incidents_have_cost_what_rollbacks_skipped_that_answered_a_trouble() -> None:
    facts = [
        incident(1, 45, 49), PLAN,
        incident(2, 60, 61), rollback_plan(2, C1, 20, None, action="retry"),
        incident(3, 70, 71, request="r"), rollback_plan(3, C1, 20, (80, 90)),
        incident(4, 80, 81), rollback_plan(4, C1, 20, (90, 99), action="observe"),
        incident(5, 80, 81), rollback_plan(5, C1, 20, None),
        incident(6, 80, 81),
    ]  # fmt: skip
    history = told(*facts)
    assert history.skipped_by_incidents == [Window(first=40, last=101)]
    assert history.skip_list == [Window(first=40, last=101), Window(first=80, last=90)], (
        "what was asked for is in force"
    )


def test_a_request_is_found_by_its_name() -> None:
    history = told(incident(1, 45, 49, request="r"), incident(2, 50, 51, request="s"), incident(3, 60, 61))
    assert history.case_of("r") is history.cases[0]
    assert history.case_of("s") is history.cases[1]
    assert history.case_of("t") is None


# --- the course of a run ----------------------------------------------------------------------------------------------


def test_the_last_attempt_is_the_latest_that_has_left_a_line() -> None:
    assert fold([*records(STORY, attempt=3), *records(CHECKPOINTS, attempt=2)]).last_attempt == 3


FINISHED = Finished(step=60, batch=120, checkpoint=C2)


def test_a_run_has_come_to_its_end_until_it_goes_on_or_back() -> None:
    assert told(FINISHED).finished == FINISHED
    assert told(FINISHED).final == C2
    assert told(FINISHED, commit("c000003-s00000060", 60)).finished is None
    assert told(FINISHED, incident(1, 45, 49)).finished == FINISHED
    assert told(FINISHED, incident(1, 45, 49), PLAN).finished is None
    assert told(FINISHED, incident(1, 45, 49), PLAN.model_copy(update={"action": "observe"})).finished == FINISHED


def stopped(reason: str) -> Stopped:
    return Stopped.model_validate({"reason": reason, "step": 9, "batch": 18, "checkpoint": C1, "account": ""})


def test_a_structural_stop_stands_until_the_run_goes_on() -> None:
    assert told(stopped("structural")).given_up == stopped("structural")
    assert told(stopped("preempted")).given_up is None
    assert told(stopped("structural"), attached(C1, 20)).given_up is None
    assert told(attached(C1, 20), stopped("structural"), stopped("preempted")).given_up is None


def test_settings_are_those_of_the_last_attempt_and_how_often_the_script_had_written_that_of_the_first() -> None:
    def attach(writes: int | None, wrapped: str | None = "bare", **settings: object) -> Attached:
        return attached(C1, 20).model_copy(update={"writes": writes, "wrapped": wrapped, "settings": settings})

    history = told(attach(7, keep=3), attach(9, keep=4))
    assert (history.first_writes, history.settings) == ({"bare": 7}, {"keep": 4})
    assert told(attach(None), attach(8, None), attach(9), attach(17, "ddp")).first_writes == {"bare": 9, "ddp": 17}


def test_how_far_a_run_has_come_is_the_furthest_that_any_fact_reaches_whatever_was_undone() -> None:
    told_at = [attached(None, 0), *STORY, attached(C1, 20)]
    for count, furthest in ((0, None), (1, 0), (3, 20), (4, 40), (len(told_at), 40)):
        entries = records(told_at[:count])
        assert fold(entries).furthest == furthest_of(entries) == furthest


def test_a_run_keeps_what_it_began_with_and_that_it_has_begun() -> None:
    began = InitialState(
        path="w", layout="safetensors", files=1, bytes=1, hash="h", tensors=1, optimizer=0, left_aside=0
    )
    with_it, without = (attached(None, 0).model_copy(update={"init": init}) for init in (began, None))
    assert told(with_it, without).init == began
    assert told(without).init is None
    assert told(without).attached
    assert not told(*STORY).attached


def test_the_learning_rate_is_lowered_by_the_last_plan_that_lowers_it_and_is_carried_out() -> None:
    def lowers(number: int, factor: float, **changed: object) -> Planned:
        return rollback_plan(number, C1, 20, None, lower_rate=(factor, 200), **changed)

    story = [incident(1, 45, 49), lowers(1, 0.5), incident(2, 60, 61), PLAN.model_copy(update={"incident": 2})]
    assert told(incident(1, 45, 49), PLAN).lowered is None
    assert told(*story).lowered == lowers(1, 0.5)
    story += [incident(3, 70, 71), lowers(3, 0.25), incident(4, 80, 81), lowers(4, 0.125, action="observe")]
    assert told(*story).lowered == lowers(3, 0.25)


def test_what_was_good_and_is_found_damaged_may_be_sound_elsewhere() -> None:
    found = [Quarantined(checkpoint=name, reason="flipped bit") for name in (C1, C2)]
    assert told(*CHECKPOINTS, *found).spoiled == {C1}


def test_a_checkpoint_that_was_fetched_is_here_again_and_good() -> None:
    fetched = Fetched(checkpoint=C2, step=40, place="s3://b", bytes=1, seconds=0.1)
    history = told(commit(C2, 40), Evicted(checkpoint=C2, reason="full"), fetched)
    assert (history.left_run_directory, history.good) == (set(), {C2})


def test_what_leaves_the_fast_tier_is_not_gone() -> None:
    assert told(commit(C2, 40), Evicted(checkpoint=C2, reason="full", tier="fast")).left_run_directory == set()


def test_the_record_knows_what_was_let_go_and_what_was_lost() -> None:
    let_go, lost = Evicted(checkpoint=C2, reason="", tier="fast"), CheckpointLost(checkpoint=C1, tier="fast")
    assert told(*CHECKPOINTS, let_go, lost).restorable == [C0, C1]
    assert told(*STORY, Evicted(checkpoint=C1, reason="full")).restorable == [C0]


def test_what_the_run_was_told_and_has_told_is_remembered() -> None:
    request = Requested(request="r", order="rewind", to=4, skip=None, who="ada", why="", step=9, batch=18)
    answer = Answered(request="r", carried_out=True, text="done")
    sample = SampleQuarantine(batch=4, samples=(1,), added=(1,), released=(), who="w", why="")
    history = told(
        request, answer, Advice(code="c", text="t"), PhaseAnnounced(step=1, batch=2, phase=None), sample,
        Accepted(what="ranks", before={}, after={}),
    )  # fmt: skip
    assert (history.requests, history.answers) == ({"r": request}, {"r": answer})
    assert (history.advised, history.phases, history.quarantine) == ({"c"}, {2}, [sample])
    assert not history.other_data
    accepted = Accepted(what="data", before={}, after={})
    assert told(accepted, Accepted(what="ranks", before={}, after={})).other_data


windows = st.tuples(st.integers(0, 60), st.integers(0, 10)).map(lambda pair: Window(first=pair[0], last=sum(pair)))


@given(st.lists(windows, max_size=8))
def test_merged_windows_hold_the_same_batches_and_neither_touch_nor_overlap(given_windows: list[Window]) -> None:
    merged = Window.merged(given_windows)
    for batch in range(80):
        assert any(batch in window for window in merged) == any(batch in window for window in given_windows)
    assert all(one.last + 1 < other.first for one, other in pairwise(merged))


def screened_out(first: int, last: int, through: int) -> ScreenedOut:
    return ScreenedOut(
        incident=1, window=Window(first=first, last=last), verdict="spike", cause="loss", rule="stands-out-loss",
        value=6.5, threshold=3.25, explanation="loss 6.5", step=first // 2, timeline=1, through=through,
    )  # fmt: skip


def test_what_was_screened_out_is_skipped_and_makes_the_screen_longer_but_never_shorter() -> None:
    plan = rollback_plan(1, C1, 20, None, screen=Window(first=40, last=101))
    story = [*CHECKPOINTS, incident(1, 45, 49), plan, restored(1, C1, 20), screened_out(90, 91, 111)]
    history = fold(records([*story, screened_out(92, 93, 105)]))
    assert history.skip_list == history.skipped_by_incidents == [Window(first=90, last=91), Window(first=92, last=93)]
    assert history.last_plan is not None
    assert history.last_plan.screen == Window(first=40, last=111)
    assert history.last_plan.last == 111


def test_an_update_that_was_screened_out_without_a_screen_is_damage() -> None:
    story = [*CHECKPOINTS, incident(1, 45, 49), rollback_plan(1, C1, 20, (40, 101)), screened_out(90, 91, 111)]
    with pytest.raises(JournalDamaged, match="without a screen"):
        fold(records(story))


def given(first: int, last: int) -> SkipAdded:
    return SkipAdded(window=Window(first=first, last=last), who="settings", why="given at the start of an attempt")


def passed(history: History, *done: tuple[int, int]) -> list[tuple[int, int]]:
    found = passed_over_by(history, [Window(first=first, last=last) for first, last in done])
    return [(window.first, window.last) for window in found]


def test_of_a_window_that_was_given_late_the_batches_before_that_are_not_passed_over() -> None:
    late = [*CHECKPOINTS, given(10, 20), given(70, 90), given(200, 210)]  # where batch 80 is next
    assert passed(fold(records(late))) == [(80, 90), (200, 210)]
    assert passed(fold(records(late)), (75, 76), (80, 90)) == [(75, 76), (80, 90), (200, 210)]
    back = [*late, incident(1, 45, 49), rollback_plan(1, C1, 20, (60, 101))]
    assert passed(fold(records(back))) == [(60, 101), (200, 210)]
    further = [*late, incident(1, 45, 49), rollback_plan(1, C0, 0, (60, 101)), restored(1, C0, 0)]
    assert passed(fold(records(further))) == [(10, 20), (60, 101), (200, 210)]
    resumed = [*late, attached(C1, 20)]
    assert passed(fold(records(resumed))) == [(70, 90), (200, 210)]
    assert passed(fold(records([given(0, 0), given(9, 9)]))) == [(0, 0), (9, 9)], "of a run that has not begun"
