"""Weights that a script moves within its step, by writes that torch does not count, are never kept."""

from pathlib import Path

import pytest
import torch
from test_survivor import AT, TOY, keep, kept
from toy import facts, train

import rollback
from rollback.checkpoints.fast_tier import last_snapshot_result
from rollback.facts.training import NoLastSnapshot
from rollback.train.snapshots.unseen_writes import FIRST_STEPS


def weights_of(guard: rollback.Guard) -> torch.Tensor:
    return next(guard._loop.state.model.parameters())


def test_where_a_script_makes_such_writes_there_is_no_last_snapshot(tmp_path: Path, memory: Path) -> None:
    def move(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None:
            weights_of(guard).data.mul_(1.001)

    assert not kept(tmp_path / "run", memory, keep, at_each=move)
    (fact,) = facts(tmp_path / "run", NoLastSnapshot)
    assert "through `.data`" in fact.reason


def test_writes_that_torch_counts_are_left_to_the_counters(tmp_path: Path, memory: Path) -> None:
    def move(guard: rollback.Guard | None, position: int) -> None:
        if guard is not None and position < AT:
            with torch.no_grad():
                weights_of(guard).mul_(1.001)

    (account,) = kept(tmp_path / "run", memory, keep, at_each=move)
    assert (account.step, account.why_not) == (AT, None)


@pytest.mark.parametrize("position", range(FIRST_STEPS))
def test_until_that_is_known_the_weights_themselves_are_compared(tmp_path: Path, memory: Path, position: int) -> None:
    def end(guard: rollback.Guard | None, at: int) -> None:
        if at == position and guard is not None:
            before = weights_of(guard).data.clone()
            weights_of(guard).data.mul_(1.5)
            keep(guard)
            weights_of(guard).data.copy_(before)
            found.extend(last_snapshot_result.read_results(guard._loop.last_snapshot._paths))

    found: list[last_snapshot_result.LastSnapshotResult] = []
    train(TOY.with_settings(fast_tier=str(memory), snapshot_every=50), tmp_path / "run", hook=end)
    (account,) = found
    assert account.why_not == f"weights or optimizer are not those of step {position} any more"
