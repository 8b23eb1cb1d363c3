"""A gradient scaler whose updates are dropped now and then is left alone; one whose scale collapses is an incident."""

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import rollback
from rollback.errors import UsageError
from rollback.facts.training import Fact, Finished, Incident, PhaseAnnounced, ScalerSkipped, ScriptLeft
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.sentinel.scaler import DROPPED, WINDOW, ScaleWatch


def calls(dropped: list[bool], scale: float | None) -> list[int]:
    watch = ScaleWatch()
    return [step for step, was in enumerate(dropped) if watch.update(step, was, scale) is not None]


def test_dropped_updates_that_do_not_stop_are_called_once_until_they_have_come_again() -> None:
    assert calls([True] * (2 * DROPPED), scale=0.5) == [DROPPED - 1, 2 * DROPPED - 1]


def test_the_onset_is_the_first_of_them() -> None:
    watch = ScaleWatch()
    verdicts = [watch.update(step, step >= 7, 0.25) for step in range(7 + DROPPED)]
    verdict = verdicts[-1]
    assert verdict is not None
    assert (verdict.onset, verdict.rule, verdict.value, verdict.threshold) == (7, "scaler-collapse", 0.25, 1.0)


def test_a_scaler_that_starts_high_may_find_its_level() -> None:
    assert calls([True] * 3 * DROPPED, scale=1024.0) == []


def test_where_the_scale_is_not_known_the_count_decides() -> None:
    assert calls([True] * DROPPED, scale=None) == [DROPPED - 1]


@given(st.integers(0, WINDOW), st.integers(1, 50))
def test_now_and_then_is_no_collapse(offset: int, rounds: int) -> None:
    every = WINDOW // DROPPED + 1
    steps = [(offset + step) % every == 0 for step in range(rounds * every)]
    assert calls(steps, scale=0.01) == []


# --- with a real scaler -----------------------------------------------------------------------------------------------


def train(
    run: Path, broken_from: int | None, *, fused: bool, init_scale: float, broken_at: tuple[int, ...] = ()
) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    data = torch.randn(400, 4, generator=torch.Generator().manual_seed(1))
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(data, 2), scaler=scaler, run=run, snapshot_every=10,
        probation=8, rewind=5, skip_after=3, max_steps=90, observe_only=True,
    )  # fmt: skip
    for x in guard:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        if guard.step in broken_at or (broken_from is not None and guard.step >= broken_from):
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    return facts_of(run)


def facts_of(run: Path) -> list[Fact]:
    return [record.fact for record in read_journal(RunPaths(run).train_journal).records]


@pytest.mark.parametrize("fused", [False, True])
def test_dropped_updates_are_counted_and_are_no_incident(tmp_path: Path, fused: bool) -> None:
    facts = train(tmp_path, None, fused=fused, init_scale=1024.0, broken_at=(20, 21, 50))
    assert [fact.step for fact in facts if isinstance(fact, ScalerSkipped)] == [20, 21, 50]
    assert not any(isinstance(fact, Incident) for fact in facts)


@pytest.mark.parametrize("fused", [False, True])
def test_a_collapsing_scale_is_an_incident(tmp_path: Path, fused: bool) -> None:
    facts = train(tmp_path, 40, fused=fused, init_scale=2.0**15)
    found = next(fact for fact in facts if isinstance(fact, Incident))
    assert (found.verdict, found.rule, found.onset_step, found.detection_step) == (
        "nonfinite", "scaler-collapse", 40, 40 + DROPPED - 1,
    )  # fmt: skip
    assert found.value == 2.0 ** (15 - DROPPED)
    assert "dropped 20 of the last 20 updates" in found.explanation


def test_a_script_that_updates_its_scaler_at_the_top_of_the_body_is_told_so_at_once(tmp_path: Path) -> None:
    """What the scaler has found would be in no checkpoint."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(torch.randn(8, 4), 2), scaler=scaler, run=tmp_path / "run"
    )
    scaler.scale(model(next(guard)).square().mean()).backward()
    scaler.step(optimizer)
    with pytest.raises(UsageError, match=r"was not followed by scaler\.update"):
        next(guard)


@pytest.mark.parametrize("by_epochs", [False, True])
def test_a_script_that_ends_before_the_last_update_of_its_scaler_is_done(tmp_path: Path, by_epochs: bool) -> None:
    """Nothing comes behind it that would need what the scaler has found."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(torch.randn(8, 4), 2), scaler=scaler, run=tmp_path / "run"
    )
    for _ in guard.epochs(1) if by_epochs else range(1):
        for x in guard:
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            if guard.batch == 2:
                break
            scaler.update()
            optimizer.zero_grad()
    guard.close()
    (end,) = (fact for fact in facts_of(tmp_path / "run") if isinstance(fact, Finished | ScriptLeft))
    assert end.step == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])  # noqa: S301
def test_a_copy_of_a_scaler_scales_by_itself(tmp_path: Path, copied: Any) -> None:
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(torch.randn(8, 4), 2), scaler=scaler, run=tmp_path / "run"
    )
    of_another = torch.optim.SGD(other.parameters(), lr=1e-3)
    its_own = copied(scaler)
    for _ in range(2):
        its_own.scale(other(torch.ones(1, 4)).sum()).backward()
        its_own.step(of_another)
        its_own.update(2.0)
        of_another.zero_grad()
    assert (its_own.get_scale(), scaler.get_scale()) == (2.0, 8.0)
    guard.close()


# --- announced phases -------------------------------------------------------------------------------------------------


def test_an_announced_phase_is_on_record_and_its_level_is_learned_afresh(tmp_path: Path) -> None:
    def run(folder: Path, announced: bool) -> list[Fact]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        noise = torch.randn(200, generator=torch.Generator().manual_seed(1)).tolist()
        holder = nn.Module()
        holder.weight = weight
        guard = rollback.Guard(
            model=holder, optimizer=optimizer, loader=DataLoader(range(200)), run=folder, snapshot_every=0,
            observe_only=True,
        )  # fmt: skip
        for _ in guard:
            if guard.step == 100 and announced:
                guard.announce("harder data")
            level = 5.0 - 0.03 * guard.step if guard.step < 100 else 5.5
            loss = weight.sum() + level + 0.02 * noise[guard.step]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            guard.observe(loss)
        guard.close()
        return facts_of(folder)

    facts = run(tmp_path / "announced", announced=True)
    assert [(fact.step, fact.batch, fact.phase) for fact in facts if isinstance(fact, PhaseAnnounced)] == [
        (100, 100, "harder data")
    ]
    assert not any(isinstance(fact, Incident) for fact in facts)
    assert any(isinstance(fact, Incident) for fact in run(tmp_path / "silent", announced=False))


def test_a_phase_announced_after_the_update_begins_with_the_next_step(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=DataLoader(torch.ones(8, 1)), run=tmp_path, snapshot_every=0,
        observe_only=True,
    )  # fmt: skip
    for x in guard:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        guard.observe(loss)
        if guard.step == 3:
            guard.announce("next")
    guard.close()
    assert [fact.step for fact in facts_of(tmp_path) if isinstance(fact, PhaseAnnounced)] == [4]
