"""Where a run goes on: the newest checkpoint after a crash, the planned one where a plan is pending."""

import pytest

from checkpoints import manifest_of
from recorded_run import attached, incident, rollback_plan
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import candidates, healthy_before, next_seq, of_present_timeline, on_record
from rollback.facts.history import History, fold
from rollback.facts.training import BecameGood, Committed, Evicted, Fact, Finished, JournalEntry, Restored
from rollback.rundir.metrics.metric_lines import Metric

RING = [manifest_of(seq, 20 * seq) for seq in range(4)]
NAMES = [manifest.name for manifest in RING]


def history_of(*facts: Fact) -> History:
    committed = [
        Committed(checkpoint=m.name, step=m.step, batch=m.batch, timeline=0, bytes=1, seconds=0.1) for m in RING
    ]
    good = BecameGood(checkpoint=NAMES[1], step=20)
    told = [*committed, good, *facts]
    return fold(JournalEntry(seq=seq, at="", attempt=1, fact=fact) for seq, fact in enumerate(told))


def restored(seq: int) -> Restored:
    return Restored(
        incident=1, checkpoint=NAMES[seq], step=20 * seq, batch=40 * seq, steps_lost=9, seconds=0.1, route="in_process"
    )


def plan_to(seq: int, action: str = "rollback", discards: tuple[str, ...] = ()) -> Fact:
    return rollback_plan(1, NAMES[seq], 20 * seq, (40, 99), discards=discards).model_copy(update={"action": action})


def names(manifests: list[Manifest]) -> list[str]:
    return [manifest.name for manifest in manifests]


def test_after_a_crash_the_newest_is_tried_first_good_or_not() -> None:
    assert names(candidates(history_of(), RING)) == NAMES[::-1]


@pytest.mark.parametrize("action", ["rollback", "retry"])
def test_with_a_plan_pending_the_planned_one_then_older_good_ones(action: str) -> None:
    history = history_of(incident(1, 45, 49), plan_to(2, action))
    assert names(candidates(history, RING)) == [NAMES[2], NAMES[1], NAMES[0]]


def test_with_a_plan_pending_only_what_is_good_and_older_than_the_planned_one_may_stand_in() -> None:
    good = [BecameGood(checkpoint=name, step=0) for name in NAMES]
    again = RING[2].model_copy(update={"name": "c000009-s00000040", "seq": 9})  # taken at the planned step once more
    good.append(BecameGood(checkpoint=again.name, step=40))
    history = history_of(*good[:1], *good[2:], incident(1, 45, 49), plan_to(2))
    assert names(candidates(history, [RING[0], RING[1], RING[2], RING[3]])) == [NAMES[2], NAMES[1], NAMES[0]]
    only_candidate = history_of(incident(1, 45, 49), plan_to(3))
    assert names(candidates(only_candidate, RING)) == [NAMES[3], NAMES[1], NAMES[0]], "the third was never good"
    assert names(candidates(history, [RING[0], again])) == [NAMES[0]], "it is not older"


def test_a_plan_that_goes_back_to_the_first_step_has_nothing_older() -> None:
    history = history_of(incident(1, 5, 9), plan_to(0))
    assert names(candidates(history, RING)) == [NAMES[0]]
    assert candidates(history, RING[1:]) == []


def test_several_that_were_taken_behind_an_epoch_come_last_newest_first() -> None:
    manifests = [RING[0], RING[1], *(manifest.model_copy(update={"over": True}) for manifest in RING[2:])]
    again = manifest_of(4, 80).model_copy(update={"over": True})
    expected = [NAMES[1], NAMES[0], again.name, NAMES[3], NAMES[2]]
    assert names(candidates(history_of(), [*manifests, again])) == expected


def test_what_no_rollback_on_record_leads_to_comes_last() -> None:
    unknown = manifest_of(4, 80).model_copy(update={"timeline": 1})
    expected = [NAMES[2], NAMES[1], NAMES[0], NAMES[3], unknown.name]
    over = RING[3].model_copy(update={"over": True})
    manifests = [*RING[:3], over, unknown]
    assert names(candidates(history_of(attached(None, 0)), manifests)) == expected
    known = history_of(attached(None, 0), incident(1, 45, 49), plan_to(3), restored(3))
    assert names(candidates(known, manifests))[0] == unknown.name
    assert names(candidates(history_of(), manifests))[0] == unknown.name, "without a record nothing can be told"


def test_a_planned_checkpoint_that_is_gone_gives_way_to_older_good_ones() -> None:
    history = history_of(incident(1, 45, 49), plan_to(2))
    assert names(candidates(history, [RING[0], RING[1], RING[3]])) == [NAMES[1], NAMES[0]]


def test_what_was_only_observed_changes_nothing() -> None:
    history = history_of(incident(1, 45, 49), plan_to(1, "observe", (NAMES[2], NAMES[3])))
    assert names(candidates(history, RING)) == NAMES[::-1]


def test_after_a_structural_stop_the_run_goes_on_before_the_onset() -> None:
    history = history_of(incident(1, 45, 49), plan_to(1, "stop", (NAMES[2], NAMES[3])))
    assert names(candidates(history, RING)) == [NAMES[1], NAMES[0]]


def test_what_a_rollback_cut_off_never_comes_back_listed_in_its_plan_or_not() -> None:
    """A checkpoint that was committed while the plan was written is not among its discards."""
    for discards in [(NAMES[2], NAMES[3]), (NAMES[2],), ()]:
        history = history_of(incident(1, 45, 49), plan_to(1, discards=discards), restored(1))
        assert names(of_present_timeline(history, RING)) == NAMES[:2]
        assert names(candidates(history, RING)) == [NAMES[1], NAMES[0]]


def test_of_two_with_one_number_the_later_step_is_the_newer_one_and_is_cut_off() -> None:
    """A last snapshot that was asked for while ranks trained on has the number of the snapshot that they took next."""
    ring = [*RING[:2], manifest_of(1, 23)]
    assert names(sorted([ring[2], *RING[:2]], key=lambda manifest: manifest.sort_key)) == [*NAMES[:2], ring[2].name]
    history = history_of(incident(1, 45, 49), plan_to(1), restored(1))
    assert names(of_present_timeline(history, ring)) == NAMES[:2]
    assert names(candidates(history, ring)) == [NAMES[1], NAMES[0]]


def test_what_a_plan_lists_is_cut_off_whatever_its_sequence_number() -> None:
    """After a crash the run may have gone on from an older checkpoint, so that a later name has the smaller step."""
    history = history_of(incident(1, 45, 49), plan_to(1, discards=(NAMES[0],)), restored(1))
    assert names(of_present_timeline(history, RING)) == [NAMES[1]]


def test_checkpoints_of_the_new_timeline_belong_to_the_run() -> None:
    history = history_of(incident(1, 45, 49), plan_to(1), restored(1))
    later = manifest_of(7, 60).model_copy(update={"timeline": 1})
    assert names(candidates(history, [*RING, later])) == [later.name, NAMES[1], NAMES[0]]


def test_by_the_record_a_run_may_go_on_from_what_was_committed_and_not_cut_off() -> None:
    assert on_record(History(), NAMES) == []
    assert on_record(history_of(), NAMES[::-1]) == NAMES
    assert on_record(history_of(), [NAMES[2], "c000099-s00000099"]) == [NAMES[2]]
    pending = history_of(incident(1, 45, 49), plan_to(1, discards=(NAMES[2],)))
    assert on_record(pending, NAMES) == NAMES[:2]
    done = history_of(incident(1, 45, 49), plan_to(1), restored(1))
    late = Committed(checkpoint="c000007-s00000060", step=60, batch=120, timeline=0, bytes=1, seconds=0.1)
    later = late.model_copy(update={"checkpoint": "c000008-s00000060", "timeline": 1})
    history = fold([JournalEntry(seq=9, at="", attempt=1, fact=fact) for fact in (late, later)], done)
    assert on_record(history, history.committed) == [*NAMES[:2], later.checkpoint], "not what was in the making then"


def test_a_ring_that_lost_everything_has_no_candidates() -> None:
    assert candidates(history_of(), []) == []


def test_sequence_numbers_never_come_back() -> None:
    """Also not those of checkpoints that have left the ring, or that only the disk knows of."""
    assert next_seq(History(), []) == 0
    assert next_seq(History(), ["c000004-s00000080"]) == 5
    assert next_seq(history_of(), []) == 4
    evicted = Evicted(checkpoint="c000009-s00000180", reason="beyond a restored checkpoint")
    assert next_seq(history_of(evicted), NAMES[:2]) == 10


def test_what_was_taken_behind_an_epoch_comes_last_unless_training_ended_there() -> None:
    end = RING[3].model_copy(update={"over": True})
    manifests = [*RING[:3], end]
    assert names(candidates(history_of(), manifests)) == [NAMES[2], NAMES[1], NAMES[0], NAMES[3]]
    finished = Finished(step=60, batch=120, checkpoint=NAMES[3])
    assert names(candidates(history_of(finished), manifests)) == NAMES[::-1]


def test_a_run_is_complete_until_it_goes_on_or_back() -> None:
    finished = Finished(step=60, batch=120, checkpoint=NAMES[3])
    later = Committed(checkpoint="c000004-s00000080", step=80, batch=160, timeline=0, bytes=1, seconds=0.1)
    assert history_of(finished).final == NAMES[3]
    assert history_of(finished, later).final is None
    assert history_of(finished, incident(1, 45, 49), plan_to(2)).final is None


def judged(*steps: int, verdict: str = "healthy", attempt: int = 1, timeline: int = 0) -> list[Metric]:
    return [
        Metric(step=step, batch=step, loss=1.0, grad_norm=None, verdict=verdict, attempt=attempt, timeline=timeline)
        for step in steps
    ]


def test_healthy_steps_in_front_of_a_step_are_counted_as_far_as_they_are_on_record() -> None:
    lines = judged(*range(3, 9))
    assert healthy_before(lines, 9, 0) == 6
    assert healthy_before(lines, 7, 0) == 4, "what comes behind it says nothing of it"
    assert healthy_before(lines, 10, 0) == 0, "the step right before it is not on record"
    assert healthy_before([line for line in lines if line.step != 5], 9, 0) == 3
    assert healthy_before([], 9, 0) == 0


def test_what_stood_out_or_was_judged_before_a_rollback_ends_the_healthy_steps() -> None:
    lines = [*judged(3, 4), *judged(5, verdict="watch"), *judged(6, 7)]
    assert healthy_before(lines, 8, 0) == 2
    lines = [*judged(3, 4, 5), *judged(6, 7, timeline=1)]
    assert healthy_before(lines, 8, 1) == 2
    assert healthy_before(lines, 8, 0) == 0


def test_of_a_step_that_was_trained_again_the_later_verdict_counts() -> None:
    assert healthy_before([*judged(3, 4, 5, verdict="spike"), *judged(3, 4, 5, attempt=2)], 6, 0) == 3
    assert healthy_before([*judged(3, 4, 5), *judged(5, verdict="watch", attempt=2)], 6, 0) == 0
