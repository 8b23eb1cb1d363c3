"""What snapshots are copied into: made ready ahead of time, the next one and no more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollback.checkpoints import slots
from rollback.train.snapshots.buffers import FastTier

SIZE = 3 << 12


@pytest.fixture
def tier(tmp_path: Path) -> FastTier:
    paths = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(paths, tmp_path / "run")
    tier = FastTier(paths, 0, leads=True, here=[0], held={})
    tier.resize(4)
    return tier


def sizes(tier: FastTier) -> dict[int, int]:
    """The slots that have memory, and how much."""
    found = {number: tier.paths.slot(number) / "rank-00000.safetensors" for number in tier.paths.numbers()}
    return {number: path.stat().st_size for number, path in found.items() if path.exists()}


def test_only_the_next_slot_is_made_ready(tier: FastTier) -> None:
    tier.fit(SIZE)
    tier.settle()
    assert sizes(tier) == {0: SIZE}
    assert tier.ready()
    tier.take("c000000-s00000001")
    assert sizes(tier) == {0: SIZE}
    tier.wait(30)
    assert tier.ready()
    assert sizes(tier) == {0: SIZE, 1: SIZE}


def test_a_slot_that_was_made_ready_for_less_is_made_anew(tier: FastTier) -> None:
    tier.fit(SIZE)
    tier.settle()
    tier.fit(2 * SIZE)
    tier.wait(30)
    assert tier.take("c000000-s00000001").size == 2 * SIZE
    assert sizes(tier) == {0: 2 * SIZE}


def test_a_slot_that_is_let_go_while_rooms_change_is_still_told_of(tier: FastTier) -> None:
    """What is to happen once a checkpoint has left its slot happens, whoever makes the slot ready."""
    tier.fit(SIZE)
    tier.wait(30)
    tier.take("c000000-s00000001")
    left = threading.Event()
    tier.let_go("c000000-s00000001", lambda was_there: left.set())
    tier.fit(2 * SIZE)
    tier.wait(30)
    assert left.is_set()
    assert tier.take("c000001-s00000002").size == 2 * SIZE


def test_a_map_whose_file_has_lost_its_name_is_not_used_again(tier: FastTier) -> None:
    tier.fit(SIZE)
    tier.wait(30)
    tier.take("c000000-s00000001")
    tier.let_go("c000000-s00000001")
    tier.settle()
    (tier.paths.slot(0) / "rank-00000.safetensors").unlink()
    tier.fit(SIZE)
    tier.wait(30)
    assert not tier.ready()
    assert "No such file" in (tier.fault or "")


def test_what_is_written_where_another_file_has_taken_the_name_is_no_shard(tier: FastTier) -> None:
    tier.fit(SIZE)
    tier.wait(30)
    tier.take("c000000-s00000001")
    tier.require_file("c000000-s00000001")
    path = tier.paths.slot(0) / "rank-00000.safetensors"
    path.unlink()
    path.write_bytes(bytes(SIZE))
    with pytest.raises(OSError, match="another file"):
        tier.require_file("c000000-s00000001")


@pytest.mark.parametrize("removed", ["rank-00000.safetensors", "manifest.json"])
def test_who_lets_a_checkpoint_go_is_told_whether_it_was_there_until_then(tier: FastTier, removed: str) -> None:
    told: list[bool] = []
    tier.fit(SIZE)
    for number, name in enumerate(["c000000-s00000001", "c000001-s00000002"]):
        tier.wait(30)
        tier.take(name)
        (tier.paths.slot(number) / "manifest.json").touch()
        assert tier.is_there(name)
    (tier.paths.slot(1) / removed).unlink()
    assert not tier.is_there("c000001-s00000002")
    for name in ("c000000-s00000001", "c000001-s00000002"):
        tier.let_go(name, told.append)
    tier.settle()
    assert told == [True, False]
