"""The ring: what it lists, what it evicts, what it refuses."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import LAYOUTS, RANKS, damage, lay_out_as, manifest_of, shard_of, whole, write_checkpoint
from rollback.checkpoints import ring
from rollback.checkpoints.format.direct import write_direct
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.packs import place_in_run
from rollback.checkpoints.format.shard import ShardPiece, write_shard
from rollback.checkpoints.pins import pin
from rollback.errors import CheckpointDamaged, CheckpointUnusable
from rollback.rundir.paths import CheckpointName, RunPaths, has_packs


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


# --- names ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**15 - 1))
def test_a_checkpoint_name_says_sequence_number_and_step(seq: int, step: int) -> None:
    name = CheckpointName.of(seq, step)
    assert name.sort_key == (name.seq, name.step) == (seq, step)
    assert CheckpointName.parse(str(name)) == name == str(name)


@pytest.mark.parametrize("name", ["", "c1-s1", "c000001-s0000000a", "xc000001-s00000001", "c000001-s00000001.tmp"])
def test_other_names_are_not_checkpoints(name: str) -> None:
    assert CheckpointName.parse(name) is None
    assert (CheckpointName(name), CheckpointName(name).sort_key) == (name, (0, 0)), "as a record has it"


def test_the_ring_lists_committed_checkpoints_only_by_sequence_number(paths: RunPaths) -> None:
    assert ring.names(paths) == []
    second, first = write_checkpoint(paths, 11, 10), write_checkpoint(paths, 2, 30)
    ring.begin_writing(paths, CheckpointName.of(12, 40), 1)
    (paths.ring / CheckpointName.of(13, 50)).write_text("a file")
    (paths.ring / CheckpointName.of(14, 60)).symlink_to(paths.checkpoint(first))
    (paths.ring / "notes").mkdir()
    assert ring.names(paths) == [first, second]
    assert whole(paths, first)
    assert whole(paths, second)


# --- committing -------------------------------------------------------------------------------------------------------


def half_written(paths: RunPaths) -> tuple[Path, list[ShardRecord]]:
    """A checkpoint of two ranks, of which only rank 0 has written; the records of both."""
    directory = ring.begin_writing(paths, manifest_of(0, 10).name, 1)
    written = write_shard(directory / "rank-00000.safetensors", [ShardPiece("w", "U8", (2,), memoryview(b"ab"))], {})
    return directory, [ShardRecord.of(rank, written) for rank in range(2)]


def commit(paths: RunPaths, records: list[ShardRecord]) -> None:
    ring.commit(paths, manifest_of(0, 10).model_copy(update={"shards": tuple(records)}))


def test_a_checkpoint_without_the_shards_of_all_ranks_is_not_committed(paths: RunPaths) -> None:
    _, records = half_written(paths)
    with pytest.raises(OSError, match="rank-00001"):
        commit(paths, records)
    with pytest.raises(ValueError, match="1 of 2 shards"):
        commit(paths, records[:1])
    assert ring.names(paths) == []


def test_a_shard_that_is_not_what_its_rank_wrote_is_not_committed(paths: RunPaths) -> None:
    directory, records = half_written(paths)
    written = write_shard(directory / "rank-00001.safetensors", [ShardPiece("v", "U8", (2,), memoryview(b"cd"))], {})
    os.truncate(directory / "rank-00001.safetensors", written.size - 1)
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        commit(paths, records)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rank_of_an_earlier_attempt_writes_late_is_in_no_checkpoint_of_the_same_name(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """It was cut off from the disk for a while, and the next attempt has begun a checkpoint of its number and step."""
    lay_out_as(layout, monkeypatch)
    late, name, really = shard_of(1, 11), CheckpointName.of(1, 10), ring.commit
    place = place_in_run(1, [late.size] * RANKS if has_packs(RANKS) else None)
    begun = ring.begin_writing(paths, name, 1)
    ring.sweep(paths)

    def commit(paths: RunPaths, manifest: Manifest) -> None:
        with pytest.raises(FileNotFoundError):
            write_direct(begun / place.file, late.view, place.start)
        write_direct(ring.begin_writing(paths, name, 1) / place.file, late.view, place.start)
        really(paths, manifest)

    monkeypatch.setattr(ring, "commit", commit)
    assert whole(paths, write_checkpoint(paths, 1, 10, attempt=2))
    assert len(ring.sweep(paths)) == 1


def test_what_is_abandoned_or_swept_leaves_nothing(paths: RunPaths) -> None:
    kept = write_checkpoint(paths, 0, 0)
    half_written(paths)
    ring.abandon(paths, manifest_of(0, 10).name, 1)
    ring.abandon(paths, manifest_of(0, 10).name, 1)
    half_written(paths)
    paths.evicting(CheckpointName.of(7, 70)).mkdir()
    assert len(ring.sweep(paths)) == 2
    assert os.listdir(paths.ring) == [kept]
    assert ring.sweep(paths) == []


def test_a_pinned_checkpoint_that_was_leaving_and_was_fetched_again_stays_once(paths: RunPaths) -> None:
    name = write_checkpoint(paths, 0, 0)
    shutil.copytree(paths.checkpoint(name), paths.evicting(name))
    pin(paths, name)
    ring.sweep(paths)
    assert os.listdir(paths.ring) == [name]
    assert whole(paths, name)


def test_sweeping_before_there_is_a_ring_is_fine(paths: RunPaths) -> None:
    assert ring.sweep(paths) == []


# --- reading and leaving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
@pytest.mark.parametrize("fault", ["gone", "flipped", "link"])
def test_a_checkpoint_with_a_fault_in_any_file_is_not_believed(paths: RunPaths, file: str, fault: str) -> None:
    sound, faulty = write_checkpoint(paths, 0, 0), write_checkpoint(paths, 1, 10)
    path = paths.checkpoint(faulty) / file
    if fault == "flipped":
        damage(path)
    else:
        path.rename(paths.root / "moved")
    if fault == "link":
        path.symlink_to(paths.root / "moved")
    manifests, damaged = ring.manifests(paths)
    if file == "manifest.json":
        assert [manifest.name for manifest in manifests] == [sound]
        assert "manifest.json" in damaged[faulty].message
    else:
        with pytest.raises(CheckpointUnusable, match=file):
            ring.open_shards(paths.checkpoint(manifests[1].name), manifests[1])
        for reader in ring.open_shards(paths.checkpoint(manifests[0].name), manifests[0]):
            reader.close()


def test_an_evicted_checkpoint_is_gone_and_a_quarantined_one_can_be_looked_at(paths: RunPaths) -> None:
    first, second, third, fourth = (write_checkpoint(paths, seq, 10 * seq) for seq in range(4))
    ring.evict(paths, first)
    ring.quarantine(paths, second)
    assert os.listdir(paths.quarantine) == [second]
    ring.quarantine(paths, third)
    assert sorted(os.listdir(paths.quarantine)) == [second, third]
    assert ring.names(paths) == [fourth]
    assert os.listdir(paths.ring) == [fourth]


def test_what_a_disk_refuses_for_a_while_stays_in_quarantine_which_has_a_bound(paths: RunPaths) -> None:
    names = [write_checkpoint(paths, seq, 10 * seq) for seq in range(18)]
    newest_first = [*names[:0:-1], names[0]]
    for count, name in enumerate(newest_first, start=1):
        ring.quarantine(paths, name)
        assert len(os.listdir(paths.quarantine)) == min(count, 16)
    assert sorted(os.listdir(paths.quarantine)) == [names[0], *names[3:]], "the one just put aside is among them"
    again = write_checkpoint(paths, 17, 170)  # fetched from elsewhere, and damaged too
    ring.quarantine(paths, again)
    assert len(os.listdir(paths.quarantine)) == 16
    (paths.quarantine / again).rename(paths.checkpoint(again))
    assert whole(paths, again), "put back by hand"
