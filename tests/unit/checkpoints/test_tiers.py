"""Where the checkpoints of a run are looked for, whose fast tier is believed, and when its memory is given back."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from checkpoints import manifest_of, write_checkpoint
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.tiers import Located
from rollback.environment import ENV_FAST_TIER
from rollback.errors import CheckpointDamaged, CheckpointUnreadable
from rollback.facts.training import PassedOver
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths, shard_name
from rollback.system import durable, files


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    write_identity(paths, new_identity(JobIdentity(world_size=2, model=[], optimizer={}, objects=[], data={})))
    return paths


@pytest.fixture
def tier(paths: RunPaths, tmp_path: Path) -> SlotPaths:
    """The run's own, which its run directory points to."""
    run_id = json.loads(paths.identity.read_text())["run_id"]
    tier = slots.tier_of(tmp_path, run_id)
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    return tier


def commit(tier: SlotPaths, number: int, seq: int, here: tuple[int, ...] = ()) -> Manifest:
    """A checkpoint of two ranks in a slot."""
    shards = tuple(ShardRecord(file=shard_name(rank), size=8, hash="0" * 32) for rank in range(2))
    manifest = manifest_of(seq, 10 * seq).model_copy(update={"shards": shards})
    tier.slot(number).mkdir(exist_ok=True)
    for shard in shards:
        (tier.slot(number) / shard.file).write_bytes(bytes(8))
    slots.commit(tier, number, manifest, here)
    return manifest


@pytest.mark.parametrize(
    ("setting", "environment", "base"),
    [
        ("auto", {}, slots.DEFAULT_BASE),
        ("auto", {ENV_FAST_TIER: "auto"}, slots.DEFAULT_BASE),
        ("auto", {ENV_FAST_TIER: ""}, slots.DEFAULT_BASE),
        ("", {}, slots.DEFAULT_BASE),
        ("auto", {ENV_FAST_TIER: "off"}, None),
        ("auto", {ENV_FAST_TIER: "/mnt/ram"}, Path("/mnt/ram")),
        ("off", {ENV_FAST_TIER: "/mnt/ram"}, None),
        ("/mnt/other", {ENV_FAST_TIER: "off"}, Path("/mnt/other")),
    ],
)
def test_where_slots_are_made_is_what_the_setting_says_and_the_environment_says_what_auto_is(
    setting: str, environment: dict[str, str], base: Path | None
) -> None:
    assert tiers.base_of(setting, environment) == base


def test_a_run_without_a_fast_tier_has_nothing_in_slots(paths: RunPaths) -> None:
    name = write_checkpoint(paths, 1, 10)
    assert tiers.look_into_slots(paths) == tiers.SlotsLook([], [], {})
    assert [(place.name, place.tier) for place in tiers.locate(paths)] == [(name, "durable")]


def test_what_is_in_a_slot_is_ahead_of_a_journal_only_where_lines_are_missing(
    paths: RunPaths, tier: SlotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def newest_is_ahead() -> bool:
        (found,) = tiers.look_into_slots(paths).ahead or [None]
        assert [place.name for place in tiers.in_slots(paths)] == ([old.name] if found else [old.name, new.name])
        assert found is None or tiers.look_into_slots(paths).unused.keys() == {"slot-01"}
        return found is not None

    (journal,) = journals = [Journal(paths.train_journal, 1)]
    journal.append(PassedOver(first=4, last=9, step=2, timeline=1))
    old, backup = commit(tier, 0, 1, (0, 1)), paths.train_journal.read_bytes()
    journal.append(PassedOver(first=30, last=31, step=10, timeline=1))
    with monkeypatch.context() as full:  # what the disk does not take is in no mark: it may be lost with rank 0
        full.setattr(durable, "write_all", refuse)
        with pytest.raises(OSError, match="full"):
            journal.append(PassedOver(first=40, last=41, step=12, timeline=1))
    new, whole = commit(tier, 1, 2, (0, 1)), paths.train_journal.read_bytes()
    assert not newest_is_ahead(), "the line that waited is lost"
    paths.train_journal.write_bytes(whole + b'{"seq":2,"at"')
    assert not newest_is_ahead(), "a line is torn"
    journals.append(Journal(paths.train_journal, 2))
    journals[-1].append(PassedOver(first=50, last=51, step=14, timeline=1))
    assert not newest_is_ahead(), "it has grown"
    paths.train_journal.write_bytes(backup)
    assert newest_is_ahead(), "an older copy was put back"
    journals.append(Journal(paths.train_journal, 2))
    journals[-1].append(PassedOver(first=32, last=33, step=10, timeline=1))
    assert paths.train_journal.stat().st_size == len(whole)
    assert newest_is_ahead(), "and has gone on otherwise"
    commit(tier, 1, 2)
    assert not newest_is_ahead(), "another host's slot says nothing of a journal"
    commit(tier, 1, 2, (0, 1))
    paths.train_journal.unlink()
    assert not newest_is_ahead(), "without a journal it cannot be told"
    for journal in journals:
        journal.close()


def refuse(*_: object) -> None:
    raise OSError(28, "the disk is full")


def test_of_two_places_of_a_checkpoint_the_fast_tier_s_comes_first(paths: RunPaths, tier: SlotPaths) -> None:
    name = write_checkpoint(paths, 1, 10)
    commit(tier, 0, 1)
    commit(tier, 1, 0)
    assert [(place.manifest.seq, place.tier) for place in tiers.locate(paths)] == [
        (0, "fast"),
        (1, "fast"),
        (1, "durable"),
    ]
    assert tiers.locate(paths)[2].directory == paths.checkpoint(name)


def test_a_slot_whose_manifest_cannot_be_believed_is_told_by_its_name_and_spoils_no_other(
    paths: RunPaths, tier: SlotPaths
) -> None:
    commit(tier, 0, 1)
    sound = commit(tier, 1, 2)
    (tier.slot(0) / "manifest.json").write_text("{}")
    tier.slot(2).mkdir()
    look = tiers.look_into_slots(paths)
    assert [(place.name, place.slot, place.tier, place.directory) for place in look.usable] == [
        (sound.name, 1, "fast", tier.slot(1))
    ]
    assert look.unused.keys() == {"slot-00"}
    assert look.unused["slot-00"]


def test_what_is_committed_between_two_looks_is_found(
    paths: RunPaths, tier: SlotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.slot(0).mkdir()
    really = tiers.read_manifest
    looks = []

    def read(directory: Path, *, in_slot: bool) -> Manifest:
        looks.append(directory)
        try:
            return really(directory, in_slot=in_slot)
        finally:
            if len(looks) == 1:
                commit(tier, 0, 1)

    monkeypatch.setattr(tiers, "read_manifest", read)
    assert [place.manifest.seq for place in tiers.in_slots(paths)] == [1]


@pytest.mark.parametrize(
    "text",
    [
        '{"format": 2}', "[]", "7", "", '{"format": 99, "directory": "%s", "hosts": 1}',
        '{"directory": "%s", "hosts": 1}', '{"format": 2, "directory": 7, "hosts": 1}',
    ],
)  # fmt: skip
def test_a_pointer_that_cannot_be_believed_points_to_no_tier(paths: RunPaths, tier: SlotPaths, text: str) -> None:
    assert tiers.fast_tier_of(paths) == tier
    paths.fast_pointer.write_text(text.replace("%s", str(tier.root)))
    assert tiers.fast_tier_of(paths) is None


def test_without_the_identity_of_the_run_no_tier_is_believed_to_be_its_own(paths: RunPaths, tier: SlotPaths) -> None:
    paths.identity.unlink()
    assert tiers.fast_tier_of(paths) is None


def test_the_tier_of_another_run_directory_with_the_same_id_is_not_believed(
    paths: RunPaths, tier: SlotPaths, tmp_path: Path
) -> None:
    shutil.copytree(paths.root, tmp_path / "copy")
    tier.owner.write_text(json.dumps({"format": 2, "run": str(tmp_path / "copy")}))
    assert tiers.fast_tier_of(paths) is None
    shutil.rmtree(tmp_path / "copy")  # it has moved here
    assert tiers.fast_tier_of(paths) == tier


@pytest.mark.parametrize(
    ("text", "hosts"), [('{"hosts": 3}', 3), ("{}", 1), ("", 1), ("[1]", 1), ('{"hosts": null}', 1)]
)
def test_a_tier_is_on_one_host_unless_the_pointer_says_how_many(paths: RunPaths, text: str, hosts: int) -> None:
    assert tiers.host_count(paths) == 1
    paths.fast_pointer.write_text(text)
    assert tiers.host_count(paths) == hosts


def test_the_pointer_says_on_how_many_hosts_the_tier_is(paths: RunPaths, tier: SlotPaths) -> None:
    assert tiers.host_count(paths) == 1
    tiers.point_to_fast_tier(paths, tier, 5)
    assert tiers.host_count(paths) == 5
    paths.fast_pointer.unlink()
    assert not paths.fast_pointer.exists()


def test_a_slot_is_whole_where_all_shards_are_and_the_ring_always_is(paths: RunPaths, tier: SlotPaths) -> None:
    commit(tier, 0, 1)
    (place,) = tiers.in_slots(paths)
    assert tiers.is_whole(place)
    (tier.slot(0) / shard_name(1)).unlink()
    assert not tiers.is_whole(place)
    assert tiers.is_whole(Located(place.manifest, paths.ring / "nowhere", "durable"))


def test_what_has_left_its_slot_is_seen_to_have_left(paths: RunPaths, tier: SlotPaths) -> None:
    commit(tier, 0, 1)
    (place,) = tiers.in_slots(paths)
    assert not tiers.has_left(place)
    (tier.slot(0) / "manifest.json").write_text("{}")
    assert not tiers.has_left(place), "what is damaged is still there"
    slots.uncommit(tier, 0)
    assert tiers.has_left(place)
    commit(tier, 0, 2)
    assert tiers.has_left(place)


def test_what_has_left_the_ring_is_seen_to_have_left(paths: RunPaths) -> None:
    name = write_checkpoint(paths, 1, 10)
    (place,) = tiers.locate(paths)
    assert not tiers.has_left(place)
    with tiers.hold_slot(place):
        paths.checkpoint(name).rename(paths.ring / "elsewhere")
    assert tiers.has_left(place)


def test_a_reader_that_is_kept_waiting_lets_the_slot_go(paths: RunPaths, tier: SlotPaths) -> None:
    commit(tier, 0, 1)
    (place,) = tiers.in_slots(paths)
    with tiers.hold_slot(place) as let_go:
        assert not slots.uncommit(tier, 0)
        let_go()
        assert slots.uncommit(tier, 0)
        let_go()
    assert tiers.has_left(place)


def test_a_checkpoint_that_has_left_its_slot_cannot_be_held(paths: RunPaths, tier: SlotPaths) -> None:
    commit(tier, 0, 1)
    (place,) = tiers.in_slots(paths)
    with tiers.hold_slot(place):
        pass
    commit(tier, 0, 2)
    with (
        pytest.raises(CheckpointDamaged, match=r"holds c000002-s00000020 now, not c000001-s00000010"),
        tiers.hold_slot(place),
    ):
        pass


def test_what_a_process_with_too_many_open_files_cannot_hold_is_not_damaged(
    paths: RunPaths, tier: SlotPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tier, 0, 1)
    (place,) = tiers.in_slots(paths)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointUnreadable, match="Too many open files"), tiers.hold_slot(place):
        pass


# --- giving the memory back -------------------------------------------------------------------------------------------


def test_the_memory_is_given_back_only_when_nobody_goes_on_from_it(paths: RunPaths, tier: SlotPaths) -> None:
    older, newest = commit(tier, 0, 1), commit(tier, 1, 2)
    assert not tiers.release(paths, [], None)
    assert not tiers.release(paths, [older.name], None)
    assert not tiers.release(paths, [], "c000003-s00000030"), "the final state is not in the run directory"
    assert tier.root.exists()
    assert tiers.release(paths, [newest.name], None)
    assert not tier.root.exists()
    assert not tiers.release(paths, [newest.name], None), "there is none any more"


def test_the_memory_of_a_complete_run_is_given_back(paths: RunPaths, tier: SlotPaths) -> None:
    commit(tier, 0, 1)
    assert tiers.release(paths, [], write_checkpoint(paths, 3, 30))
    assert not tier.root.exists()


def test_the_memory_of_a_tier_that_holds_nothing_is_given_back(paths: RunPaths, tier: SlotPaths) -> None:
    assert tiers.release(paths, [], None)
    assert not tier.root.exists()


@pytest.mark.parametrize("refused", ["a manifest", "the list of slots"])
def test_the_memory_is_not_given_back_while_it_cannot_be_told_what_it_holds(
    paths: RunPaths, tier: SlotPaths, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """As by a process with too many open files, or by a memory that fails: the newest may be what it cannot see."""
    older, newest = commit(tier, 0, 1), commit(tier, 1, 2)
    opens, lists = files.open_file, os.scandir

    def refuse(path: Path) -> None:
        if path in (tier.root, tier.slot(1) / "manifest.json"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as limited:
        if refused == "a manifest":
            limited.setattr(files, "open_file", lambda path, flags: refuse(path) or opens(path, flags))
        else:
            limited.setattr(os, "scandir", lambda path: refuse(path) or lists(path))
        for durable_ones in ([], [older.name]):
            assert not tiers.release(paths, durable_ones, None)
        assert [error.message for error in tiers.look_into_slots(paths).unused.values()]
    assert [place.name for place in tiers.in_slots(paths)] == [older.name, newest.name]
    assert tiers.release(paths, [newest.name], None)


def test_what_a_start_may_have_to_go_on_from_stays_in_memory_though_the_journal_lacks_lines(
    paths: RunPaths, tier: SlotPaths
) -> None:
    """An older copy of the journal was put back. Where nothing else is there, the run goes on from it; and the right
    copy may come yet."""
    journal = Journal(paths.train_journal, 1)
    journal.append(PassedOver(first=4, last=9, step=2, timeline=1))
    backup = paths.train_journal.read_bytes()
    journal.append(PassedOver(first=30, last=31, step=10, timeline=1))
    ahead = commit(tier, 0, 1, (0, 1))
    paths.train_journal.write_bytes(backup)
    assert not tiers.release(paths, [], None)
    assert [place.name for place in tiers.look_into_slots(paths).ahead] == [ahead.name]
    assert tiers.release(paths, [], write_checkpoint(paths, 3, 30)), "complete: nobody goes on"
    journal.close()
