"""A learning rate that goes by a count of the script's own is noticed, and one that goes by what is kept is not."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, ReduceLROnPlateau

import rollback
from rollback.facts.training import Advice
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.advice.script_rates import ScriptRates
from rollback.wording import Calls


def told(updates: Sequence[tuple[int, int, float]], *schedulers: Any, before: float | None = None) -> str:
    """Of updates: step, epoch, rate. before: the rate of the one before them; the run's first one had 0.1."""
    rates = ScriptRates(schedulers)
    for step, epoch, rate in updates:
        rates.note(step, epoch, rate, before, 0.1)
        before = rate
    return "".join(advice.in_words(Calls()) for advice in rates.found)


class Cyclic:
    def rate(self, count: int) -> float:
        return 1.0 - count % 7 / 7


def scheduler(kind: Callable[[SGD], Any]) -> Any:
    return kind(SGD([nn.Parameter(torch.ones(1))], 0.1))


FORTH = [(0, 0, 0.1), (1, 0, 0.2), (2, 0, 0.3), (3, 0, 0.4)]


def test_a_rate_that_goes_on_where_the_run_goes_back_is_told() -> None:
    assert "step 1 has the learning rate 0.5, and had 0.2 before the run went back" in told([*FORTH, (1, 0, 0.5)])
    assert "step 2 has the learning rate 0.6, and had 0.3" in told([*FORTH, (1, 0, 0.2), (2, 0, 0.6)])
    assert "step 0 has the learning rate 0.5, and had 0.1 before" in told([*FORTH, (0, 0, 0.5)]), "back to the start"


@pytest.mark.parametrize(
    "again",
    [
        [(1, 0, 0.2), (2, 0, 0.3), (3, 0, 0.4)],
        [(1, 1, 0.02)],  # a window has led over the epoch's start, and a scheduler of epochs has stepped there
        [(1, 0, 0.2), (2, 0, 0.3), (3, 0, 0.9)],  # later ones may differ by what has happened since
    ],
    ids=["goes back", "another epoch", "later"],
)
def test_a_rate_that_goes_back_with_the_run_is_nothing(again: list[tuple[int, int, float]]) -> None:
    assert told([*FORTH, *again]) == ""


def test_a_rate_that_begins_anew_where_the_run_goes_on_is_told() -> None:
    said = told([(7, 0, 0.1)], before=0.8)
    assert "step 7 has the learning rate 0.1, that of the run's first one, and the update before it had 0.8" in said
    by_its_lambda = scheduler(lambda optimizer: LambdaLR(optimizer, lambda _: 1.0))
    assert "step 8" in told([(7, 0, 0.9), (8, 0, 0.1)], by_its_lambda, before=0.8)


def test_what_may_be_so_by_the_schedule_is_nothing() -> None:
    restarts = scheduler(lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 7))
    assert told([(7, 0, 0.1)], restarts, before=0.001) == ""
    by_a_method = Cyclic().rate
    by_a_partial = partial(lambda count, of: 1.0 - count % of / of, of=7)
    for by_its_count in (lambda count: 1.0 - count % 7 / 7, by_a_partial, by_a_method):
        anew = scheduler(lambda optimizer, by=by_its_count: LambdaLR(optimizer, by))
        assert told([(7, 0, 0.1)], anew, before=0.001) == "", "as of transformers' cosine_with_restarts"
    assert told([*FORTH, (1, 0, 0.02)], scheduler(ReduceLROnPlateau)) == ""
    assert told([(7, 0, 0.1)], before=0.1) == "", "a rate that stays"
    assert told([(0, 0, 0.1)]) == "", "a run that begins"


@pytest.mark.parametrize("by", ["a count of its own", "guard.step"])
def test_a_script_that_goes_on_is_told_so_once(tmp_path: Path, by: str) -> None:
    for steps in (6, 12):
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), 0.1)
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 12, run=tmp_path, max_steps=steps
        )
        for count, x in enumerate(guard):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + (guard.step if by == "guard.step" else count))
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.observe(loss)
        guard.close()
    facts = [record.fact for record in read_journal(RunPaths(tmp_path).train_journal).records]
    said = [fact.code for fact in facts if isinstance(fact, Advice)]
    assert said == ["learning-rate-not-kept"] * (by == "a count of its own")
