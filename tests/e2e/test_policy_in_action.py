"""The policies through a real guard: what is restored, what is skipped, when it ends."""

import itertools
import shutil
import signal
from pathlib import Path

import pytest
from attempts import Forker
from toy import Toy, consumed, facts, files, require_same, same_skips_from_the_start, skip_list, skipped, train, weights

from rollback.errors import NoUsableCheckpoint, StoppedAsStructural
from rollback.facts.training import (
    Concluded,
    Finished,
    Incident,
    Planned,
    Restored,
    ScalerSkipped,
    Stopped,
)

PRESET = {"rewind": None, "skip_after": None}  # those of the preset, not the tests' own


def outcomes(run: Path) -> list[str]:
    return [fact.outcome for fact in facts(run, Concluded)]


def test_surgical_skips_only_what_the_sentinel_saw(tmp_path: Path) -> None:
    toy = Toy(280, nan=(59,), settings={**PRESET, "policy": "surgical"})
    ended = train(toy, tmp_path / "run")
    assert skip_list(tmp_path / "run") == [{"first": 59, "last": 59}]
    (plan,) = facts(tmp_path / "run", Planned)
    assert plan.step == 50
    assert sorted(consumed(ended)) == [batch for batch in range(70) if batch != 59]


def test_palm_rewinds_a_hundred_steps_and_skips_two_hundred_batches(tmp_path: Path) -> None:
    toy = Toy(samples=960, nan=(137,), settings={**PRESET, "policy": "palm", "keep": 20})
    ended = train(toy, tmp_path / "run")
    (plan,) = facts(tmp_path / "run", Planned)
    assert (plan.step, plan.skip.first, plan.skip.last) == (30, 30, 229)
    assert sorted(skipped(tmp_path / "run")) == list(range(30, 230))
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "palm")


def test_balanced_lies_between_them(tmp_path: Path) -> None:
    toy = Toy(samples=400, overflow=(67,), settings=PRESET)
    train(toy, tmp_path / "run")
    (plan,) = facts(tmp_path / "run", Planned)
    assert (plan.step, plan.skip.first, plan.skip.last) == (40, 40, 87)


def test_a_batch_that_alone_did_it_is_all_that_is_skipped_and_the_next_one_is_another_occasion(tmp_path: Path) -> None:
    """The loss is not finite while everything before it was; four such batches within one horizon."""
    toy = Toy(samples=600, nan=(37, 67, 97, 127), settings=PRESET)
    ended = train(toy, tmp_path / "run")
    assert [plan.escalation for plan in facts(tmp_path / "run", Planned)] == [0] * 4
    assert sorted(skipped(tmp_path / "run")) == [37, 67, 97, 127]
    assert outcomes(tmp_path / "run") == ["recovered"] * 4
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "four occasions")


def test_before_incidents_cost_more_than_they_may_the_run_stops_and_says_so(tmp_path: Path) -> None:
    toy = Toy(samples=4000, nan=tuple(range(40, 1000)), sampler="sequential")
    toy = toy.with_settings(skip_after=80, rewind=0, max_skipped="5%")
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        train(toy, run)
    assert stopped.value.code == 76
    (last,) = facts(run, Stopped)
    assert "max_skipped (5%) allows 140" in last.account
    assert len(skipped(run)) <= 140


def test_a_fault_that_does_not_come_back_costs_no_data(tmp_path: Path) -> None:
    toy = Toy(280, nan=(37,), once=True).with_settings(retry_first=True, horizon=20)
    ended = train(toy, tmp_path / "run")
    (plan,) = facts(tmp_path / "run", Planned)
    assert (plan.action, plan.skip) == ("retry", None)
    assert outcomes(tmp_path / "run") == ["not_reproduced"]
    require_same(ended, train(toy.but(nan=())), "replayed")


def test_a_fault_that_comes_back_is_then_skipped(tmp_path: Path) -> None:
    toy = Toy(280, nan=(37,)).with_settings(retry_first=True, horizon=20)
    ended = train(toy, tmp_path / "run")
    retry, rollback = facts(tmp_path / "run", Planned)
    assert (retry.action, rollback.action, rollback.escalation) == ("retry", "rollback", 0)
    assert outcomes(tmp_path / "run") == ["repeated", "recovered"]
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "persistent")


def test_what_comes_back_goes_on_behind_the_window_and_ends_in_a_structural_stop(tmp_path: Path) -> None:
    """Everything from batch 40 on is bad: no window is wide enough."""
    toy = Toy(samples=4000, nan=tuple(range(40, 1000)), sampler="sequential").with_settings(max_undone=90)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        train(toy, run)
    assert stopped.value.code == 76
    *plans, stop = facts(run, Planned)
    assert {plan.action for plan in plans} == {"rollback"}
    assert len(plans) > 3
    assert stop.action == "stop"
    steps = [plan.step for plan in plans]
    assert steps == sorted(steps, reverse=True)
    assert all(later.skip.first == plan.skip.last + 1 for plan, later in itertools.pairwise(plans[1:]))
    assert len(plans[-1].skip) >= 2 * len(plans[1].skip), "and longer and longer"
    assert plans[-1].undone <= 90 < stop.undone
    assert outcomes(run) == ["repeated"] * len(plans) + ["structural"]
    (last,) = facts(run, Stopped)
    assert last.reason == "structural"
    assert "learning rate" in last.account


def test_no_window_reaches_back_behind_what_was_restored(tmp_path: Path) -> None:
    """What came before the restored checkpoint is part of the run; a window that covered it would say it was skipped.

    The second incident repeats the first, and the ring has nothing left from before the first one's window.
    """
    toy = Toy(samples=680, overflow=(60, 149), settings={"policy": "surgical", "keep": 3})
    ended = train(toy, tmp_path / "run")
    second = facts(tmp_path / "run", Planned)[1]
    assert second.escalation == 1
    assert second.skip.first >= second.batch > 60
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "window and checkpoint")


def test_a_run_that_has_stopped_structurally_can_be_tried_again(tmp_path: Path) -> None:
    """The same command is refused, as nothing has changed that it knows of. Told so, it gets through on mended data."""
    toy, run = Toy(samples=1000, nan=tuple(range(40, 250)), sampler="sequential"), tmp_path / "run"
    toy = toy.with_settings(max_undone=90)
    with pytest.raises(SystemExit):
        train(toy, run)
    before = files(run / "journal") | files(run / "ring")
    with pytest.raises(StoppedAsStructural, match="at step 32, and nothing has changed since: the loss is nan"):
        train(toy, run)
    assert files(run / "journal") | files(run / "ring") == before
    ended = train(toy.but(nan=()).with_settings(accept_structural=True), run)
    assert ended["/steps"] != "0"
    assert len(facts(run, Finished)) == 1


def test_two_incidents_far_apart_are_two_first_answers(tmp_path: Path) -> None:
    toy = Toy(samples=480, nan=(37, 97)).with_settings(horizon=30)
    ended = train(toy, tmp_path / "run")
    assert [plan.escalation for plan in facts(tmp_path / "run", Planned)] == [0, 0]
    assert outcomes(tmp_path / "run") == ["recovered", "recovered"]
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "two incidents")


def test_an_incident_in_the_last_step_is_still_answered(tmp_path: Path) -> None:
    toy = Toy(240, nan=(59,))
    ended = train(toy, tmp_path / "run")
    assert len(facts(tmp_path / "run", Restored)) == 1
    assert "nan" not in ended["/model/0.bias"]
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "last step")


def test_an_incident_at_the_step_that_max_steps_ends(tmp_path: Path) -> None:
    toy = Toy(nan=(59,), max_steps=60)
    ended = train(toy, tmp_path / "run")
    assert ended["/steps"] == "60"
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "max_steps")


def test_an_incident_in_the_first_step_goes_back_to_the_very_beginning(tmp_path: Path) -> None:
    toy = Toy(200, nan=(0,))
    ended = train(toy, tmp_path / "run")
    (plan,) = facts(tmp_path / "run", Planned)
    assert plan.step == 0
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "first step")


def test_updates_that_the_scaler_drops_are_facts_and_no_incidents(tmp_path: Path) -> None:
    toy = Toy(240, scaler=True, overflow=(20, 40))
    ended = train(toy, tmp_path / "run")
    assert [fact.batch for fact in facts(tmp_path / "run", ScalerSkipped)] == [20, 40]
    assert facts(tmp_path / "run", Incident) == []
    assert ended["/steps"] == "60"
    assert float(ended["/scaler/_growth_tracker"]) < 40


def test_a_blip_is_noted_and_left_alone(tmp_path: Path) -> None:
    toy = Toy(300, garbage=(60, 61))
    run = tmp_path / "run"
    require_same(weights(train(toy, run)), weights(train(toy)), "a blip")
    assert facts(run, Incident) == []
    assert {"noticed"} <= {fact.kind for fact in facts(run)}


def test_without_a_good_checkpoint_the_run_stops_with_a_code_of_its_own(tmp_path: Path) -> None:
    toy, run = Toy(80, nan=(8,)).with_settings(fast_tier="off"), tmp_path / "run"

    def lose_them(guard: object, position: int) -> None:
        if position == 6:
            shutil.rmtree(run / "ring")

    with pytest.raises(SystemExit) as stopped:
        train(toy, run, hook=lose_them)
    assert stopped.value.code == 65
    (last,) = facts(run, Stopped)
    assert last.reason == "no_checkpoint"
    assert "no good checkpoint from before the onset is left" in last.account
    assert outcomes(run) == ["no_checkpoint"]
    with pytest.raises(NoUsableCheckpoint, match="was stopped for want of a good checkpoint at step"):
        train(toy, run)


def test_a_lower_learning_rate_before_giving_up_is_exact_on_resume(tmp_path: Path) -> None:
    """A gradient that overflows, and then garbage that comes by once: the second answer would undo too much."""
    toy = Toy(samples=480, overflow=(57,), garbage=(75, 79), once=True, augment=True)
    toy = toy.with_settings(max_undone=10, lr_after="0.5:40")
    run, other, log = tmp_path / "run", tmp_path / "other", tmp_path / "log"
    ended = train(toy, run)
    first, second = facts(run, Planned)
    assert (first.lower_rate, second.lower_rate, second.skip) == (None, (0.5, 40), None)
    assert outcomes(run) == ["repeated", "recovered"]
    with Forker() as forker:
        assert forker.status(toy, other, log=str(log), signal=[95, signal.SIGKILL]) == -signal.SIGKILL
        resumed = forker.finish(toy, other, log=log)
    require_same(resumed, ended, "killed while the rate is low")
