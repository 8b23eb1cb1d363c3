"""Passes: which epoch a script's loop gets, after resumes and rollbacks. Cursor and script are as simple as can be."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr

from rollback.errors import UsageError
from rollback.train.data.cursor import Cursor, cursor_for
from rollback.train.data.passes import Again, Passes
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.updates.wanted_gradients import WantedGradients


def at(epoch: int, offset: int = 0) -> Cursor:
    """Where a checkpoint stood: in an epoch of four batches."""
    cursor = cursor_for([0, 1, 2, 3])
    for _ in range(epoch):
        cursor.open_epoch()
        cursor.end_epoch()
    cursor.open_epoch()
    for _ in range(offset):
        cursor.next()
    return cursor


def passes_of(cursor: Cursor) -> Passes:
    return Passes(cursor, [], WantedGradients({}))


def put_back(passes: Passes) -> None:
    """As a plan does it, when it has put the cursor back."""
    passes.rollback_applied(RollbackApplied(RollbackCause.PLAN, 0, 0, "c000000-s00000000"))


def test_a_new_run_begins_with_its_first_pass() -> None:
    passes = passes_of(at(0))
    assert passes.start_pass() is Again.NOTHING
    assert (passes.epoch, passes.over) == (0, False)


@pytest.mark.parametrize("epoch", [1, 3])
def test_under_range_a_resumed_run_walks_through_what_is_over(epoch: int) -> None:
    passes = passes_of(at(epoch, 2))
    passes.resume()
    for _ in range(epoch):
        assert passes.start_pass() is Again.NOTHING
        assert passes.over
    assert passes.start_pass() is Again.EVERYTHING, "the script ran code of its own on the way"
    assert (passes.epoch, passes.over) == (epoch, False)


def test_a_run_resumed_in_its_first_pass_needs_its_random_states_only() -> None:
    passes = passes_of(at(0, 2))
    passes.resume()
    assert passes.start_pass() is Again.RANDOM_STATES


def test_epochs_begins_where_a_resumed_run_stands() -> None:
    passes = passes_of(at(2, 1))
    passes.resume()
    assert next(passes.epochs(5)) == 2
    assert passes.start_pass() is Again.RANDOM_STATES


def test_epochs_goes_back_over_an_epoch_s_start() -> None:
    cursor = at(1, 1)
    passes = passes_of(cursor)
    passes.resume()
    epochs = passes.epochs(4)
    assert next(epochs) == 1
    passes.start_pass()
    cursor.load_state_dict(at(0, 2).state_dict())
    put_back(passes)
    assert passes.interrupted
    assert next(epochs) == 0
    assert passes.start_pass() is Again.EVERYTHING
    assert not passes.interrupted


def test_under_range_a_rollback_over_an_epoch_s_start_goes_on_in_the_same_pass() -> None:
    cursor = at(1, 1)
    passes = passes_of(cursor)
    passes.start_pass()
    passes.start_pass()
    cursor.load_state_dict(at(0, 2).state_dict())
    put_back(passes)
    assert not passes.interrupted
    cursor.end_epoch()
    assert passes.replaying
    cursor.open_epoch()
    cursor.end_epoch()
    assert not passes.replaying


SCHEDULERS: dict[str, tuple[Callable[[Any], lr.LRScheduler], float]] = {
    "StepLR": (lambda o: lr.StepLR(o, 1, 0.5), 0.25),
    "ChainedScheduler": (lambda o: lr.ChainedScheduler([lr.StepLR(o, 1, 0.5), lr.StepLR(o, 1, 0.5)]), 0.0625),
    "chained, chained": (lambda o: lr.ChainedScheduler([lr.ChainedScheduler([lr.StepLR(o, 1, 0.5)])]), 0.25),
    "ReduceLROnPlateau": (lr.ReduceLROnPlateau, 1.0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_crossing_an_epoch_s_start_again_repeats_the_steps_of_schedulers_that_need_no_metric(kind: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    make, rate = SCHEDULERS[kind]
    cursor, scheduler = at(0), make(optimizer)
    passes = Passes(cursor, [scheduler], WantedGradients({}))
    passes.start_pass()
    cursor.end_epoch()
    passes.end(final=False)
    optimizer.step()
    for _ in range(1 if kind == "ReduceLROnPlateau" else 2):
        scheduler.step(*[1.0] * (kind == "ReduceLROnPlateau"))
    passes.start_pass()
    optimizer.param_groups[0]["lr"] = 1.0  # as a rollback puts both back
    scheduler.load_state_dict(make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)).state_dict())
    passes.cross()
    assert optimizer.param_groups[0]["lr"] == rate


def test_an_epoch_that_the_script_broke_off_is_left() -> None:
    cursor = at(0, 2)
    passes = passes_of(cursor)
    passes.start_pass()
    passes.start_pass()
    assert (cursor.epoch, cursor.opened) == (1, False)


def test_a_finished_run_has_no_more_batches_and_no_more_epochs() -> None:
    passes = passes_of(at(0))
    epochs = passes.epochs(9)
    assert next(epochs) == 0
    passes.start_pass()
    passes.end(final=True)
    assert list(epochs) == []
    passes.start_pass()
    assert passes.over


def behind(epoch: int) -> Cursor:
    """Where the state at the end of training stands: behind an epoch's last batch."""
    cursor = at(epoch, 1)
    cursor.end_epoch()
    return cursor


def test_behind_an_epoch_that_pass_begins_once_more_and_is_over_and_the_next_one_has_batches() -> None:
    passes = passes_of(behind(1))
    passes.resume()
    assert passes.start_pass() is Again.NOTHING
    assert passes.start_pass() is Again.EVERYTHING, "what the script does behind it is done on the restored state"
    assert (passes.epoch, passes.over) == (1, True)
    assert passes.start_pass() is Again.NOTHING
    assert (passes.epoch, passes.over) == (2, False)


def test_behind_an_epoch_at_which_the_script_was_through_the_next_one_begins() -> None:
    passes = passes_of(behind(1))
    passes.resume(left=True)
    assert next(passes.epochs(4)) == 2
    assert passes.start_pass() is Again.RANDOM_STATES
    assert not passes.over


def test_epochs_asks_at_its_end_whether_it_is_the_end() -> None:
    cursor = at(1, 3)
    passes = passes_of(cursor)
    passes.resume()
    asked: list[str] = []

    def end(by: str) -> bool:
        asked.append(by)
        if len(asked) == 1:
            cursor.load_state_dict(at(1, 2).state_dict())
            put_back(passes)
        return len(asked) == 2

    epochs = passes.epochs(2, end)
    assert next(epochs) == 1
    passes.start_pass()
    assert next(epochs) == 1, "the last update was judged to demand a return into this epoch"
    passes.start_pass()
    assert list(epochs) == []
    assert asked == ["guard.epochs(2)", "guard.epochs(2)"]


def test_a_body_that_does_not_iterate_over_the_guard_is_told_so() -> None:
    epochs = passes_of(at(0)).epochs(3)
    next(epochs)
    with pytest.raises(UsageError, match="did not iterate"):
        next(epochs)


def test_a_loop_that_turns_for_ever_behind_the_end_of_training_is_ended_in_words() -> None:
    passes = passes_of(at(0))
    passes.start_pass()
    passes.end(final=True)
    for _ in range(50_000):  # epochs that a script may well have
        passes.start_pass()
    with pytest.raises(UsageError, match="its loop has no end of its own") as refused:
        deque((passes.start_pass() for _ in range(1_000_000)), maxlen=0)
    assert "guard.epochs(" in str(refused.value.hint)
