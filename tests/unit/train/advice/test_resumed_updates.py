"""Updates that come at other batches since the run goes on within an epoch are noticed."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import rollback
from rollback.facts.training import Advice
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.train.advice.resumed_updates import ResumedUpdates


@pytest.mark.parametrize(
    ("usual", "updates", "told"),
    [
        (4, [(1, True), (4, True)], True),
        (4, [(4, True), (4, True)], False),
        (4, [(8, True), (8, True)], False),  # a batch that grows
        (6, [(4, True), (4, True)], False),  # the epoch's first update had what the one before left
        (4, [(1, False), (4, True)], False),  # an epoch's first or last one
        (4, [(2, True), (4, False)], False),
        (4, [(4, True), (1, True), (4, True)], False),
        (None, [(1, True), (4, True)], False),  # a run that begins
    ],
)
def test_an_update_of_fewer_batches_is_told_where_a_run_goes_on(
    usual: int | None, updates: list[tuple[int, bool]], told: bool
) -> None:
    resumed = ResumedUpdates(usual)
    for batches, within_epoch in updates:
        resumed.note(batches, within_epoch=within_epoch)
    assert bool(resumed.found) is told


@pytest.mark.parametrize("by", ["enumerate", "batch_in_epoch"])
def test_a_script_that_counts_from_0_in_the_middle_of_an_epoch_is_told_so(tmp_path: Path, by: str) -> None:
    for steps in (3, 7):
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), 0.1)
        guard = rollback.Guard(
            model=model, optimizer=optimizer, loader=[torch.ones(1, 2)] * 60, run=tmp_path, max_steps=steps
        )
        for count, x in enumerate(guard):
            loss = model(x).square().sum() / 4
            loss.backward()
            if (guard.batch_in_epoch if by == "batch_in_epoch" else count) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            guard.observe(loss)
        guard.close()
    facts = [record.fact for record in read_journal(RunPaths(tmp_path).train_journal).records]
    said = [fact.code for fact in facts if isinstance(fact, Advice)]
    assert said == ["updates-moved"] * (by == "enumerate")
