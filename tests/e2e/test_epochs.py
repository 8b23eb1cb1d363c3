"""Nested loops: rollbacks over an epoch's start, resumes in a later epoch, loops that are broken off, ends."""

import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import Forker
from selection import soak
from toy import Toy, consumed, facts, require_same, same_skips_from_the_start, skip_list, train, weights

from rollback.facts.training import Attached, Finished, Incident, Restored, Stopped

EPOCHS = Toy(samples=120, epochs=3)  # 30 batches each


@pytest.mark.covering
@pytest.mark.parametrize("loop", ["range", "epochs"])
@pytest.mark.parametrize("sampler", ["random", "distributed"])
@pytest.mark.parametrize("bad", [61, 58], ids=["behind the start", "before the end"])
def test_a_rollback_over_an_epoch_s_start(tmp_path: Path, loop: str, sampler: str, bad: int) -> None:
    """Batch 61 is the second of epoch 2, and the checkpoint is at least ten steps before; 58 is judged at 59."""
    toy = EPOCHS.but(loop=loop, sampler=sampler, nan=(bad,)).with_settings(rewind=12)
    ended = train(toy, tmp_path / "run")
    assert facts(tmp_path / "run", Restored)[0].step < 60
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), loop)


def test_a_rollback_over_an_epoch_s_start_repeats_the_scheduler_s_step_there(tmp_path: Path) -> None:
    """Under plain range the script cannot be sent back; its per-epoch scheduler is stepped again all the same."""
    toy = EPOCHS.but(nan=(61,), between=True).with_settings(rewind=12)
    ended = train(toy, tmp_path / "run")
    fresh = same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh")
    assert facts(tmp_path / "run", Restored)[0].step < 60
    assert ended["/scheduler/last_epoch"] == "3"
    rates = {name: text for name, text in fresh.items() if name.startswith("/scheduler")}
    assert {name: ended[name] for name in rates} == rates


@pytest.mark.parametrize("bad", [61, *soak(31, 59, 60)])
def test_under_epochs_all_that_the_script_does_between_epochs_is_done_again(tmp_path: Path, bad: int) -> None:
    toy = EPOCHS.but(loop="epochs", between=True, nan=(bad,)).with_settings(rewind=12)
    ended = train(toy, tmp_path / "run")
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), f"bad batch {bad}")


@pytest.mark.parametrize("loop", ["rehearsed epochs", *soak("epochs")])
def test_a_stop_at_an_epoch_s_last_step_waits_for_the_next_epoch_unless_the_script_resumes_between(
    tmp_path: Path, forker: Forker, loop: str
) -> None:
    toy, log = EPOCHS.but(loop=loop, between=True), tmp_path / "log"
    assert forker.status(toy, tmp_path / "run", log=str(log), signal=[28, signal.SIGTERM]) == 75
    (stopped,) = facts(tmp_path / "run", Stopped)
    assert (stopped.step == stopped.batch == 30) == (loop == "rehearsed epochs")
    ended = forker.finish(toy, tmp_path / "run", log=log)
    assert facts(tmp_path / "run", Attached)[-1].step == stopped.step
    require_same(ended, train(toy), loop)


def test_what_a_stop_between_two_epochs_has_left_may_be_gone_back_to(tmp_path: Path, forker: Forker) -> None:
    toy, run = EPOCHS.but(loop="rehearsed epochs", between=True, nan=(43,)).with_settings(rewind=5), tmp_path / "run"
    assert forker.status(toy, run, log=str(tmp_path / "log"), signal=[28, signal.SIGTERM]) == 75
    ended = forker.finish(toy, run, log=tmp_path / "log")
    assert [fact.step for fact in facts(run, Restored)] == [30]
    require_same(ended, same_skips_from_the_start(toy, run, tmp_path / "fresh"), "an epoch's end")


def test_a_rollback_over_two_epochs_starts(tmp_path: Path) -> None:
    toy = EPOCHS.but(loop="epochs", between=True, nan=(70,)).with_settings(rewind=45)
    ended = train(toy, tmp_path / "run")
    assert facts(tmp_path / "run", Restored)[0].step <= 25
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "two starts")


def test_a_skip_window_may_lie_across_an_epoch_s_end(tmp_path: Path) -> None:
    toy = EPOCHS.but(loop="epochs", between=True, nan=(56,)).with_settings(rewind=0, skip_after=20)
    ended = train(toy, tmp_path / "run")
    (window,) = skip_list(tmp_path / "run")
    assert window["first"] < 60 < window["last"]
    require_same(ended, same_skips_from_the_start(toy, tmp_path / "run", tmp_path / "fresh"), "window over an end")


@pytest.mark.parametrize(
    ("killed_at", "loop"),
    [
        (47, "range"),
        (60, "epochs"),
        (60, "rehearsed epochs"),
        *soak(*itertools.product((5, 29, 30, 85), ("range", "epochs", "rehearsed epochs"))),
    ],
)
def test_a_run_resumed_in_any_epoch_ends_as_if_undisturbed(
    tmp_path: Path, forker: Forker, killed_at: int, loop: str
) -> None:
    toy = EPOCHS.but(loop=loop, between=True)
    log = tmp_path / "log"
    assert forker.status(toy, tmp_path / "run", log=str(log), signal=[killed_at, 9]) == -9
    ended = forker.finish(toy, tmp_path / "run", log=log)
    require_same(ended, train(toy), f"killed at batch {killed_at}")


@pytest.mark.parametrize("loop", ["epochs", *soak("range")])
def test_a_rollback_after_a_resume_in_a_later_epoch(tmp_path: Path, forker: Forker, loop: str) -> None:
    toy = EPOCHS.but(loop=loop, nan=(62,), between=loop == "epochs").with_settings(
        policy="surgical", rewind=15, skip_after=0
    )
    log = tmp_path / "log"
    assert forker.status(toy, tmp_path / "run", log=str(log), signal=[61, 9]) == -9
    ended = forker.finish(toy, tmp_path / "run", log=log)
    assert facts(tmp_path / "run", Restored)[0].step < 60
    require_same(ended, train(toy.with_settings(skip=[{"first": 62, "last": 62}]), tmp_path / "fresh"), loop)


@pytest.mark.parametrize("loop", ["epochs", *soak("range")])
def test_loops_that_are_broken_off_read_what_they_would_without_a_guard(tmp_path: Path, loop: str) -> None:
    toy = EPOCHS.but(loop=loop, leave_after=20, between=True)
    guarded, plain = train(toy, tmp_path / "run"), train(toy)
    require_same(weights(guarded), weights(plain), loop)
    assert consumed(guarded) == consumed(plain), "the last update is judged when the loop is left"


@pytest.mark.parametrize(
    "toy", [Toy(loader="drawn", max_steps=50), *soak(EPOCHS, EPOCHS.but(loop="epochs"), Toy(max_steps=50))]
)
def test_a_finished_run_that_is_run_again_ends_with_the_same_weights(tmp_path: Path, toy: Toy) -> None:
    """It goes on from its last checkpoint, to the same end."""
    run = tmp_path / "run"
    first, again = train(toy, run), train(toy, run)
    assert facts(run, Attached)[-1].step > 0
    state = [name for name in first if not name.startswith("/consumed")]
    require_same({name: first[name] for name in state}, {name: again[name] for name in state}, "finished run")


@pytest.mark.parametrize("loop", ["epochs", *soak("range")])
def test_max_steps_ends_all_loops(tmp_path: Path, loop: str) -> None:
    toy = EPOCHS.but(loop=loop, max_steps=45)
    ended = train(toy, tmp_path / "run")
    assert ended["/steps"] == "45"
    assert facts(tmp_path / "run", Finished)[-1].step == 45
    require_same(weights(ended), weights(train(toy.but(loop="range"))), "max_steps")


def test_an_epoch_that_a_checkpoint_has_opened_begins_for_the_sentinel_too(tmp_path: Path) -> None:
    """A rise behind an epoch's start is excused. The checkpoint to go back to is that of the run's first step."""
    toy = EPOCHS.but(nan=(4,))

    def trained(name: str, **settings: Any) -> tuple[dict[str, str], dict[int, Any]]:
        told: dict[int, Any] = {}

        def note(guard: Any, position: int) -> None:
            told[position] = guard._loop.state.sentinel.state_dict()

        return train(toy.with_settings(**settings), tmp_path / name, hook=note), told

    ended, told = trained("run")
    assert facts(tmp_path / "run", Restored)[0].step == 0
    skip = skip_list(tmp_path / "run")
    given, expected = trained("given", skip=skip)
    require_same(ended, given, "weights")
    assert {position: told[position] for position in expected} == expected


@pytest.mark.soak
def test_more_steps_can_be_asked_of_a_finished_run(tmp_path: Path) -> None:
    toy = EPOCHS.but(loop="epochs", between=True)
    train(toy.but(epochs=2), tmp_path / "run")
    extended = train(toy, tmp_path / "run")
    require_same(weights(extended), weights(train(toy, tmp_path / "at once")), "extended")
    assert facts(tmp_path / "run", Incident) == []


def test_batches_left_over_by_the_accumulation_at_an_epoch_s_end_count_for_the_next_update(
    tmp_path: Path, forker: Forker
) -> None:
    """30 batches, 4 for an update: two are left over, and their gradients are in no checkpoint."""
    toy = EPOCHS.but(accumulate=4)
    undisturbed = train(toy, tmp_path / "undisturbed")
    require_same(undisturbed, train(toy), "with and without a guard")
    log = tmp_path / "log"
    assert forker.status(toy, tmp_path / "run", log=str(log), signal=[33, 9]) == -9
    require_same(forker.finish(toy, tmp_path / "run", log=log), undisturbed, "killed at batch 33")
