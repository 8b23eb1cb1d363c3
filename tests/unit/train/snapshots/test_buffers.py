"""What snapshots are copied into: made ready ahead of time, the next one and no more."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollback.checkpoints.fast_tier import slots
from rollback.train.snapshots.buffers import FastTier, Staging

SIZE = 3 << 12


@pytest.fixture
def tier(tmp_path: Path) -> FastTier:
    paths = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(paths, tmp_path / "run")
    tier = FastTier(paths, 0, leads=True, here=[0])
    tier.resize(4)
    return tier


def sizes(tier: FastTier) -> dict[int, int]:
    """The slots that have memory, and how much."""
    found = {number: tier.paths.slot(number) / "rank-00000.safetensors" for number in tier.paths.numbers()}
    return {number: path.stat().st_size for number, path in found.items() if path.exists()}


def test_only_the_next_slot_is_made_ready(tier: FastTier) -> None:
    tier.fit(SIZE, None)
    tier.await_slots()
    assert sizes(tier) == {0: SIZE}
    assert tier.ready()
    assert tier.reserve()[0] == 0
    assert sizes(tier) == {0: SIZE}
    tier.wait(30)
    assert tier.ready()
    assert sizes(tier) == {0: SIZE, 1: SIZE}


def test_a_slot_that_was_made_ready_for_less_is_made_anew(tier: FastTier) -> None:
    tier.fit(SIZE, None)
    tier.await_slots()
    tier.fit(2 * SIZE, None)
    tier.wait(30)
    assert tier.reserve()[1].size == 2 * SIZE
    assert sizes(tier) == {0: 2 * SIZE}


def test_a_slot_that_is_released_while_sizes_change_is_still_told_of(tier: FastTier) -> None:
    """What is to happen once a checkpoint has left its slot happens, whoever makes the slot ready."""
    tier.fit(SIZE, None)
    tier.wait(30)
    slot, _ = tier.reserve()
    assert slot is not None
    left = threading.Event()
    tier.release(slot, lambda was_there: left.set())
    tier.fit(2 * SIZE, None)
    tier.wait(30)
    assert left.is_set()
    assert tier.reserve()[1].size == 2 * SIZE


def test_a_map_whose_file_has_lost_its_name_is_not_used_again(tier: FastTier) -> None:
    tier.fit(SIZE, None)
    tier.wait(30)
    tier.reserve()
    tier.release(0)
    tier.await_slots()
    (tier.paths.slot(0) / "rank-00000.safetensors").unlink()
    tier.fit(SIZE, None)
    tier.wait(30)
    assert not tier.ready()
    assert "No such file" in str(tier.fault)


def test_what_is_written_where_another_file_has_taken_the_name_is_no_shard(tier: FastTier) -> None:
    tier.fit(SIZE, None)
    tier.wait(30)
    tier.reserve()
    tier.require_file(0)
    path = tier.paths.slot(0) / "rank-00000.safetensors"
    path.unlink()
    path.write_bytes(bytes(SIZE))
    with pytest.raises(OSError, match="another file"):
        tier.require_file(0)


@pytest.mark.parametrize("removed", ["rank-00000.safetensors", "manifest.json"])
def test_who_lets_a_checkpoint_go_is_told_whether_it_was_there_until_then(tier: FastTier, removed: str) -> None:
    told: list[bool] = []
    tier.fit(SIZE, None)
    for number in range(2):
        tier.wait(30)
        assert tier.reserve()[0] == number
        (tier.paths.slot(number) / "manifest.json").touch()
        assert tier.has_checkpoint(number)
    (tier.paths.slot(1) / removed).unlink()
    assert not tier.has_checkpoint(1)
    for number in range(2):
        tier.release(number, told.append)
    tier.await_slots()
    assert told == [True, False]


def test_private_memory_of_another_size_is_not_ready_until_it_is_made() -> None:
    go_on = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as thread:
        staging = Staging(thread)
        staging.fit(SIZE, None)
        staging.wait(30)
        assert staging.ready()
        thread.submit(go_on.wait)
        staging.fit(2 * SIZE, None)
        ready_before = staging.ready()
        go_on.set()
        assert not ready_before
        staging.wait(30)
        assert staging.ready()
        assert staging.reserve()[1].size == 2 * SIZE
    staging.close()
