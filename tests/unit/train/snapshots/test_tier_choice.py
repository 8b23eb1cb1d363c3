"""How a job takes its snapshots: whether it has a fast tier, how many slots, and what the loop waits for."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoints import manifest_of
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import ShardRecord
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.paths import RunPaths, shard_name
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots import tier_choice as choices
from rollback.train.snapshots.tier_choice import Allotment, allot, capture_mode, open_tier

MB = 10**6


class Several:
    """Ranks, all of which but this one say what a test lets them say: by the order in which they are asked."""

    def __init__(self, *others: list[Any], here: list[int], rank: int = 0, hosts: int = 1) -> None:
        self.rank, self.on_this_host, self.host_count = rank, here, hosts
        self.is_rank_0, self.first_of_host = rank == 0, rank == here[0]
        self.first_in_directory = self.is_rank_0
        self._others = list(others)
        self.asked: list[Any] = []

    def from_each(self, value: Any) -> list[Any]:
        self.asked.append(value)
        answers = list(self._others.pop(0)) if self._others else []
        answers.insert(self.rank, value)
        return answers

    def first_fault(self, fault: str | None) -> str | None:
        return next((text for text in self.from_each(fault or "") if text), None)

    def all_of(self, condition: bool) -> bool:
        return all(self.from_each(condition))


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_identity(paths, new_identity(JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})))
    return paths


@pytest.fixture
def run_id(paths: RunPaths) -> str:
    return str(json.loads(paths.identity.read_text())["run_id"])


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_tier_is_made_said_where_it_is_and_found_again(paths: RunPaths, run_id: str, tmp_path: Path) -> None:
    tier, why_not = open_tier(paths, Ranks(), run_id, tmp_path)
    assert (tier, why_not) == (slots.tier_of(tmp_path, run_id), "")
    assert tier is not None
    assert slots.owner_of(tier) == paths.root
    assert tiers.fast_tier_of(paths) == tier
    assert open_tier(paths, Ranks(), run_id, tmp_path) == (tier, "")


def test_what_lies_in_a_tier_that_the_start_has_not_seen_is_not_found_by_the_next_one(
    paths: RunPaths, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run directory was removed, and came back from the ring at a URL: the start has gone on from there."""
    tier, _ = open_tier(paths, Ranks(), run_id, tmp_path)
    assert tier is not None
    tier.slot(0).mkdir()
    shard = ShardRecord(file=shard_name(0), size=8, hash="0" * 32)
    manifest = manifest_of(1, 10, ranks=1).model_copy(update={"shards": (shard,)})
    (tier.slot(0) / shard.file).write_bytes(bytes(8))
    slots.commit(tier, 0, manifest, [0])
    assert open_tier(paths, Ranks(), run_id, tmp_path) == (tier, "")
    assert [place.name for place in tiers.in_slots(paths)] == [manifest.name], "the start has seen it"
    paths.fast_pointer.unlink()
    monkeypatch.setattr(slots, "_READING", 0.1)
    with slots.reading(tier.slot(0)):
        found, why_not = open_tier(paths, Ranks(), run_id, tmp_path)
    assert found is None
    assert "somebody is reading" in why_not
    assert open_tier(paths, Ranks(), run_id, tmp_path) == (tier, "")
    assert tiers.in_slots(paths) == []


def test_where_it_is_switched_off_that_of_an_earlier_attempt_is_found_and_none_is_made(
    paths: RunPaths, run_id: str, tmp_path: Path
) -> None:
    assert open_tier(paths, Ranks(), run_id, None) == (None, "it is switched off")
    tier, _ = open_tier(paths, Ranks(), run_id, tmp_path)
    assert open_tier(paths, Ranks(), run_id, None) == (tier, "it is switched off")
    several: Any = Several([None], [False], here=[0, 1])
    assert open_tier(paths, several, run_id, None) == (None, "it is switched off"), "one rank does not see it"
    mixed: Any = Several(["/elsewhere"], here=[0, 1])
    assert open_tier(paths, mixed, run_id, None) == (None, "on rank 0 it is switched off, and on rank 1 it is not")


def test_a_base_that_cannot_be_used_is_no_tier_and_why(paths: RunPaths, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tier, why_not = open_tier(paths, Ranks(), run_id, tmp_path / "file")
    assert tier is None
    assert why_not.startswith(f"{tmp_path / 'file'} cannot be used (")
    tier, why_not = open_tier(paths, Ranks(), "../elsewhere", tmp_path)
    assert tier is None
    assert "cannot be a directory's name" in why_not
    (tmp_path / "run.json").touch()
    slots.claim(slots.tier_of(tmp_path, run_id), tmp_path)
    tier, why_not = open_tier(paths, Ranks(), run_id, tmp_path)
    assert tier is None
    assert why_not.endswith(f"belongs to the run directory {tmp_path})"), "without a hint inside of the sentence"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory's disk takes no file any more."""

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tiers, "write_file", refuse)


def test_an_attempt_goes_on_with_the_tier_of_the_one_before_though_the_run_directory_s_disk_is_full(
    paths: RunPaths, run_id: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = open_tier(paths, Ranks(), run_id, tmp_path)
    request.getfixturevalue("full_disk")
    assert open_tier(paths, Ranks(), run_id, tmp_path) == before == (slots.tier_of(tmp_path, run_id), "")


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_of_the_run_directory_is_not_blamed_on_the_fast_tier(
    paths: RunPaths, run_id: str, tmp_path: Path
) -> None:
    tier, why_not = open_tier(paths, Ranks(), run_id, tmp_path)
    assert tier is None
    assert f"{paths.fast_pointer}, and that cannot be written (" in why_not
    assert "No space left" in why_not
    assert why_not.endswith("see to the disk of the run directory")
    assert "cannot be used" not in why_not


def test_a_tier_on_another_number_of_hosts_is_written_down(paths: RunPaths, run_id: str, tmp_path: Path) -> None:
    tier, _ = open_tier(paths, Ranks(), run_id, tmp_path)
    assert tier is not None
    tiers.point_to_fast_tier(paths, tier, hosts=2)
    assert tiers.host_count(paths) == 2


def test_what_one_host_cannot_no_rank_does(paths: RunPaths, run_id: str, tmp_path: Path) -> None:
    root = str(slots.tier_of(tmp_path, run_id).root)
    several: Any = Several([root], ["no room on host b"], here=[0], hosts=2)
    assert open_tier(paths, several, run_id, tmp_path) == (None, "no room on host b")


def test_ranks_that_name_different_places_have_no_tier(paths: RunPaths, run_id: str, tmp_path: Path) -> None:
    several: Any = Several(["/0"], here=[0, 1])
    tier, why_not = open_tier(paths, several, run_id, tmp_path)
    assert tier is None
    assert why_not.startswith("the ranks name different places for it: /0, ")
    assert not slots.tier_of(tmp_path, run_id).root.exists()


@pytest.mark.parametrize(
    ("rank", "here", "made", "pointed"), [(0, [0, 1], True, True), (1, [0, 1], False, False), (1, [1], True, False)]
)
def test_the_first_rank_of_each_host_makes_the_tier_and_rank_0_says_where_it_is(
    paths: RunPaths, run_id: str, tmp_path: Path, rank: int, here: list[int], made: bool, pointed: bool
) -> None:
    expected = slots.tier_of(tmp_path, run_id)
    several: Any = Several([str(expected.root)], [""], here=here, rank=rank, hosts=2)
    assert open_tier(paths, several, run_id, tmp_path) == (expected, "")
    assert expected.root.exists() == made
    assert paths.fast_pointer.exists() == pointed
    if pointed:
        assert tiers.host_count(paths) == 2


# --- how many ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlotPaths:
    """A tier in 80 MB of memory of which its slots take 20 already."""
    monkeypatch.setattr(choices, "free_memory", lambda _: 60 * MB)
    monkeypatch.setattr(choices, "bytes_of_tier", lambda _: 20 * MB)
    return SlotPaths(tmp_path)


def test_slots_hold_what_all_ranks_of_a_host_store_in_whole_pages(tier: SlotPaths) -> None:
    ranks: Any = Several([4097, 10**9], here=[0, 1])
    assert allot(tier, "", ranks, 1, 6).slot_bytes == 3 * 4096 + 65536
    count, size, free = ranks.asked[1]
    assert (count, size, free) == (7, 3 * 4096 + 65536, 80 * MB)


def test_each_host_gives_as_many_slots_as_the_one_that_can_give_fewest(tier: SlotPaths) -> None:
    ranks: Any = Several([MB], [[5, 9 * MB, 90 * MB]], here=[0], hosts=2)
    found = allot(tier, "", ranks, MB, 6)
    assert (found.slots, found.slot_bytes) == (5, 9 * MB)
    assert found.reason == f"5 slots of 9.0 MB in {tier.root} on each of 2 hosts"


def test_on_one_host_hosts_are_not_spoken_of(tier: SlotPaths) -> None:
    found = allot(tier, "", Ranks(), 0, 6)
    assert found == Allotment(7, 65536, f"7 slots of 0.1 MB in {tier.root}")


def test_where_memory_has_no_room_for_four_slots_there_are_none_and_it_is_said_how_much_is_free(
    tier: SlotPaths,
) -> None:
    found = allot(tier, "", Ranks(), 200 * MB, 6)
    assert found.slots == 0
    assert found.slot_bytes > 200 * MB
    assert found.reason == (
        f"checkpoints are written to the run directory: 80.0 MB of memory are free for {tier.root}, and half of it has "
        "no room for four slots of 0.2 GB"
    )


def test_without_a_tier_checkpoints_go_to_the_run_directory_and_why() -> None:
    ranks: Any = Several([MB], [[9, 5 * MB, 0]], here=[0], hosts=2)
    found = allot(None, "it is switched off", ranks, MB, 6)
    assert ranks.asked[1][0] == 0, "no other rank must believe that there are slots here"
    assert found == Allotment(0, 5 * MB, "checkpoints are written to the run directory: it is switched off")


def test_a_tier_that_cannot_be_measured_has_no_slots(tier: SlotPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> int:
        raise OSError("gone")

    monkeypatch.setattr(choices, "free_memory", refuse)
    assert allot(tier, "", Ranks(), MB, 6).slots == 0


# --- what the loop waits for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_device", "cores", "ranks", "threads", "mode", "reason"),
    [
        (True, 1, 8, 8, "overlapped", "the device copies beside its computing"),
        (False, 9, 2, 4, "overlapped", "2 ranks of 4 threads leave 1 of 9 cores free"),
        (False, 8, 2, 4, "at_once", "2 ranks of 4 threads leave none of 8 cores free"),
        (False, 2, 1, 1, "overlapped", "1 rank of 1 thread leave 1 of 2 cores free"),
    ],
)
def test_a_thread_copies_beside_the_training_where_a_core_is_free(
    on_device: bool, cores: int, ranks: int, threads: int, mode: str, reason: str
) -> None:
    assert capture_mode(on_device, cores, ranks, threads) == (mode, reason)


def test_the_usual_mode_is_by_the_cores_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "cores_here", lambda: 3)
    monkeypatch.setattr(choices.torch, "get_num_threads", lambda: 1)
    ranks: Any = SimpleNamespace(on_this_host=[0, 1])
    assert choices.usual_capture_mode(False, ranks) == capture_mode(False, 3, 2, 1)


@pytest.mark.parametrize(
    ("count", "text"), [(10**8, "0.1 GB"), (10**8 - 1, "100.0 MB"), (0, "0.0 MB"), (25 * 10**8, "2.5 GB")]
)
def test_sizes_are_told_in_a_unit_that_suits_them(count: int, text: str) -> None:
    assert choices._size(count) == text
