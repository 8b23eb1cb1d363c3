"""Incidents from call to outcome: which plan answers, what an incident means for the one before it, how each ends."""

from pathlib import Path
from typing import Any

import pytest

from recorded_run import incident, rollback_plan
from rollback.config import Settings
from rollback.data_stream import DataStream
from rollback.facts.history import Case, fold
from rollback.facts.training import (
    Concluded,
    Incident,
    JournalEntry,
    Planned,
    Restored,
    SampleQuarantine,
    ScreenedOut,
    Window,
)
from rollback.policy import PolicyCheckpoint
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.rundir.requests import Request
from rollback.sentinel import NORM_COLLAPSE, Kind, Verdict
from rollback.sentinel.scaler import SCALE_COLLAPSE
from rollback.suspects import left_out_at
from rollback.train.comm.ranks import Ranks
from rollback.train.data.skips import SkipList
from rollback.train.incidents.cases import Cases
from rollback.train.run import AttachedRun

RING = [PolicyCheckpoint(CheckpointName.of(seq, 50 * seq), 50 * seq, 100 * seq, True) for seq in range(6)]
PER_STEP = 2  # as in recorded_run


class Pen:
    """Rank 0's, without a disk."""

    def __init__(self) -> None:
        self.facts: list[Any] = []
        self.said: list[str] = []

    def note(self, fact: Any, notice: str | None = None) -> None:
        self.facts.append(fact)
        self.said += [notice] if notice else []


class Run:
    """The cases of a run of which a part may have happened before this attempt."""

    def __init__(self, *past: Any, **settings: Any) -> None:
        self.settings = Settings(**{"max_skipped": "100%", "probation": 5, **settings})
        self.history = fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(past))
        self.pen: Any = Pen()
        run = AttachedRun(RunPaths(Path("nowhere")), Ranks(), self.settings, self.pen, self.history)
        self.skips = SkipList(run)
        self.cases = Cases(self.pen, self.settings, self.history, self.skips)

    def meets(self, found: Incident) -> Planned:
        """An incident is called and planned for, as the watch does it."""
        self.cases.called(found, PER_STEP)
        return self.cases.plan(found, RING, DataStream(PER_STEP))

    def answers(self, found: Incident) -> Planned:
        """... and the plan is carried out."""
        plan = self.meets(found)
        self.cases.carried_out(Case(found, plan), plan.step or 0)
        return plan

    def healthy(self, steps: int, last_batch: int = 0) -> None:
        for step in range(steps):
            self.cases.judge(True, step, last_batch, PER_STEP)

    def told(self, kind: type[Any]) -> list[Any]:
        return [fact for fact in self.pen.facts if isinstance(fact, kind)]

    def outcomes(self) -> list[tuple[int, str, int]]:
        return [(fact.incident, fact.outcome, fact.step) for fact in self.told(Concluded)]


def restored(number: int, plan: Planned) -> Restored:
    return Restored(
        incident=number, checkpoint=plan.checkpoint or "", step=plan.step or 0, batch=plan.batch or 0, steps_lost=1,
        seconds=0.1, route="relaunch",
    )  # fmt: skip


def test_incidents_are_numbered_on_from_those_of_earlier_attempts() -> None:
    run = Run(incident(0, 230, 233), incident(1, 240, 243))
    assert [run.cases.next_number() for _ in range(3)] == [2, 3, 4]


def test_a_plan_is_in_the_journal_when_it_is_returned_and_is_open_once_it_was_carried_out() -> None:
    run = Run()
    plan = run.meets(incident(0, 230, 233))
    assert run.told(Planned) == [plan]
    assert run.cases.last_plan is None, "it is not carried out yet"
    run.cases.carried_out(Case(incident(0, 230, 233), plan), 200)
    assert run.cases.last_plan == plan
    assert run.outcomes() == []


def test_an_open_incident_has_ended_well_at_the_first_healthy_step_beyond_the_horizon() -> None:
    run = Run(horizon=100)
    plan = run.answers(incident(0, 230, 233))
    assert plan.skip is not None
    end = plan.skip.last + 100 * PER_STEP
    run.cases.judge(True, 340, end, PER_STEP)
    assert run.outcomes() == []
    run.cases.judge(False, 341, end + 2, PER_STEP)
    assert run.outcomes() == [], "a step that is not healthy proves nothing"
    run.cases.judge(True, 342, end + 1, PER_STEP)
    assert run.outcomes() == [(0, "recovered", 342)]
    run.cases.judge(True, 343, end + 3, PER_STEP)
    assert len(run.outcomes()) == 1


def test_a_replay_in_which_the_trouble_does_not_come_back_is_called_not_reproduced() -> None:
    run = Run(retry_first=True, horizon=10)
    assert run.answers(incident(0, 230, 233)).action == "retry"
    run.cases.judge(True, 300, 467 + 10 * PER_STEP + 1, PER_STEP)
    assert run.outcomes() == [(0, "not_reproduced", 300)]


def test_the_same_trouble_within_the_horizon_ends_the_open_incident_as_repeated() -> None:
    run = Run()
    run.answers(incident(0, 230, 233))
    again = run.answers(incident(1, 260, 263))
    assert run.outcomes() == [(0, "repeated", 263)]
    assert again.escalation == 1
    assert again.repeats == 0


def test_another_trouble_beyond_the_horizon_leaves_the_open_incident_to_its_healthy_steps() -> None:
    run = Run(horizon=10)
    run.answers(incident(0, 230, 233))
    other = run.meets(incident(1, 900, 903))
    assert run.outcomes() == []
    assert (other.escalation, other.repeats) == (0, None)


def test_another_bad_batch_soon_after_one_is_no_repeat_and_the_first_has_ended_well() -> None:
    run = Run()
    run.answers(incident(0, 130, 130, in_hand=True))
    run.meets(incident(1, 160, 160, in_hand=True))
    assert run.outcomes() == [(0, "recovered", 160)]


def test_a_replay_ends_as_not_reproduced_where_what_comes_next_is_another_occasion() -> None:
    """The retry of a batch that did it alone: another such batch, out of its reach, speaks for the retry."""
    first, retry = incident(0, 130, 130, in_hand=True), rollback_plan(0, RING[2].name, 100, (260, 261), in_hand=True)
    run = Run(first, retry.model_copy(update={"action": "retry"}))
    run.cases.called(incident(1, 160, 160, in_hand=True), PER_STEP)
    assert run.outcomes() == [(0, "not_reproduced", 160)]


def test_a_plan_that_an_earlier_attempt_made_is_open_and_repeats_are_measured_by_it() -> None:
    plan = rollback_plan(0, RING[4].name, 200, (400, 507))
    run = Run(incident(0, 230, 233), plan, restored(0, plan))
    assert run.meets(incident(1, 260, 263)).escalation == 1
    assert run.outcomes() == [(0, "repeated", 263)]


def test_an_incident_that_has_ended_is_not_ended_again() -> None:
    plan = rollback_plan(0, RING[4].name, 200, (400, 507))
    ended = Concluded(incident=0, outcome="recovered", step=300)
    run = Run(incident(0, 230, 233), plan, restored(0, plan), ended)
    run.healthy(9, last_batch=10**6)
    run.cases.called(incident(1, 260, 263), PER_STEP)
    run.cases.close(400)
    assert run.outcomes() == []


@pytest.mark.parametrize(("steps", "outcomes"), [(4, []), (5, [(0, "recovered", 260)]), (6, [(0, "recovered", 260)])])
def test_a_run_that_ends_before_the_horizon_has_recovered_if_probation_has_passed(
    steps: int, outcomes: list[Any]
) -> None:
    run = Run(probation=5)
    run.answers(incident(0, 230, 233))
    run.healthy(steps)
    run.cases.close(260)
    assert run.outcomes() == outcomes


def test_healthy_steps_of_an_earlier_attempt_do_not_count_for_the_probation_of_this_one() -> None:
    plan = rollback_plan(0, RING[4].name, 200, (400, 507))
    run = Run(incident(0, 230, 233), plan, restored(0, plan), probation=5)
    run.healthy(4)
    run.cases.close(260)
    assert run.outcomes() == []


def test_healthy_steps_are_counted_anew_after_one_that_was_not_and_after_a_rollback() -> None:
    run = Run(probation=5)
    run.healthy(20)
    run.answers(incident(0, 230, 233))
    run.healthy(4)
    run.cases.close(240)
    assert run.outcomes() == []
    run.cases.judge(False, 250, 0, PER_STEP)
    run.cases.close(251)
    assert run.outcomes() == []
    run.healthy(4)
    run.cases.close(256)
    assert run.outcomes() == []
    run.healthy(1)
    run.cases.close(257)
    assert run.outcomes() == [(0, "recovered", 257)]


def test_nothing_is_ended_where_nothing_is_open() -> None:
    run = Run()
    run.healthy(30, last_batch=10**6)
    run.cases.close(30)
    assert run.outcomes() == []


@pytest.mark.parametrize(
    ("settings", "ring", "action", "outcome"),
    [({"observe_only": True}, RING, "observe", "observed"), ({}, [], "stop", "no_checkpoint")],
)
def test_what_is_only_observed_and_what_stops_the_run_has_its_outcome_at_once(
    settings: dict[str, Any], ring: list[PolicyCheckpoint], action: str, outcome: str
) -> None:
    run = Run(**settings)
    plan = run.cases.plan(incident(0, 230, 233), ring, DataStream(PER_STEP))
    assert plan.action == action
    assert run.outcomes() == [(0, outcome, 233)]
    assert [type(fact) for fact in run.pen.facts] == [Planned, Concluded], "intent first"


def test_what_earlier_rollbacks_skipped_counts_against_what_incidents_may_cost() -> None:
    plan = rollback_plan(0, RING[0].name, 0, (0, 180))
    ended = Concluded(incident=0, outcome="recovered", step=150)
    past = (incident(0, 60, 63), plan, restored(0, plan), ended)
    free, dear = Run(max_skipped="5%"), Run(*past, max_skipped="5%")
    assert free.meets(incident(1, 230, 233)).action == "rollback"
    assert dear.meets(incident(1, 230, 233)).action == "stop"


def test_what_this_attempt_has_skipped_counts_too_but_no_batch_twice() -> None:
    run = Run(max_skipped="20%", horizon=1)
    for number in range(3):  # one window again and again
        run.cases.carried_out(Case(incident(number, 10, 13), rollback_plan(number, RING[0].name, 0, (0, 79))), 0)
    assert run.cases.plan(incident(4, 230, 233), RING, DataStream(PER_STEP)).action == "rollback"
    run.cases.carried_out(Case(incident(5, 50, 53), rollback_plan(5, RING[1].name, 50, (100, 199))), 50)
    assert run.cases.plan(incident(6, 230, 233), RING, DataStream(PER_STEP)).action == "stop"


# --- what an operator asks for ----------------------------------------------------------------------------------------


def request(**given: Any) -> Request:
    fields = {"order": "rewind", "to": 100, "who": "ada", "at": "2030-01-01T00:00:00+00:00"}
    return Request(**{**fields, **given})


def test_a_request_to_rewind_is_an_incident_of_the_operator_and_both_are_journalled_before_anything_is_done() -> None:
    run = Run(incident(0, 30, 33))
    skip = Window(first=250, last=260)
    asked, plan = run.cases.plan_request(
        "r1", request(why="bad shard", skip=skip), RING[2], RING, step=231, batch=462, timeline=3
    )
    assert run.pen.facts == [asked, plan]
    assert (asked.incident, asked.request, asked.verdict, asked.cause) == (1, "r1", "requested", "ada")
    assert (asked.explanation, asked.window, asked.ranks) == ("bad shard", (), ())
    assert (asked.onset_step, asked.onset_batch, asked.step) == (100, 200, 231)
    assert (asked.detection_step, asked.detection_batch) == (230, 461)
    assert (plan.checkpoint, plan.skip, plan.timeline, plan.through) == (RING[2].name, skip, 4, 461)


def test_a_request_before_the_first_step_and_without_a_reason_is_still_a_sound_incident() -> None:
    asked, _ = Run().cases.plan_request("r", request(to=0), RING[0], RING, step=0, batch=0, timeline=0)
    assert (asked.detection_step, asked.detection_batch) == (0, 0)
    assert asked.explanation == "no reason was given"


def test_what_an_operator_asked_for_is_done_when_it_is_done_and_no_later_trouble_is_its_repeat() -> None:
    run = Run()
    asked, plan = run.cases.plan_request("r", request(), RING[2], RING, step=231, batch=462, timeline=0)
    run.cases.carried_out(Case(asked, plan), 100)
    assert run.outcomes() == [(0, "carried_out", 100)]
    assert run.cases.last_plan is None
    assert run.meets(incident(1, 110, 113)).repeats is None


# --- samples that incidents have in common ----------------------------------------------------------------------------


def test_a_sample_of_two_incidents_is_left_out_from_behind_the_window_on_before_the_plan_is_journalled() -> None:
    run = Run()
    run.answers(incident(0, 130, 133, samples=(7, 8)))
    assert run.told(SampleQuarantine) == []
    plan = run.answers(incident(1, 330, 333, samples=(8, 9)))
    (fact,) = run.told(SampleQuarantine)
    assert (fact.samples, fact.added, fact.released, fact.who, fact.incident) == ((8,), (8,), (), "suspicion", 1)
    assert plan.skip is not None
    assert fact.batch == plan.skip.last + 1
    assert fact.why == "sample 8 is in incidents 0, 1"
    kinds = [type(fact) for fact in run.pen.facts]
    assert kinds.index(SampleQuarantine) < max(place for place, kind in enumerate(kinds) if kind is Planned)


def test_samples_of_earlier_attempts_are_remembered() -> None:
    run = Run(incident(0, 130, 133, samples=(7, 8)))
    run.meets(incident(1, 330, 333, samples=(8, 9)))
    assert [fact.samples for fact in run.told(SampleQuarantine)] == [(8,)]


def test_without_a_window_samples_are_left_out_from_behind_the_detection_on() -> None:
    run = Run(incident(0, 130, 133, samples=(7, 8)), retry_first=True)
    assert run.meets(incident(1, 330, 333, samples=(8, 9))).action == "retry"
    assert [fact.batch for fact in run.told(SampleQuarantine)] == [2 * 333 + 2]


def test_after_an_incident_in_the_very_first_batch_samples_are_left_out_from_the_second_on() -> None:
    run = Run(incident(0, 50, 53, samples=(7, 8)), retry_first=True)
    run.meets(incident(1, 0, 0, detection_batch=0, samples=(8, 9)))
    assert [fact.batch for fact in run.told(SampleQuarantine)] == [1]


def test_a_better_suspect_releases_one_that_was_innocent() -> None:
    run = Run(horizon=1)
    run.answers(incident(0, 30, 33, samples=(7, 8)))
    run.answers(incident(1, 130, 133, samples=(8, 9)))
    run.answers(incident(2, 230, 233, samples=(9, 10)))
    last = run.told(SampleQuarantine)[-1]
    assert (last.samples, last.added, last.released) == ((9,), (9,), (8,))
    assert last.why == "sample 9 is in incidents 1, 2; sample 8 is suspected no longer"
    run.answers(incident(3, 330, 333, samples=(9, 11)))
    assert len(run.told(SampleQuarantine)) == 2, "nothing has changed since"


def listed(batch: int, added: tuple[int, ...] = (), released: tuple[int, ...] = (), number: int | None = None) -> Any:
    return SampleQuarantine(
        batch=batch, samples=added, added=added, released=released, who="w", why="", incident=number
    )


def test_a_suspicion_ends_no_order_for_later_batches_and_begins_none_early() -> None:
    """As `--skips-of` gives them. The incident's window ends before batch 1,000."""
    run = Run(
        incident(0, 130, 133, samples=(7, 8)), listed(100, (3,)), listed(1000, (4,)), listed(2000, released=(3, 4))
    )
    run.meets(incident(1, 330, 333, samples=(8, 9)))
    begins = run.told(SampleQuarantine)[0].batch
    assert 660 < begins < 1000
    left_out = [left_out_at(run.skips.quarantine, batch) for batch in (100, begins, 999, 1000, 2000)]
    assert left_out == [(3,), (3, 8), (3, 8), (3, 4, 8), (8,)]
    assert [fact.why for fact in run.told(SampleQuarantine)][1:] == [
        "sample 4 as it was ordered", "sample 3 as it was ordered; sample 4 as it was ordered"
    ]  # fmt: skip


def test_what_was_suspected_for_batches_behind_a_rewind_is_so_no_longer_there_either() -> None:
    run = Run(
        incident(0, 130, 133, samples=(7, 8)), listed(5000, (6,), number=9), listed(6000, released=(6,), number=9)
    )
    run.meets(incident(1, 330, 333, samples=(8, 9)))
    assert [left_out_at(run.skips.quarantine, batch) for batch in (999, 5000, 6000)] == [(8,)] * 3


def test_what_is_left_out_already_is_not_said_again() -> None:
    run = Run(horizon=1)
    for number in range(4):
        run.answers(incident(number, 30 + 100 * number, 33 + 100 * number, samples=(8, 100 + number)))
    assert len(run.told(SampleQuarantine)) == 1


def test_nothing_is_left_out_where_that_is_switched_off() -> None:
    run = Run(incident(0, 130, 133, samples=(7, 8)), quarantine="off")
    run.meets(incident(1, 330, 333, samples=(8, 9)))
    assert run.told(SampleQuarantine) == []


def test_what_is_only_observed_or_stops_the_run_leaves_nothing_out() -> None:
    first = incident(0, 130, 133, samples=(7, 8))
    settings: dict[str, Any]
    for settings, ring in (({"observe_only": True}, RING), ({}, [])):
        run = Run(first, **settings)
        run.cases.called(found := incident(1, 330, 333, samples=(8, 9)), PER_STEP)
        run.cases.plan(found, ring, DataStream(PER_STEP))
        assert run.told(SampleQuarantine) == []


def test_a_trouble_that_a_suspected_sample_explains_is_no_repeat_of_the_one_before() -> None:
    run = Run(incident(0, 30, 33, samples=(7, 8)), horizon=100)
    run.answers(incident(1, 130, 133, samples=(20, 21)))
    plan = run.answers(incident(2, 160, 163, samples=(8, 9)))
    assert (plan.repeats, plan.escalation) == (None, 0)
    assert run.outcomes() == [(1, "recovered", 163)]


# --- in words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "ring", "said"),
    [
        ({}, RING, "restore step 200 (c000004-s00000200), skip batches 400:487: first answer"),
        ({"retry_first": True}, RING, "retry: restore step 200 (c000004-s00000200), skip nothing: first answer"),
        ({"observe_only": True}, RING, "would restore step 200 (c000004-s00000200), skip batches 400:487"),
        ({}, [], "stopping: no good checkpoint from before the onset is left"),
    ],
)
def test_people_are_told_what_is_planned(settings: dict[str, Any], ring: list[PolicyCheckpoint], said: str) -> None:
    run = Run(**settings)
    run.cases.plan(incident(0, 230, 233), ring, DataStream(PER_STEP))
    assert run.pen.said[0].startswith(said)


def stands_out(step: int) -> Verdict:
    return Verdict(Kind.SPIKE, step, step, "stands-out-loss", "loss", 6.5, 3.25, "loss 6.5")


def test_a_screen_lasts_from_the_restored_batch_until_nothing_stands_out_any_more() -> None:
    run = Run(policy="screen", horizon=10)
    assert not run.cases.screens(400)
    plan = run.answers(incident(0, 230, 233))
    assert plan.screen == Window(first=400, last=487)
    assert [run.cases.screens(batch) for batch in (399, 400, 487, 488)] == [False, True, True, False]
    fact = run.cases.screen_out(stands_out(240), Window(first=480, last=481), DataStream(PER_STEP), 1)
    assert fact is not None
    assert run.told(ScreenedOut) == [fact]
    assert (fact.window, fact.through) == (Window(first=480, last=481), 501)
    assert [run.cases.screens(batch) for batch in (501, 502)] == [True, False]
    run.cases.judge(True, 262, 501 + 10 * PER_STEP, PER_STEP)
    assert run.outcomes() == [], "the horizon begins behind the screen, however long that has become"
    run.cases.judge(True, 263, 502 + 10 * PER_STEP, PER_STEP)
    assert run.outcomes() == [(0, "recovered", 263)]


def test_a_screen_knows_the_level_at_which_its_trouble_began() -> None:
    run = Run(policy="screen", horizon=10)
    assert run.cases.fell_to is None
    run.answers(incident(0, 230, 233).model_copy(update={"window": (2.3, 0.4, 0.3, 0.2, 0.25)}))
    assert run.cases.fell_to == 0.3
    run.answers(incident(1, 250, 253).model_copy(update={"window": (1e-3, 1e-4), "rule": NORM_COLLAPSE}))
    assert run.cases.fell_to is None, "these are gradient norms"
    run.answers(incident(2, 270, 273).model_copy(update={"window": (2.0, 0.5), "rule": SCALE_COLLAPSE}))
    assert run.cases.fell_to is None, "these are scales"


def test_the_next_attempt_goes_on_in_the_screen() -> None:
    first = Run(policy="screen")
    found = incident(0, 230, 233)
    plan = first.answers(found)
    fact = first.cases.screen_out(stands_out(240), Window(first=480, last=481), DataStream(PER_STEP), 1)
    second = Run(found, plan, restored(0, plan), fact, policy="screen")
    assert second.cases.last_plan == first.cases.last_plan
    assert second.cases.screens(501)


def test_what_stands_out_is_not_skipped_where_incidents_would_cost_too_much() -> None:
    run = Run(policy="screen", max_skipped="0%")
    run.answers(incident(0, 230, 233))
    stream = DataStream(PER_STEP)
    allowed = (20 + 60) * PER_STEP + 20
    taken = [run.cases.screen_out(stands_out(200), Window(first=b, last=b + 1), stream, 1) for b in range(400, 600, 2)]
    assert [fact is not None for fact in taken] == [True] * (allowed // 2) + [False] * (100 - allowed // 2)
    assert len(run.pen.said) == 2, "the plan, and one line for all that stands out in a row"


def test_a_screened_update_takes_the_remainder_of_its_epoch_along_once() -> None:
    run = Run(policy="screen")
    run.answers(incident(0, 230, 233))
    stream = DataStream(PER_STEP, epoch_end=501, epoch_batches=101)
    first = run.cases.screen_out(stands_out(240), Window(first=480, last=481), stream, 1)
    second = run.cases.screen_out(stands_out(240), Window(first=483, last=484), stream, 1)
    assert first is not None
    assert second is not None
    assert (first.window.last, second.window.last) == (482, 484)
