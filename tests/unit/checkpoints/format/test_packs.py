"""Packs: where shards lie in them, which are believed, and what is written where nobody needs them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from open_files import open_below

from checkpoints import content, lay_out_as, manifest_of, shard_of, whole, write_checkpoint
from rollback.checkpoints import ring
from rollback.checkpoints.format import manifest as manifest_module
from rollback.checkpoints.format.direct import write_direct
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.manifest import Manifest, ShardRecord, parse_manifest, read_manifest
from rollback.checkpoints.format.packs import PAGE, groups_in_run, place_in_run, places
from rollback.checkpoints.format.shard import Written
from rollback.errors import CheckpointDamaged, RingUnavailable
from rollback.inspect.ring.verify import FrozenFiles, find_faults
from rollback.ring import in_run
from rollback.ring.in_run import RingInRun
from rollback.ring.url.ring import own_files
from rollback.rundir.paths import FORMAT, FORMAT_OF_PACKS, MOST_FILES, RunPaths, format_for, has_packs, shard_name


@given(ranks=st.integers(MOST_FILES, 200_000))
def test_in_the_run_directory_no_checkpoint_has_more_files_than_that(ranks: int) -> None:
    groups = groups_in_run(ranks)
    assert len(groups) + 1 <= MOST_FILES
    assert [groups[0].start, *(group.stop for group in groups)] == [*(group.start for group in groups), ranks]


@given(sizes=st.lists(st.integers(8, 5 * PAGE), min_size=1, max_size=12), seed=st.randoms())
def test_shards_lie_one_behind_another_and_share_no_page_whoever_is_in_the_group(sizes: list[int], seed: Any) -> None:
    ranks = list(range(len(sizes)))
    seed.shuffle(ranks)
    cut = seed.randint(0, len(ranks))
    found = places(sizes, [group for group in (ranks[:cut], ranks[cut:]) if group])
    assert sorted(found) == sorted(ranks)
    for group in filter(None, (ranks[:cut], ranks[cut:])):
        end = 0
        for rank in sorted(group):
            assert found[rank].file == f"pack-{min(group):05d}-{max(group):05d}.shards"
            assert found[rank].start in range(end, end + PAGE)
            assert found[rank].start % PAGE == 0  # type: ignore[operator]
            end = found[rank].start + sizes[rank]  # type: ignore[operator]


def recorded(ranks: int) -> Manifest:
    shards = tuple(ShardRecord(file=shard_name(rank), size=5000 + rank, hash=f"{rank:032x}") for rank in range(ranks))
    return manifest_of(1, 10, ranks).model_copy(update={"shards": shards})


@pytest.mark.parametrize("ranks", [1, 2, MOST_FILES - 1])
def test_where_files_are_few_enough_nothing_is_written_otherwise_than_before(ranks: int) -> None:
    manifest = recorded(ranks)
    assert manifest.packed() is manifest
    body = json.loads(manifest.to_json())
    assert (body["format"], format_for(ranks), has_packs(ranks)) == (4, FORMAT, False)
    assert [sorted(shard) for shard in body["shards"]] == [["file", "hash", "size"]] * ranks
    assert place_in_run(0, None).start is None


@pytest.mark.parametrize("ranks", [MOST_FILES, 2 * MOST_FILES])
def test_a_manifest_with_packs_is_read_as_it_was_written_and_so_is_one_without_for_as_many_ranks(ranks: int) -> None:
    loose = recorded(ranks)
    packed = loose.packed()
    assert (packed.format, format_for(ranks)) == (FORMAT_OF_PACKS, FORMAT_OF_PACKS)
    for manifest in (loose, packed, loose.packed([range(first, first + 8) for first in range(0, ranks, 8)])):
        assert parse_manifest(manifest.to_json(), manifest.name, "there") == manifest
    assert len(packed.files) < MOST_FILES
    assert packed.packed([range(ranks)]) is packed, "what lies in packs stays in them when it is copied"
    assert [shard.written for shard in packed.shards] == [shard.written for shard in loose.shards]


def test_a_file_that_comes_late_from_a_host_with_other_shards_replaces_none_of_the_present_ones() -> None:
    """At a URL each host writes a pack of what it has, and one that was taken for lost may still do so."""
    loose = recorded(MOST_FILES)
    (late,) = own_files(loose, (8, 9, 10, 11))
    present = [*own_files(loose, (8, 9)), *own_files(loose, (10, 11))]
    assert late.name not in {file.name for file in present}


def test_places_that_rollback_does_not_give_are_not_believed() -> None:
    body = json.loads(recorded(MOST_FILES).packed().to_json())
    del body["check"]
    first, second, third, *rest = body["shards"]
    for changed in [
        [{**first, "start": 4096}, second, third],
        [first, {**second, "start": 0}, third],
        [first, {**second, "start": second["start"] + 4096}, third],
        [first, {**second, "start": None}, third],
        [first, {key: second[key] for key in ("file", "size", "hash")}, third],
        [{**first, "size": first["size"] + PAGE}, second, third],
        [{**shard, "file": "pack-00001-00002.shards"} for shard in (first, second)] + [third],
        [{**shard, "file": "../pack-00000-00001.shards"} for shard in (first, second)] + [third],
        [{**first, "file": shard_name(0)}, {**second, "file": "pack-00001-00001.shards", "start": 0}, third],
        [first, second, {**third, "file": "pack-00000-00001.shards"}],
        [{**shard, "file": "pack-00000-00002.shards"} for shard in (first, second)] + [third],
    ]:
        text = json.dumps({**(new := {**body, "shards": [*changed, *rest]}), "check": manifest_module.check_of(new)})
        with pytest.raises(CheckpointDamaged, match="does not list one shard for each"):
            parse_manifest(text.encode(), body["name"], "there")


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """Of a run in which two ranks are so many that they share a file."""
    lay_out_as("packs", monkeypatch)
    return RunPaths(tmp_path)


def in_slot(slot: Path, ranks: int) -> tuple[Manifest, Path]:
    """A checkpoint in memory, where each shard has a file of its own."""
    slot.mkdir()
    records = []
    for rank in range(ranks):
        content = shard_of(rank, 10).view
        (slot / shard_name(rank)).write_bytes(content)
        records.append(ShardRecord.of(rank, Written(len(content), hash_of(content))))
    return manifest_of(1, 10, ranks).model_copy(update={"shards": tuple(records)}), slot


def test_what_two_ranks_write_into_a_pack_is_read_by_each(paths: RunPaths) -> None:
    name = write_checkpoint(paths, 1, 10)
    assert {path.name for path in paths.checkpoint(name).iterdir()} == {"manifest.json", "pack-00000-00001.shards"}
    assert whole(paths, name)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_in_a_pack_is_found_in_the_shard_that_has_it(paths: RunPaths, rank: int) -> None:
    name = write_checkpoint(paths, 1, 10)
    pack, manifest = paths.checkpoint(name) / "pack-00000-00001.shards", read_manifest(paths.checkpoint(name))
    start = manifest.shards[rank].start
    assert start is not None
    with open(pack, "r+b") as file:
        file.seek(start + 4096)
        byte = file.read(1)[0]
        file.seek(start + 4096)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointDamaged, match="has hash"):
        ring.open_shards(paths.checkpoint(name), manifest)
    (fault,) = find_faults(paths.checkpoint(name), "durable", None, FrozenFiles(paths))
    assert fault.fault.startswith(f"rank {rank}: "), "the file is that of both"


@pytest.mark.parametrize("left", [0, 100, 4096, -1])
def test_a_pack_that_was_cut_is_found(paths: RunPaths, left: int) -> None:
    name = write_checkpoint(paths, 1, 10)
    pack = paths.checkpoint(name) / "pack-00000-00001.shards"
    os.truncate(pack, left if left >= 0 else pack.stat().st_size - 1)
    with pytest.raises(CheckpointDamaged, match="were written"):
        ring.open_shards(paths.checkpoint(name), read_manifest(paths.checkpoint(name)))


def test_a_pack_without_the_shard_of_its_last_rank_makes_no_checkpoint(paths: RunPaths) -> None:
    region, manifest = shard_of(0, 10), manifest_of(1, 10)
    place = place_in_run(0, [region.size] * 2)
    written = write_direct(ring.begin_writing(paths, manifest.name, 1) / place.file, region.view, place.start)
    records = tuple(ShardRecord.of(rank, written) for rank in range(2))
    with pytest.raises(CheckpointDamaged, match=r"pack-00000-00001\.shards has"):
        ring.commit(paths, manifest.model_copy(update={"shards": records}).packed())
    assert ring.names(paths) == []


def test_a_size_that_a_host_remembers_of_a_pack_costs_no_checkpoint(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For seconds a client of NFS answers from its memory, until it opens the file: another host has made it longer."""
    really = os.stat

    def remembered(path: Any, *args: Any, **options: Any) -> os.stat_result:
        found = really(path, *args, **options)
        return os.stat_result([*found[:6], 64, *found[7:]]) if str(path).endswith(".shards") else found

    monkeypatch.setattr(os, "stat", remembered)
    assert whole(paths, write_checkpoint(paths, 1, 10))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_is_reported_and_not_seen_makes_no_checkpoint_in_this_try(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The first one leaves a hole, and the pack has its size; without the last one it has not."""
    manifest, slot = in_slot(tmp_path / "slot", 2)
    at_run, really = RingInRun(paths), in_run.copy_shard
    at_run.open()

    def leave_out(source: Path, target: Path, shard: ShardRecord) -> None:
        if source.name != shard_name(rank):
            really(source, target, shard)

    with monkeypatch.context() as patched:
        patched.setattr(in_run, "copy_shard", leave_out)
        with pytest.raises(RingUnavailable, match=r"pack-00000-00001\.shards has"):
            at_run.put(manifest, slot)
    assert list(paths.ring.iterdir()) == []
    at_run.put(manifest, slot)
    at_run.close()
    assert whole(paths, manifest.name)


def test_a_disk_that_refuses_a_shard_leaves_those_of_the_others(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = shard_of(0, 10), shard_of(1, 10)
    directory = ring.begin_writing(paths, manifest_of(1, 10).name, 1)
    written = write_direct(directory / "pack-00000-00001.shards", first.view, 0)

    def full(*_: object) -> int:
        raise OSError("full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="full"):
            write_direct(directory / "pack-00000-00001.shards", second.view, PAGE)
    assert (directory / "pack-00000-00001.shards").read_bytes()[: written.size] == bytes(first.view)


def test_a_place_that_a_disk_refuses_to_go_to_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError("refused")

    monkeypatch.setattr(os, "lseek", refuse)
    with pytest.raises(OSError, match="refused"):
        write_direct(tmp_path / "pack-00000-00001.shards", shard_of(0, 10).view, 0)
    assert open_below(tmp_path) == 0


def test_a_checkpoint_of_1024_ranks_has_513_files_in_the_run_directory_and_each_rank_reads_its_own(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path / "run")
    manifest, slot = in_slot(tmp_path / "slot", MOST_FILES)
    at_run = RingInRun(paths)
    at_run.open()
    at_run.put(manifest, slot)
    at_run.close()
    assert len(list(paths.checkpoint(manifest.name).iterdir())) == 513
    stored = read_manifest(paths.checkpoint(manifest.name))
    for rank in (0, 1, 2, 777, 1022, 1023):
        one = stored.model_copy(update={"shards": (stored.shards[rank],)})
        (reader,) = ring.open_shards(paths.checkpoint(manifest.name), one)
        with reader:
            assert list(reader.entries) == [f"w{rank}"]
    readers = ring.open_shards(paths.checkpoint(manifest.name), stored)
    assert open_below(tmp_path) == 512, "whole packs are open, and no shard by itself"
    for rank, reader in enumerate(readers):
        assert bytes(reader.data(f"w{rank}")) == content(rank, 10), "whichever shard beside it is closed already"
        reader.close()
        reader.close()
    assert open_below(tmp_path) == 0
