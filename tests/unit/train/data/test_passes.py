"""Passes: which epoch a script's loop gets, after resumes and rollbacks. Cursor and script are as simple as can be."""

import tracemalloc
from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LRScheduler, ReduceLROnPlateau

from rollback.errors import RollbackError, UsageError
from rollback.train.data import passes as passes_module
from rollback.train.data.cursor import Cursor, cursor_for
from rollback.train.data.passes import Passes, RestoreAtPass
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.updates.model_switches import ModelSwitches


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
    return Passes(cursor, [], ModelSwitches({}))


def put_back(passes: Passes) -> None:
    """As a plan does it, when it has put the cursor back."""
    passes.rollback_applied(RollbackApplied(RollbackCause.PLAN, 0, 0, "c000000-s00000000"))


def test_a_new_run_begins_with_its_first_pass() -> None:
    passes = passes_of(at(0))
    assert passes.start_pass() is RestoreAtPass.NOTHING
    assert (passes.epoch, passes.over) == (0, False)


@pytest.mark.parametrize("epoch", [1, 3])
def test_under_range_a_resumed_run_walks_through_what_is_over(epoch: int) -> None:
    passes = passes_of(at(epoch, 2))
    passes.resume()
    for _ in range(epoch):
        assert passes.start_pass() is RestoreAtPass.NOTHING
        assert passes.over
    assert passes.start_pass() is RestoreAtPass.EVERYTHING, "the script ran code of its own on the way"
    assert (passes.epoch, passes.over) == (epoch, False)


def test_a_run_resumed_in_its_first_pass_needs_its_random_states_only() -> None:
    passes = passes_of(at(0, 2))
    passes.resume()
    assert passes.start_pass() is RestoreAtPass.RANDOM_STATES


def test_epochs_begins_where_a_resumed_run_stands() -> None:
    passes = passes_of(at(2, 1))
    passes.resume()
    assert next(passes.epochs(5)) == 2
    assert passes.start_pass() is RestoreAtPass.RANDOM_STATES


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
    assert passes.start_pass() is RestoreAtPass.EVERYTHING
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


def sent_back_over_a_step_of(scheduler: LRScheduler, *metric: float) -> Passes:
    """The script has stepped it between epoch 0 and epoch 1, and training is put back into epoch 0, to its end."""
    cursor = at(1)
    passes = Passes(cursor, [scheduler], ModelSwitches({}))
    before = scheduler.state_dict()
    passes.start_pass()
    passes.end(final=False)
    scheduler.step(*metric)
    passes.start_pass()
    cursor.load_state_dict(at(0, 2).state_dict())
    scheduler.load_state_dict(before)
    put_back(passes)
    cursor.end_epoch()
    return passes


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def test_a_chain_of_schedulers_is_stepped_again_where_an_epoch_s_start_is_crossed() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    chain = ChainedScheduler([ConstantLR(optimizer), ExponentialLR(optimizer, 0.5)])
    optimizer.step()
    passes = sent_back_over_a_step_of(chain)
    before = rate_of(optimizer)
    passes.cross()
    assert rate_of(optimizer) == before / 2


def test_a_step_by_a_metric_is_not_made_again_and_it_is_said_who_can() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    passes = sent_back_over_a_step_of(ReduceLROnPlateau(optimizer), 0.5)
    with pytest.raises(RollbackError, match="start of epoch 1, where the script had stepped ReduceLROnPlateau"):
        passes.cross()


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
    assert passes.start_pass() is RestoreAtPass.NOTHING
    assert passes.start_pass() is RestoreAtPass.EVERYTHING, (
        "what the script does behind it is done on the restored state"
    )
    assert (passes.epoch, passes.over) == (1, True)
    assert passes.start_pass() is RestoreAtPass.NOTHING
    assert (passes.epoch, passes.over) == (2, False)


def test_behind_an_epoch_at_which_the_script_was_through_the_next_one_begins() -> None:
    passes = passes_of(behind(1))
    passes.resume(left=True)
    assert next(passes.epochs(4)) == 2
    assert passes.start_pass() is RestoreAtPass.RANDOM_STATES
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


def test_a_run_of_very_many_passes_keeps_what_changes_and_no_more() -> None:
    model = nn.Sequential(*[nn.Dropout() for _ in range(50)])
    cursor = at(0)
    passes = Passes(cursor, [ExponentialLR(torch.optim.SGD([torch.ones(1)]), 0.9)], ModelSwitches({"model": model}))
    model.eval()  # as an evaluation leaves it

    def epochs(count: int) -> int:
        for _ in range(count):
            passes.start_pass()
            cursor.end_epoch()
            cursor.opened = True
            passes.end(final=False)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = epochs(20)
        assert epochs(500) - before < 500 * 100
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("more", [lambda passes: passes.start_pass(), lambda passes: next(passes.epochs(2))])
def test_what_asks_for_batches_behind_the_last_epoch_is_refused(more: Callable[[Passes], object]) -> None:
    """Two phases in two loops, or a pass for the statistics of batch norm: it was to train, or to read, something."""
    cursor = at(0)
    passes = passes_of(cursor)

    def end(by: str) -> bool:
        passes.end(final=True)
        return True

    for _ in passes.epochs(1, end):
        passes.start_pass()
        cursor.end_epoch()
        passes.end(final=False)
    assert [*passes.epochs(1)] == [], "this asks for nothing that there is not"
    with pytest.raises(UsageError, match=r"is complete, by guard\.epochs\(1\), and the script") as refused:
        more(passes)
    assert "one `guard.epochs(n)`" in str(refused.value.hint)
    assert "a loader of its own" in str(refused.value.hint), "what a script has of Accelerate is the guard's"


def test_of_a_pass_behind_the_end_it_is_not_said_that_the_script_counts_its_epochs() -> None:
    """It may be the loop of `guard.epochs` that `max_steps` has cut short, and a look whether a batch is left."""
    cursor = at(0)
    passes = passes_of(cursor)
    for _ in passes.epochs(3):
        passes.start_pass()
        cursor.end_epoch()
        passes.end(final=True)
    passes.start_pass()
    assert [*passes.advice()] == []


def test_a_body_that_does_not_iterate_over_the_guard_is_told_so() -> None:
    epochs = passes_of(at(0)).epochs(3)
    next(epochs)
    with pytest.raises(UsageError, match="did not iterate"):
        next(epochs)


def test_a_loop_that_turns_for_ever_behind_the_end_of_training_is_ended_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert passes_module._BEHIND_THE_END >= 1_000_000, "a script may well have so many epochs"
    monkeypatch.setattr(passes_module, "_BEHIND_THE_END", 1000)
    passes = passes_of(at(0))
    passes.start_pass()
    passes.end(final=True)
    for _ in range(900):
        passes.start_pass()
    with pytest.raises(UsageError, match="its loop has no end of its own") as refused:
        deque((passes.start_pass() for _ in range(200)), maxlen=0)
    assert "guard.epochs(" in str(refused.value.hint)
