"""When snapshots are due, and when room for them is made anew: an optimizer's state comes with its first gradient."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import SETTINGS, Toy, facts, train

import rollback
from rollback.environment import ENV_APART
from rollback.facts.training import Committed, Dropped, Saving, Trouble
from rollback.train.comm.ranks import Ranks
from rollback.train.loop import TrainingLoop
from rollback.train.pass_rehearsal import PassRehearsal
from rollback.train.snapshots import tier_choice
from rollback.train.snapshots.buffers import Staging
from rollback.train.snapshots.schedule import OptimizerStates, SnapshotSchedule


class CountingRanks(Ranks):
    """One rank, which stands for two: the other one says what is set here."""

    asked, other = 0, True

    def all_of(self, condition: bool) -> bool:
        self.asked += 1
        return condition and self.other


def test_ranks_ask_each_other_ever_more_seldom_for_a_state_that_does_not_come() -> None:
    optimizer, ranks = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), CountingRanks()
    states = OptimizerStates(optimizer, ranks)
    states.look()
    asked_at = []
    for update in range(1, 101):
        before = ranks.asked
        assert not states.one_has_come()
        asked_at += [update] if ranks.asked > before else []
    assert asked_at == [1, 2, 4, 8, 16, 32, 64]


def test_a_state_that_comes_on_any_rank_is_heard_of_on_all_and_then_nobody_asks() -> None:
    """Not twice of the same one, where others never have one."""
    weight, ranks = nn.Parameter(torch.ones(1)), CountingRanks()
    optimizer = torch.optim.Adam([weight])
    states = OptimizerStates(optimizer, ranks)
    states.look()
    ranks.other = False  # it has got one
    assert states.one_has_come()
    assert not states.here
    ranks.other = True
    weight.grad = torch.ones(1)
    optimizer.step()
    assert states.one_has_come()
    states.look()
    before = ranks.asked
    assert not any(states.one_has_come() for _ in range(100))
    assert (ranks.asked, states.here) == (before, True)


def test_a_state_that_comes_between_two_questions_costs_one_snapshot_which_is_made_up_for_at_once(
    tmp_path: Path,
) -> None:
    """It comes behind the question at update 8, and the room that is there at the snapshot of step 10 is too small."""
    run, model = tmp_path / "run", nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(torch.randn(30, 4, 256)), run=run,
        **SETTINGS | {"snapshot_every": 10},
    )  # fmt: skip
    for x in guard:
        guard._loop.checkpoints.snapshots.wait()
        loss = model(x).square().mean()
        if guard.step >= 9:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(loss)
    guard.close()
    assert [fact.step for fact in facts(run, Dropped)] == [10]
    made = [fact.step for fact in facts(run, Committed)]
    assert any(10 < step <= 16 for step in made), f"before the next question: {made}"


def test_the_pace_is_not_asked_at_a_step_s_end_at_which_a_rehearsal_has_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would journal a pace, and measure the step before once more."""
    asked = list[str]()

    def watch(owner: type, name: str) -> None:
        ordinary = getattr(owner, name)

        def watched(*given: Any, **others: Any) -> Any:
            asked.append(name)
            return ordinary(*given, **others)

        monkeypatch.setattr(owner, name, watched)

    watch(TrainingLoop, "_next_of_epoch")
    watch(SnapshotSchedule, "due")
    watch(PassRehearsal, "prepare")
    toy = Toy(nan=(20,), samples=40, epochs=4, loop="rehearsed epochs", between=True)
    train(toy.with_settings(skip_after=12), tmp_path / "run")
    before = {asked[place - 1] for place, name in enumerate(asked) if name == "prepare"}
    assert before == {"_next_of_epoch"}


@pytest.mark.parametrize("in_slots", [True, False])
def test_private_memory_is_made_where_there_are_no_slots_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_slots: bool
) -> None:
    """It is as large as a slot, and to touch it for the first time takes as long: beside a restart's first step."""
    memory, made = tmp_path / "memory", list[int]()
    memory.mkdir(mode=0o700)
    ordinary = Staging._make

    def noted(staging: Staging, size: int, device: torch.device | None) -> None:
        made.append(size)
        ordinary(staging, size, device)

    monkeypatch.setattr(Staging, "_make", noted)
    train(Toy(samples=40).with_settings(fast_tier=str(memory) if in_slots else "off"), tmp_path / "run")
    assert bool(made) is not in_slots
    assert {fact.tier for fact in facts(tmp_path / "run", Committed)} == {"fast" if in_slots else "durable"}


def test_want_of_memory_for_a_copy_is_said_once_and_what_there_is_later_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a run would train for weeks without a checkpoint, and say so at its end."""
    run, tried, ordinary = tmp_path / "run", list[int](), Staging._make

    def refused(staging: Staging, size: int, device: torch.device | None) -> None:
        tried.append(guard.step if guard is not None else 0)
        if tried[-1] < 50:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        ordinary(staging, size, device)

    monkeypatch.setattr(Staging, "_make", refused)
    guard: rollback.Guard | None = None
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(torch.randn(100, 4, 4)), run=run,
        **SETTINGS | {"snapshot_every": 10, "fast_tier": "off"},
    )  # fmt: skip
    for x in guard:
        guard._loop.checkpoints.snapshots.wait()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    assert [fact.doing for fact in facts(run, Trouble)] == ["taking a checkpoint"]
    assert {fact.step for fact in facts(run, Committed)} >= {60, 70, 80, 90, 100}
    assert len(tried) < 10, f"it costs time: {tried}"
    said = capsys.readouterr().err
    assert said.count("no checkpoint can be taken: there is no memory for a copy") == 1
    assert said.count("the checkpoint of step 60 could be written again") == 1


def test_hosts_apart_whose_fast_tier_comes_back_smaller_write_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More checkpoints lie there than there are slots now: some have to leave, or no slot is free ever again."""
    (memory := tmp_path / "memory").mkdir(mode=0o700)
    monkeypatch.setenv(ENV_APART, "1")
    run, model = tmp_path / "run", nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"fast_tier": str(memory), "ring": f"file://{tmp_path}/bucket", "keep": 7, "snapshot_every": 5}
    guard = rollback.Guard(
        model=model, optimizer=optimizer, loader=list(torch.randn(240, 4, 4)), run=run, **SETTINGS | settings
    )
    failed_at, slots = 0, guard._loop.checkpoints.snapshots.memory.fast_tier
    for x in guard:
        guard._loop.checkpoints.snapshots.wait()
        if guard.step > 50 and not failed_at and slots.next_slot not in range(4):
            monkeypatch.setattr(tier_choice, "slots_that_fit", lambda *_: 4)
            failed_at, slots.fault = guard.step, "no memory"
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.observe(x.mean())
    guard.close()
    assert [fact.slots for fact in facts(run, Saving)] == [8, 0, 4]
    assert len([fact for fact in facts(run, Committed) if fact.step > failed_at]) > 5
    assert not facts(run, Dropped)
