"""The fast tier's slots: what is readable is never written, and nothing of anybody else's is touched."""

import fcntl
import os
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import manifest_of, write_checkpoint
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.sizing import LEAST_SLOTS, free_memory, slots_that_fit
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.layout import header_space_for, lay_out
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardReader, Written
from rollback.errors import CheckpointDamaged, CheckpointUnusable, RunDirectoryError
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.paths import RunPaths, shard_name

KINDS = {"w": ("F32", (5, 3)), "b": ("U8", (7,))}
ROOM = header_space_for(KINDS, {"local": "{}"}, 4096)


@pytest.fixture
def tier(tmp_path: Path) -> SlotPaths:
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(tier, tmp_path / "run")
    return tier


def fill(tier: SlotPaths, number: int, seq: int, byte: int) -> Manifest:
    """Write a checkpoint of two ranks into a slot, all bytes of its tensors the same."""
    layout = lay_out(KINDS, ROOM)
    records = []
    for rank in range(2):
        region = slots.map_shard(tier, number, rank, layout.size)
        region.view[:ROOM] = layout.head({"local": "{}"})
        region.view[ROOM:] = bytes([byte]) * (layout.size - ROOM)
        digest = hash_of(region.view)
        records.append(ShardRecord(file=shard_name(rank), size=layout.size, hash=digest))
        region.close()
    manifest = manifest_of(seq, 10 * seq).model_copy(update={"shards": tuple(records)})
    slots.commit(tier, number, manifest)
    return manifest


def test_what_lies_in_a_slot_is_a_checkpoint_like_any_other(tier: SlotPaths) -> None:
    manifest = fill(tier, 0, 1, 5)
    with slots.reading(tier.slot(0)) as (found, _):
        assert found == manifest
        for record in found.shards:
            with ShardReader(tier.slot(0) / record.file, record.written) as reader:
                assert bytes(reader.data("w")) == bytes([5]) * 60
                assert reader.metadata == {"local": "{}"}


def test_a_slot_is_written_again_in_place_and_may_change_its_size(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    assert slots.uncommit(tier, 0)
    inode = (tier.slot(0) / shard_name(0)).stat().st_ino
    later = fill(tier, 0, 2, 6)
    assert (tier.slot(0) / shard_name(0)).stat().st_ino == inode
    with slots.reading(tier.slot(0)) as (found, _):
        assert found == later
    assert slots.uncommit(tier, 0)
    slots.map_shard(tier, 0, 0, 100_000).close()
    assert (tier.slot(0) / shard_name(0)).stat().st_blocks * 512 >= 100_000


def test_a_committed_slot_cannot_be_written(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    with pytest.raises(RuntimeError, match="committed"):
        slots.map_shard(tier, 0, 0, 4096)


def test_a_slot_that_is_being_read_stays_until_the_reader_is_through(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    with slots.reading(tier.slot(0)):
        assert not slots.uncommit(tier, 0)
        assert slots.is_committed(tier, 0)
    assert slots.uncommit(tier, 0)
    with pytest.raises(CheckpointUnusable), slots.reading(tier.slot(0)):
        pass


def test_a_reader_that_dies_holds_nothing(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    ready, gone = os.pipe()
    child = os.fork()
    if child == 0:
        fd = os.open(tier.slot(0), os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.write(gone, b"x")
        signal.pause()
        os._exit(0)
    os.close(gone)
    os.read(ready, 1)
    assert not slots.uncommit(tier, 0)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert slots.uncommit(tier, 0)


def test_a_slot_that_never_was_is_free(tier: SlotPaths) -> None:
    assert slots.uncommit(tier, 3)
    tier.slot(3).mkdir()
    assert slots.uncommit(tier, 3)


@pytest.mark.parametrize("fault", ["open", "link", "file"])
@pytest.mark.parametrize("which", ["home", "run", "slot"])
def test_a_directory_that_others_could_reach_is_refused_untouched(tmp_path: Path, which: str, fault: str) -> None:
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    place = {"home": tier.root.parent, "run": tier.root, "slot": tier.slot(0)}[which]
    place.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    for directory in (tier.root.parent, tier.root):
        if directory.exists():
            directory.chmod(0o700)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    match fault:
        case "open":
            place.mkdir()
            place.chmod(0o770)
        case "link":
            place.symlink_to(elsewhere)
        case "file":
            place.write_text("")

    def use() -> None:
        slots.claim(tier, tmp_path / "run")
        slots.map_shard(tier, 0, 0, 4096)

    with pytest.raises(RunDirectoryError, match=str(place)):
        use()
    assert not any(elsewhere.iterdir())


def test_somebody_else_s_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(tier, tmp_path / "run")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RunDirectoryError, match="belongs to user"):
        slots.require_own(tier.root)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_file_that_is_not_ours_alone_is_refused_untouched(tier: SlotPaths, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    tier.slot(0).mkdir(mode=0o700)
    place = tier.slot(0) / shard_name(0)
    match kind:
        case "link":
            place.symlink_to(victim)
        case "hard link":
            os.link(victim, place)
        case "pipe":
            os.mkfifo(place)
    with pytest.raises(OSError if kind == "link" else RunDirectoryError):
        slots.map_shard(tier, 0, 0, 4096)
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("bit", [1 << place for place in range(6)])
def test_whatever_others_could_do_in_a_directory_it_is_refused(tier: SlotPaths, bit: int) -> None:
    tier.root.chmod(0o700 | bit)
    with pytest.raises(RunDirectoryError, match="open to others"):
        slots.require_own(tier.root)


def test_a_copy_of_a_run_directory_does_not_get_the_original_s_slots(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original/run.json").touch()
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(tier, tmp_path / "original")
    with pytest.raises(RunDirectoryError, match="belongs to the run directory"):
        slots.claim(tier, tmp_path / "copy")
    (tmp_path / "original").rename(tmp_path / "moved")
    (tmp_path / "original/logs").mkdir(parents=True)  # by a job that ran on
    slots.claim(tier, tmp_path / "moved")
    assert slots.owner_of(tier) == tmp_path / "moved"


def test_a_run_directory_that_was_moved_and_has_a_link_in_its_place_keeps_its_slots(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original/run.json").touch()
    tier = slots.tier_of(tmp_path, "0123456789abcdef")
    slots.claim(tier, tmp_path / "original")
    (tmp_path / "original").rename(tmp_path / "moved")
    (tmp_path / "original").symlink_to("moved")
    slots.claim(tier, tmp_path / "original")
    assert slots.owner_of(tier) == tmp_path / "moved"


def test_a_run_id_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError):
        slots.tier_of(tmp_path, "../../somewhere")


def test_removing_a_tier_leaves_nothing_and_spares_its_neighbours(tier: SlotPaths, tmp_path: Path) -> None:
    neighbour = slots.tier_of(tmp_path, "fedcba9876543210")
    slots.claim(neighbour, tmp_path / "another")
    fill(tier, 0, 1, 5)
    slots.remove(tier)
    slots.remove(tier)
    assert list(neighbour.root.parent.iterdir()) == [neighbour.root]
    slots.remove(neighbour)
    assert not neighbour.root.parent.exists()


def test_a_map_is_a_slot_s_shard_only_as_long_as_the_file_of_that_name_is_the_one_that_is_mapped(
    tier: SlotPaths,
) -> None:
    """Else a snapshot is written to memory that nobody finds."""
    region = slots.map_shard(tier, 0, 1, 8192)
    slots.require_file(tier, 0, 1, region)
    path = tier.slot(0) / shard_name(1)
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="its size was changed"):
        slots.require_file(tier, 0, 1, region)
    os.truncate(path, 8192)
    slots.require_file(tier, 0, 1, region)
    path.rename(tier.slot(0) / "elsewhere")
    with pytest.raises(FileNotFoundError):
        slots.require_file(tier, 0, 1, region)
    path.write_bytes(bytes(8192))
    with pytest.raises(OSError, match="another file has taken its place"):
        slots.require_file(tier, 0, 1, region)
    region.close()


def test_a_slot_is_committed_only_with_the_shards_of_its_host(tier: SlotPaths) -> None:
    manifest = fill(tier, 0, 1, 5)
    slots.require_committed(tier, 0, (0, 1))
    assert slots.uncommit(tier, 0)
    for ranks in ((), (0, 1)):
        with pytest.raises(FileNotFoundError):
            slots.require_committed(tier, 0, ranks)
    (tier.slot(0) / shard_name(1)).unlink()
    with pytest.raises(FileNotFoundError):
        slots.commit(tier, 0, manifest, here=(0, 1))
    slots.commit(tier, 0, manifest, here=(0,))


def test_each_commit_of_a_slot_is_told_from_the_one_before(tier: SlotPaths) -> None:
    assert slots.commit_of(tier, 0) is None
    manifest = fill(tier, 0, 1, 5)
    first = slots.commit_of(tier, 0)
    assert first == slots.commit_of(tier, 0) is not None
    assert slots.uncommit(tier, 0)
    assert slots.commit_of(tier, 0) is None
    slots.commit(tier, 0, manifest)
    assert slots.commit_of(tier, 0) not in (None, first)


def test_shards_of_ranks_that_were_here_once_leave_a_slot_and_those_of_this_host_stay(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    assert slots.uncommit(tier, 0)
    slots.remove_strangers(tier, 0, (1, 2))
    assert [path.name for path in tier.slot(0).iterdir()] == [shard_name(1)]


def test_a_slot_that_is_given_up_waits_for_who_reads_it_but_not_for_ever(
    tier: SlotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tier, 0, 1, 5)
    with slots.reading(tier.slot(0)) as (_, let_go):
        monkeypatch.setattr("time.sleep", lambda seconds: let_go())
        slots.forget(tier, 0)
        assert not slots.is_committed(tier, 0)
    assert tier.numbers() == [0], "its memory is used again"
    fill(tier, 0, 2, 5)
    monkeypatch.setattr(slots, "_READING", 0.0)
    with slots.reading(tier.slot(0)), pytest.raises(OSError, match="somebody is reading it"):
        slots.forget(tier, 0)
    assert slots.is_committed(tier, 0)


def test_a_slot_that_is_given_back_is_no_slot_any_more_and_a_link_is_none(tier: SlotPaths, tmp_path: Path) -> None:
    fill(tier, 0, 1, 5)
    fill(tier, 1, 2, 5)
    (tier.root / "slot-07").symlink_to(tmp_path)
    assert slots.uncommit(tier, 0)
    slots.discard(tier, 0)
    assert tier.numbers() == [1]


def test_a_slot_that_has_a_link_s_name_is_neither_written_nor_read(tier: SlotPaths, tmp_path: Path) -> None:
    fill(tier, 0, 1, 5)
    tier.slot(1).symlink_to(tier.slot(0))
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"):
        slots.uncommit(tier, 1)
    with pytest.raises(CheckpointDamaged), slots.reading(tier.slot(1)):
        pass
    assert slots.is_committed(tier, 0)


def test_a_slot_that_was_let_go_twice_closes_nobody_else_s_file(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    with slots.reading(tier.slot(0)) as (_, let_go):
        let_go()
        other = os.open(tier.root, os.O_RDONLY)  # most likely by the same number
        let_go()
        os.fstat(other)
    os.fstat(other)
    os.close(other)


def test_a_map_has_all_its_pages_and_leaves_no_file_open_behind_it(tier: SlotPaths) -> None:
    before = len(os.listdir("/proc/self/fd"))
    region = slots.map_shard(tier, 0, 0, 1 << 20)
    status = (tier.slot(0) / shard_name(0)).stat()
    assert status.st_blocks * 512 >= 1 << 20
    assert status.st_mode & 0o777 == 0o600
    region.close()
    assert len(os.listdir("/proc/self/fd")) == before
    smaller = slots.map_shard(tier, 0, 0, 4096)
    assert (tier.slot(0) / shard_name(0)).stat().st_size == 4096
    smaller.close()


@pytest.mark.parametrize("others", [False, True], ids=["ours alone", "with a file of somebody else"])
def test_a_tier_leaves_with_marks_and_copies_of_other_hosts_but_not_with_what_is_not_ours(
    tier: SlotPaths, others: bool
) -> None:
    fill(tier, 0, 1, 5)
    (last := tier.root / "last").mkdir()
    (last / "mark-00000").write_text("")
    copied = SlotPaths(tier.root / "marks-node2")
    copied.root.mkdir(mode=0o700)
    fill(copied, 0, 1, 5)
    (copied.root / "last").mkdir()
    (copied.root / "last" / "mark-00001").write_text("")
    for name in ("buddy-node2-00", "arriving-node2-00"):
        (tier.root / name).mkdir()
        (tier.root / name / "manifest.json").write_text("{}")
    if others:
        (tier.slot(0) / "notes.txt").write_text("precious")
    slots.remove(tier)
    assert tier.root.exists() == others
    if others:
        left = {str(path.relative_to(tier.root)) for path in tier.root.rglob("*")}
        assert left == {"tier.json", "slot-00", "slot-00/notes.txt"}


def test_a_directory_that_says_of_no_run_that_it_is_its_tier_is_left_alone(tier: SlotPaths) -> None:
    fill(tier, 0, 1, 5)
    tier.owner.unlink()
    with pytest.raises(RunDirectoryError, match="left alone"):
        slots.remove(tier)
    assert slots.is_committed(tier, 0)


# --- where a run's checkpoints are ------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    job = JobIdentity(world_size=2, model=[], optimizer={}, objects=[], data={})
    identity = new_identity(job)
    write_identity(paths, identity)
    tier = slots.tier_of(tmp_path, identity.run_id)
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    return paths


def test_checkpoints_of_both_tiers_are_found_the_fast_one_first(paths: RunPaths) -> None:
    tier = tiers.fast_tier_of(paths)
    assert tier is not None
    old = write_checkpoint(paths, 0, 0)
    both = write_checkpoint(paths, 1, 10)
    fill(tier, 2, 1, 5)
    newest = fill(tier, 0, 2, 6)
    found = [(place.name, place.tier, place.slot) for place in tiers.locate(paths)]
    assert found == [(old, "durable", None), (both, "fast", 2), (both, "durable", None), (newest.name, "fast", 0)]


def test_a_slot_without_a_sound_manifest_holds_nothing(paths: RunPaths) -> None:
    tier = tiers.fast_tier_of(paths)
    assert tier is not None
    fill(tier, 0, 1, 5)
    fill(tier, 1, 2, 6)
    (tier.slot(0) / "manifest.json").write_text("{}")
    slots.uncommit(tier, 1)
    assert tiers.locate(paths) == []


def test_a_slot_that_was_reused_since_it_was_located_is_not_taken_for_what_it_held(paths: RunPaths) -> None:
    tier = tiers.fast_tier_of(paths)
    assert tier is not None
    fill(tier, 0, 1, 5)
    (place,) = tiers.locate(paths)
    with tiers.hold_slot(place):
        assert not slots.uncommit(tier, 0)
    slots.uncommit(tier, 0)
    fill(tier, 0, 2, 6)
    with pytest.raises(CheckpointDamaged, match="holds c000002"), tiers.hold_slot(place):
        pass


def test_a_pointer_to_another_run_s_tier_or_to_one_open_to_others_is_not_followed(
    paths: RunPaths, tmp_path: Path
) -> None:
    tier = tiers.fast_tier_of(paths)
    assert tier is not None
    tier.root.chmod(0o755)
    assert tiers.fast_tier_of(paths) is None
    tier.root.chmod(0o700)
    foreign = slots.tier_of(tmp_path, "fedcba9876543210")
    slots.claim(foreign, tmp_path / "another")
    tiers.point_to_fast_tier(paths, foreign)
    assert tiers.fast_tier_of(paths) is None
    paths.fast_pointer.unlink()
    assert tiers.locate(paths) == []


# --- sizing -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 42), st.integers(3, 50))
def test_slots_never_take_more_than_half_of_what_is_free_nor_fewer_than_are_needed(
    slot_bytes: int, free: int, keep: int
) -> None:
    count = slots_that_fit(slot_bytes, free, keep)
    assert count == 0 or LEAST_SLOTS <= count <= keep + 1
    assert count * slot_bytes <= free // 2
    if count < keep + 1:
        assert (count + 1) * slot_bytes > free // 2 or LEAST_SLOTS * slot_bytes > free // 2


def test_there_is_some_memory_and_a_full_file_system_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory(tmp_path) > 0
    status = os.statvfs(tmp_path)
    full = type("Full", (), {"f_bavail": 0, "f_frsize": status.f_frsize})
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    assert free_memory(tmp_path) == 0


def test_a_shard_of_a_slot_says_who_wrote_it_by_hash(tier: SlotPaths) -> None:
    manifest = fill(tier, 0, 1, 5)
    path = tier.slot(0) / shard_name(1)
    with path.open("r+b") as file:
        file.seek(ROOM + 3)
        file.write(b"x")
    with pytest.raises(CheckpointDamaged, match="hash"):
        ShardReader(path, Written(manifest.shards[1].size, manifest.shards[1].hash))
