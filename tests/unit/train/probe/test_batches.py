"""What is kept for a probe: exact copies, in their own time, and nothing that cannot be copied whole."""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollback.facts.history import Case
from rollback.sentinel import Hint, Observation, Sentinel
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.decisions import StepSpan
from rollback.train.probe.batches import KEPT_EVERY, MOST, ProbeBatch, ProbeUpdates
from rollback.train.state.kept_values import ScriptState


@dataclass
class Row:
    x: Tensor
    name: str


def nested() -> dict[str, Any]:
    return {
        "pair": (torch.arange(3.0), [torch.ones(2, dtype=torch.int64)]),
        "array": np.arange(4),
        "row": Row(torch.zeros(2), "a"),
        "plain": [None, True, 3, 0.5, "text", b"bytes"],
        "ordered": OrderedDict(z=torch.full((2,), 7.0)),
    }


def test_a_copy_is_what_was_handed_out_whatever_the_script_does_to_it() -> None:
    batch, untouched = nested(), nested()
    kept = ProbeBatch(batch, MOST, {})
    for _ in range(2):  # nor does the script of the first probe change the second
        batch["pair"][0].zero_()
        batch["pair"][1].append(torch.ones(1))
        batch["array"][:] = 0
        batch["row"].x.add_(1)
        batch["ordered"]["z"].mul_(2)
        batch = kept.again()
        torch.testing.assert_close(batch["pair"], untouched["pair"])
        assert (batch["array"] == untouched["array"]).all()
        assert (batch["row"].name, batch["row"].x.tolist()) == ("a", [0.0, 0.0])
        assert batch["plain"] == untouched["plain"]
        assert (type(batch["ordered"]), batch["ordered"]["z"].tolist()) == (OrderedDict, [7.0, 7.0])


def test_with_it_come_the_random_states_of_its_time() -> None:
    kept = ProbeBatch(torch.zeros(1), MOST, {})
    drawn = torch.rand(3).tolist(), np.random.rand(2).tolist()
    kept.again()
    assert (torch.rand(3).tolist(), np.random.rand(2).tolist()) == drawn


@pytest.mark.parametrize(
    "batch",
    [
        nn.Parameter(torch.zeros(2)),
        [torch.zeros(2, requires_grad=True)],
        {"x": torch.eye(2).to_sparse()},
        (np.array([object()]),),
        [object()],
        iter([1]),
    ],
    ids=["parameter", "grad", "sparse", "objects", "object", "iterator"],
)
def test_what_may_have_more_than_data_is_refused(batch: Any) -> None:
    with pytest.raises(ValueError, match="looked into"):
        ProbeBatch(batch, MOST, {})


def test_a_batch_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="64 MiB"):
        ProbeBatch([torch.zeros(3), np.zeros(1)], 19, {})
    assert ProbeBatch([torch.zeros(3), np.zeros(1)], 20, {}).nbytes == 20


class Steps:
    """A settled sentinel, and updates that are kept."""

    def __init__(self) -> None:
        self.kept, self.sentinel = ProbeUpdates(), Sentinel()
        for step in range(100):
            self.sentinel.update(Observation(step, 1 + math.exp(-step / 10) + 0.01 * (-1) ** step, 1.0))
        assert self.sentinel.settled_level is not None

    def train(
        self, *steps: int, batches: int = 1, loss: float | None = 1.0, per_step: int = 1, odd: Any = None
    ) -> None:
        for step in steps:
            for _ in range(batches):
                self.kept.keep(step, torch.zeros(2) if odd is None else odd, ScriptState())
            span = StepSpan(step, step, step, per_step, Hint.NONE, batches=batches)
            self.kept.judged(span, loss, self.sentinel)

    def newest(self, before: int = 10_000) -> int | None:
        update = self.kept.before(before)
        return None if update is None else update.step


def test_an_update_is_kept_every_hundred_steps_and_two_of_them() -> None:
    steps = Steps()
    steps.train(*range(350))
    assert [steps.newest(before) for before in (400, 300, 200)] == [300, 200, None]
    update = steps.kept.before(400)
    assert update is not None
    assert (update.loss, update.level, len(update.batches)) == (1.0, steps.sentinel.settled_level, 1)


def test_only_what_was_judged_is_of_use() -> None:
    steps = Steps()
    steps.kept.keep(0, torch.zeros(1), ScriptState())
    steps.kept.keep(1, torch.zeros(1), ScriptState())  # the next batch comes before the verdict
    assert steps.newest() is None
    steps.kept.judged(StepSpan(0, 0, 0, 1, Hint.NONE), 1.0, steps.sentinel)
    assert steps.newest() == 0


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_an_update_without_a_finite_loss_is_not_kept(loss: float | None) -> None:
    steps = Steps()
    steps.train(0, loss=loss)
    assert steps.newest() is None
    steps.train(*range(1, 30))
    assert steps.newest() == 10


def test_nothing_is_kept_while_something_is_up() -> None:
    steps = Steps()
    steps.sentinel.update(Observation(100, 5.0, 1.0))
    steps.train(101)
    assert steps.newest() is None


def test_the_last_update_of_an_epoch_may_be_shorter_and_is_not_kept() -> None:
    steps = Steps()
    steps.train(0, batches=2, per_step=3)
    assert steps.newest() is None
    steps.train(*range(10, 12), batches=3, per_step=3)
    update = steps.kept.before(100)
    assert update is not None
    assert (update.step, len(update.batches)) == (10, 3)


def test_where_a_batch_cannot_be_copied_the_place_is_kept_with_the_reason() -> None:
    """Another rank may have copied its own: all must choose the same update."""
    steps = Steps()
    steps.train(0, odd=[object()])
    update = steps.kept.before(10)
    assert update is not None
    assert (update.batches, update.unfit) == (
        [],
        "a batch cannot be kept: it has something of type object, which is not looked into",
    )


def event(cause: RollbackCause, step: int) -> RollbackApplied:
    case: Case | None = None
    return RollbackApplied(cause, step, step, "", case=case)


def test_what_was_kept_behind_the_step_that_training_goes_back_to_is_forgotten() -> None:
    steps = Steps()
    steps.train(*range(KEPT_EVERY + 20))
    steps.kept.rollback_applied(event(RollbackCause.PROBE, 60))
    assert steps.newest() == 100
    steps.kept.rollback_applied(event(RollbackCause.PLAN, 60))
    assert steps.newest() == 0
    steps.train(*range(60, 80))
    assert steps.newest() == 70
