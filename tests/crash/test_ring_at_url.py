"""A ring at a URL whose file system fails at any operation: never a false commit, and what was committed is found."""

import errno
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty import MANNERS, PASSING, Bucket, Died, FaultyFileSystem, Manner, patience
from unreadable import forbidden
from waiting import wait_for

from checkpoints import LAYOUTS, RANKS, damage, lay_out_as, whole, write_checkpoint
from recorded_run import RecordedRun
from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import (
    CheckpointDamaged,
    CheckpointUnusable,
    OutputNotWritten,
    RingUnavailable,
    RollbackError,
    RunDoesNotFit,
    unreadable,
)
from rollback.inspect.ring.at_url import readable
from rollback.inspect.ring.checkpoints import read_listing
from rollback.inspect.ring.export import export
from rollback.inspect.ring.verify import verify
from rollback.ring.url import fetch as fetching
from rollback.ring.url import ring as at_url_ring
from rollback.ring.url import store as storing
from rollback.ring.url.fetch import fetch, unfetch
from rollback.ring.url.index import read_indexes
from rollback.ring.url.ring import RingAtUrl
from rollback.ring.url.store import Store
from rollback.rundir import paths as names
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.metrics.column_file import ColumnWriter, read_blocks
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import MANIFEST, RunPaths, pack_name, shard_name
from rollback.supervisor.nodes import waiting
from rollback.supervisor.nodes.waiting import FetchAhead, forget_fetched

URL = "faulty://bucket/runs/one"
NAMES = ["c000000-s00000000", "c000001-s00000010", "c000002-s00000020"]


@pytest.fixture(autouse=True)
def hurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "PATIENCE", patience(request))
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.001)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """A run directory with three checkpoints, all good, two with the same frozen weights, and a pin."""
    lay_out_as(getattr(request, "param", "files"), monkeypatch)
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    for seq, name in enumerate(NAMES):
        write_checkpoint(run.paths, seq, 10 * seq, still="base" if seq else None)
        run.commit(10.0 * seq, name, 10 * seq)
    run.paths.pins.mkdir()
    run.paths.pin(NAMES[0]).write_text('{"at": "2030-01-01"}')
    return run


in_both_layouts = pytest.mark.parametrize("run", LAYOUTS, indirect=True)
BY_DEFAULT = {
    ("files", "once"),
    ("packs", "done but reported as failed"),
    ("files", "dies and tears"),
    ("packs", "dies and tears"),
}
"""Of a process that goes on, one layout each: to try again is the same for a file and for a pack."""


def file_of(rank: int) -> str:
    return pack_name(range(RANKS)) if names.has_packs(RANKS) else shard_name(rank)


def opened(paths: RunPaths, say: Callable[[str], None] = print) -> RingAtUrl:
    at_url = RingAtUrl(paths, Store(URL), say)
    at_url.open()
    return at_url


def put(at_url: RingAtUrl, paths: RunPaths, name: str) -> None:
    at_url.put(read_manifest(paths.checkpoint(name)), paths.checkpoint(name))


def fetched(root: Path) -> RunPaths:
    """What an empty machine gets."""
    paths = RunPaths(root)
    paths.root.mkdir()
    fetch(Store(URL), paths, lambda text: None)
    return paths


def journal(paths: RunPaths) -> list[str]:
    return [repr(record) for record in read_journal(paths.train_journal).records]


def test_where_nothing_gets_through_to_the_ring_nobody_holds_what_is_copied(
    run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may want the slot: an outage must not keep it for as long as it is tried again."""
    at_url, told = opened(run.paths), list[str]()
    for name, seconds in ((NAMES[0], 0.0), (NAMES[1], 0.1)):  # of each operation there
        bucket.delay = seconds
        monkeypatch.setattr(storing, "STUCK", 0.05 if seconds else 60.0)
        with at_url.if_stuck(lambda name=name: told.append(name)):  # type: ignore[misc]
            put(at_url, run.paths, name)
    assert told == [NAMES[1]]
    assert at_url.held() == tuple(NAMES[:2])


@in_both_layouts
def test_an_empty_machine_gets_the_record_and_the_newest_checkpoint(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    new = fetched(tmp_path / "new")
    assert ring.names(new) == NAMES[-2:], "and the good one before it"
    assert all(whole(new, name) for name in NAMES[-2:])
    for path in (run.paths.identity, run.paths.train_journal, run.paths.pin(NAMES[0])):
        assert (new.root / path.relative_to(run.paths.root)).read_bytes() == path.read_bytes()
    assert bucket.listed == 0, "a listing may be out of date: everything is found by key"


def test_a_spare_has_the_newest_checkpoint_and_no_other(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_EVERY", 0.01)
    at_url, spare, said = opened(run.paths), RunPaths(tmp_path / "spare"), []
    spare.root.mkdir()
    ahead = FetchAhead(spare, URL, said.append)
    try:
        for name in NAMES:
            put(at_url, run.paths, name)
            wait_for(lambda name=name: ring.names(spare) == [name])
            assert whole(spare, name)
        got, asked = [key for key in bucket.operations if ".safetensors" in key], len(bucket.operations)
        wait_for(lambda: len(bucket.operations) > asked + 4)
        assert [key for key in bucket.operations if ".safetensors" in key] == got, "each checkpoint comes once"
        shard = spare.checkpoint(NAMES[-1]) / "rank-00000.safetensors"
        shard.unlink()
        wait_for(shard.exists)
    finally:
        ahead.close()
    assert said == []
    forget_fetched(spare)
    assert ring.names(spare) == []


def change(paths: RunPaths, told: list[str]) -> None:
    """Two checkpoints come and one goes; `told` is what was reported as done."""
    at_url = opened(paths)
    for name in NAMES[1:]:
        if name not in at_url.held():
            put(at_url, paths, name)
        told.append(name)
    if NAMES[0] in at_url.held():
        at_url.evict(NAMES[0])
    at_url.keep_record()


def settle(act: Callable[[], object]) -> bool:
    """Whether it went through."""
    try:
        act()
    except (RollbackError, Died):
        return False
    return True


@pytest.mark.parametrize(
    ("run", "manner"),
    [
        pytest.param(*case, marks=[] if case in BY_DEFAULT else pytest.mark.soak, id=f"{case[1]}-{case[0]}")
        for case in itertools.product(LAYOUTS, MANNERS)
    ],
    indirect=["run"],
)
def test_whatever_operation_fails_there_is_no_false_commit_and_the_next_try_completes_it(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, manner: Manner
) -> None:
    put(opened(run.paths), run.paths, NAMES[0])
    before = dict(bucket.objects)
    bucket.operations = []
    change(run.paths, [])
    total = len(bucket.operations)
    assert total > 20
    for number in range(1, total + 1):
        bucket.objects, told = dict(before), []
        bucket.fail(number, manner)
        done = settle(lambda told=told: change(run.paths, told))  # type: ignore[misc]
        assert done == (manner in PASSING), bucket.operations[number - 1]
        bucket.heal()
        judge(tmp_path / f"{number}-after", told)
        if done:
            continue
        change(run.paths, [])  # the same process again, or the next one
        judge(tmp_path / f"{number}-mended", NAMES[1:])
        assert not [key for key in bucket.objects if NAMES[0] in key and "/ring/" in key], "evicted for good"


def judge(root: Path, told: list[str]) -> None:
    """An empty machine finds a whole checkpoint, no older than what was reported, and a record that goes with it."""
    new = fetched(root)
    newest = ring.names(new)[-1]
    assert whole(new, newest)
    assert newest >= max(told, default=NAMES[0])
    assert newest in "".join(journal(new)), "the record tells of it"
    shutil.rmtree(root)


@in_both_layouts
def test_a_shard_that_is_not_what_its_manifest_says_is_not_committed(run: RecordedRun, bucket: Bucket) -> None:
    at_url = opened(run.paths)
    shard = run.paths.checkpoint(NAMES[1]) / file_of(1)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointDamaged, match="is not what its manifest says"):
        put(at_url, run.paths, NAMES[1])
    assert at_url.held() == ()
    assert not [key for key in bucket.objects if "manifest" in key or file_of(1) in key]


@in_both_layouts
@pytest.mark.parametrize("by", ["this process", "the next one"])
def test_what_was_put_of_a_checkpoint_that_is_damaged_is_deleted_behind_a_newer_one(
    run: RecordedRun, bucket: Bucket, by: str
) -> None:
    at_url = opened(run.paths)
    bucket.hide_new = 1
    with pytest.raises(CheckpointDamaged, match="does not have ring/"):
        put(at_url, run.paths, NAMES[1])
    bucket.heal()
    at_url.keep_record()
    assert [key for key in bucket.objects if f"ring/{NAMES[1]}" in key], "others may still write there"
    at_url = at_url if by == "this process" else opened(run.paths)
    put(at_url, run.paths, NAMES[2])
    at_url.keep_record()
    assert not [key for key in bucket.objects if f"ring/{NAMES[1]}" in key]


def test_leftovers_that_cannot_be_deleted_keep_no_checkpoint_and_no_record_from_being_put(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    put(opened(run.paths), run.paths, NAMES[1])
    del bucket.objects[f"runs/one/ring/{NAMES[1]}/manifest.json"]
    monkeypatch.setattr(FaultyFileSystem, "rm_file", forbidden)
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[2])
    assert at_url.held() == (NAMES[2],)
    run.commit(40.0, "c000003-s00000030", 30)
    with pytest.raises(RingUnavailable, match="deleting"):
        at_url.keep_record()
    assert journal(fetched(tmp_path / "new")) == journal(run.paths)


def test_pieces_of_the_record_that_cannot_be_deleted_keep_no_checkpoint_from_being_put(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    """They are deleted once that is allowed again."""

    def forbidden(*_: object) -> None:
        raise PermissionError

    at_url = opened(run.paths)
    with pytest.MonkeyPatch.context() as bucket_s_rules:
        bucket_s_rules.setattr(FaultyFileSystem, "rm_file", forbidden)
        for step, name in enumerate(NAMES):
            put(at_url, run.paths, name)
            run.commit(40.0 + step, f"c{step + 3:06d}-s{step + 30:08d}", step + 30)
        assert at_url.held() == tuple(NAMES)
        with pytest.raises(RingUnavailable, match="deleting"):
            at_url.keep_record()
        assert journal(fetched(tmp_path / "new")) == journal(run.paths)
    at_url.keep_record()
    named = {f"runs/one/{key}" for index in read_indexes(Store(URL)) for key in index.keys}
    assert {key for key in bucket.objects if key.startswith("runs/one/record/")} == named


@in_both_layouts
def test_what_is_deleted_of_a_checkpoint_is_all_that_has_shards_of_it_however_they_were_shared_out(
    run: RecordedRun, bucket: Bucket
) -> None:
    at_url = opened(run.paths)
    for name in NAMES[:2]:
        put(at_url, run.paths, name)
    half, past, rest = (f"runs/one/ring/{name}" for name in (NAMES[1], NAMES[0], NAMES[2]))
    others = [pack_name([0]), pack_name([1]), pack_name(range(7)), shard_name(0), shard_name(7)]
    for folder in (half, past):  # of tries in which other hosts had the shards, or with more ranks
        bucket.objects = {f"{folder}/{file}": b"" for file in others} | bucket.objects
    bucket.objects |= {f"{past}/notes.txt": b"", f"{past}/older/{shard_name(0)}": b""}
    del bucket.objects[f"{half}/manifest.json"]
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[2])
    at_url.keep_record()
    at_url.evict(NAMES[0])
    left = {key for key in bucket.objects if key.startswith("runs/one/ring/") and not key.startswith(rest)}
    assert left == {f"{past}/notes.txt", f"{past}/older/{shard_name(0)}"}, "what is not ours"


@in_both_layouts
@pytest.mark.parametrize(
    "words", [PermissionError(), OSError("Forbidden: no storage.objects.list"), FileNotFoundError()]
)
def test_who_may_not_list_deletes_what_is_known(
    run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, words: OSError
) -> None:
    """Each library of a cloud says it in its own words."""

    def forbidden(*_: object, **__: object) -> None:
        raise words

    monkeypatch.setattr(FaultyFileSystem, "ls", forbidden)
    at_url = opened(run.paths)
    for name in NAMES[:2]:
        put(at_url, run.paths, name)
    at_url.evict(NAMES[0])
    assert not [key for key in bucket.objects if f"ring/{NAMES[0]}" in key]


def test_a_listing_that_an_outage_refused_is_asked_for_again_and_reported_once(
    run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    at_url, works, asked = opened(run.paths, said.append), FaultyFileSystem.ls, []
    for name in NAMES:
        put(at_url, run.paths, name)
        bucket.objects[f"runs/one/ring/{name}/{pack_name(range(7))}"] = b""  # of a try by other hosts

    def unreachable(*_: object, **__: object) -> None:
        asked.append(1)
        raise TimeoutError("nobody answers")

    monkeypatch.setattr(FaultyFileSystem, "ls", unreachable)
    at_url.evict(NAMES[0])
    tries = len(asked)
    at_url.evict(NAMES[1])
    assert tries > 1, "an outage is waited out"
    assert len(asked) == tries + 1, "but not by every checkpoint that leaves"
    assert len(said) == 1
    assert f"listing {URL}/ring/{NAMES[0]}: nobody answers" in said[0]
    monkeypatch.setattr(FaultyFileSystem, "ls", works)
    at_url.evict(NAMES[2])
    assert not [key for key in bucket.objects if f"ring/{NAMES[2]}" in key]
    assert len(said) == 1


@in_both_layouts
@pytest.mark.parametrize("lost", ["manifest", "shard"])
def test_a_dropped_object_costs_that_checkpoint_and_the_one_before_it_is_used(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, lost: str
) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    file = "manifest.json" if lost == "manifest" else file_of(0)
    del bucket.objects[f"runs/one/ring/{NAMES[2]}/{file}"]
    new = fetched(tmp_path / "new")
    assert ring.names(new) == NAMES[:2]
    assert whole(new, NAMES[1])


@in_both_layouts
def test_a_shard_that_is_acknowledged_and_dropped_is_noticed_before_the_commit(
    run: RecordedRun, bucket: Bucket
) -> None:
    at_url = opened(run.paths)
    bucket.drops = lambda key: key.endswith(file_of(1))
    with pytest.raises(CheckpointDamaged, match="does not have ring/"):
        put(at_url, run.paths, NAMES[1])
    assert not [key for key in bucket.objects if "manifest" in key]


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("fault", ["dropped", "flipped", "cut"])
def test_a_lost_index_leaves_the_other_one(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, slot: int, fault: str
) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    key = f"runs/one/index-{slot}.json"
    data = bytearray(bucket.objects.pop(key))
    data[len(data) // 2] ^= 1
    if fault != "dropped":
        bucket.objects[key] = bytes(data) if fault == "flipped" else bytes(data[: len(data) // 2])
    new = fetched(tmp_path / "new")
    newest = ring.names(new)[-1]
    assert whole(new, newest)
    assert newest == (NAMES[2] if slot == 0 else NAMES[1])


def test_where_both_indexes_are_damaged_the_process_that_writes_there_puts_back_the_last_one(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    told: list[str] = []
    at_url = opened(run.paths, told.append)
    for name in NAMES[:2]:
        put(at_url, run.paths, name)
    for key in [key for key in bucket.objects if "/index-" in key or "/record/" in key]:
        bucket.objects[key] = bucket.objects[key][:-1]
    with pytest.raises(RingUnavailable, match="is damaged"):
        put(at_url, run.paths, NAMES[2])
    with pytest.raises(RingUnavailable, match="is damaged"):
        opened(run.paths)  # a process that has written nothing there does not know what was there
    at_url.open()
    assert "The last one that this process knows is put there again" in told[0]
    put(at_url, run.paths, NAMES[2])
    new = fetched(tmp_path / "new")
    assert list(at_url.held()) == NAMES
    assert ring.names(new)[-1] == NAMES[2]
    assert journal(new) == journal(run.paths)


def test_an_index_is_put_back_only_where_it_was_there_and_comes_back(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    other = RecordedRun(tmp_path / "other", monkeypatch)
    other.attach(0, 1, None, 0)
    abandons = opened(other.paths)
    abandons.keep_record()
    takes_over = opened(run.paths, told.append)  # it has written nothing yet, and the other's index is not its own
    (key,) = [key for key in bucket.objects if "/index-" in key]
    bucket.objects[key] = bucket.objects[key][:-1]
    before = {**bucket.objects}
    with pytest.raises(RingUnavailable, match="is damaged"):
        takes_over.open()
    assert bucket.objects == before

    bucket.objects.clear()
    at_url = opened(run.paths, told.append)
    put(at_url, run.paths, NAMES[0])
    find = bucket.find
    monkeypatch.setattr(bucket, "find", lambda key: b"log in first" if "index-" in key else find(key))
    with pytest.raises(RingUnavailable, match="is damaged"):
        at_url.open()
    assert told == []
    monkeypatch.setattr(bucket, "find", find)
    at_url.open()
    assert list(at_url.held()) == NAMES[:1]


def test_a_record_that_somebody_removes_is_put_there_again(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rule of the bucket does that removes old objects: while the process writes there, and before it begins."""
    run.judge(0, 40_000)  # more than one piece
    told: list[str] = []

    def remove() -> None:
        for key in [key for key in bucket.objects if "/record/" in key]:
            del bucket.objects[key]

    at_url = opened(run.paths, told.append)
    put(at_url, run.paths, NAMES[2])
    at_url.keep_record()
    remove()
    with pytest.raises(RingUnavailable):
        fetched(tmp_path / "without")
    at_url.keep_record()
    assert not told, "looked for once an hour"
    with monkeypatch.context() as sooner:
        sooner.setattr(at_url_ring, "_LOOK_EVERY", 0.0)
        at_url.keep_record()
    remove()
    at_url.keep_record()
    assert len(told) == 2, "it looks again at once where something was gone: who removes may still be at it"
    at_url.keep_record()
    remove()
    at_url.keep_record()
    assert len(told) == 2, "and once an hour where nothing was"
    opened(run.paths, told.append).keep_record()
    assert len(told) == 3
    assert all("had lost 5 objects of the run's record" in line for line in told)
    new = fetched(tmp_path / "new")
    for path in (run.paths.identity, run.paths.train_journal, run.paths.metrics, run.paths.pin(NAMES[0])):
        assert (new.root / path.relative_to(run.paths.root)).read_bytes() == path.read_bytes()


def test_a_part_of_the_record_that_is_gone_there_and_no_file_of_ours_here_is_told_in_words(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    """As of metrics that somebody has moved to another disk, with a link in their place."""
    judged(run.paths, range(20))
    put(opened(run.paths), run.paths, NAMES[1])
    run.paths.metrics.rename(tmp_path / "moved")
    run.paths.metrics.symlink_to(tmp_path / "moved")
    for key in [key for key in bucket.objects if "/record/metrics" in key]:
        del bucket.objects[key]
    with pytest.raises(RingUnavailable, match=r"metrics/train\.jsonl.*it is a symbolic link"):
        opened(run.paths).keep_record()


@pytest.mark.parametrize("left", [None, 0, 1])
def test_a_ring_that_somebody_empties_is_filled_anew(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, left: int | None
) -> None:
    """With all of the record, and at once: who loses a host before an hourly look has nothing to go on from. left: the
    index that was written behind that."""
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[2])
    for write in (lambda: put(at_url, run.paths, NAMES[1]), at_url.keep_record):
        at_url.keep_record()
        for key in [key for key in bucket.objects if not key.endswith(f"/index-{left}.json")]:
            del bucket.objects[key]
        with pytest.raises(RingUnavailable, match="gone or damaged"):
            write()
        at_url.open()  # as the drainer does behind any failure
        assert at_url.held() == ()
        put(at_url, run.paths, NAMES[2])
    new = fetched(tmp_path / "new")
    assert whole(new, NAMES[2])
    assert journal(new) == journal(run.paths)


def test_every_byte_of_a_record_is_vouched_for(run: RecordedRun, bucket: Bucket, tmp_path: Path) -> None:
    put(opened(run.paths), run.paths, NAMES[2])
    pieces = [key for key in bucket.objects if "/record/" in key]
    assert len(pieces) == 3
    for key in pieces:
        sound = bucket.objects[key]
        bucket.objects[key] = sound[:-1] + bytes([sound[-1] ^ 1])
        with pytest.raises(RingUnavailable, match="is not what its index says"):
            fetched(tmp_path / key.replace("/", "-"))
        bucket.objects[key] = sound


def test_an_empty_object_of_the_record_is_damage(run: RecordedRun, bucket: Bucket, tmp_path: Path) -> None:
    """As a full disk leaves of a file:// ring, or an upload that broke off."""
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[1])
    at_url.keep_record()
    for key in [key for key in bucket.objects if "/record/" in key]:
        whole, bucket.objects[key] = bucket.objects[key], b""
        with pytest.raises(RingUnavailable, match="is not what its index says"):
            fetched(tmp_path / key.replace("/", "-"))
        bucket.objects[key] = whole


@in_both_layouts
def test_what_is_damaged_in_the_run_directory_comes_from_the_url(run: RecordedRun, bucket: Bucket) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    shard = run.paths.checkpoint(NAMES[2]) / file_of(1)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    said: list[str] = []
    fetch(Store(URL), run.paths, said.append)
    assert ring.names(run.paths) == NAMES
    assert all(whole(run.paths, name) for name in NAMES)
    assert (run.paths.quarantine / NAMES[2]).is_dir()
    assert "cannot be used" in said[0]
    (run.paths.checkpoint(NAMES[2]) / MANIFEST).write_bytes(b"{}")  # nobody holds what no manifest vouches for
    fetch(Store(URL), run.paths, said.append)
    assert whole(run.paths, NAMES[2])
    shutil.rmtree(run.paths.ring)
    fetch(Store(URL), run.paths, said.append)
    assert ring.names(run.paths) == NAMES[1:]


@in_both_layouts
@pytest.mark.parametrize("there", [False, True], ids=["only here", "also there"])
def test_what_may_not_be_read_in_the_run_directory_is_not_taken_for_damaged(
    run: RecordedRun, bucket: Bucket, there: bool
) -> None:
    """The ranks refuse the start with it, where there is no other copy."""
    at_url = opened(run.paths)
    for name in NAMES if there else NAMES[:2]:
        put(at_url, run.paths, name)
    said: list[str] = []
    with forbidden(run.paths.checkpoint(NAMES[2]) / file_of(1)):
        fetch(Store(URL), run.paths, said.append)
    assert "Permission denied" in said[0]
    assert run.paths.quarantine.exists() == there, "it made room for the copy from there"
    assert all(whole(run.paths, name) for name in NAMES)


def test_a_disk_that_refuses_once_costs_no_fetch(
    run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_once(*given: Any) -> Any:
        monkeypatch.undo()
        raise unreadable("reading a shard", OSError(errno.EIO, os.strerror(errno.EIO)))

    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    monkeypatch.setattr(fetching, "read_verified", refuse_once)
    said: list[str] = []
    fetch(Store(URL), run.paths, said.append)
    assert said == []
    assert not run.paths.quarantine.exists()


def test_a_ring_of_another_run_is_refused_and_left_alone(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(opened(run.paths), run.paths, NAMES[0])
    other = RecordedRun(tmp_path / "other", monkeypatch)
    objects = dict(bucket.objects)
    for act in (lambda: fetch(Store(URL), other.paths, print), lambda: opened(other.paths)):
        with pytest.raises(RunDoesNotFit, match="belongs to run"):
            act()
    assert bucket.objects == objects


def test_a_ring_whose_run_was_lost_before_its_first_checkpoint_is_nobodys(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run.paths).keep_record()
    other = RecordedRun(tmp_path / "other", monkeypatch)
    other.attach(0, 1, None, 0)
    write_checkpoint(other.paths, 0, 0)
    other.commit(0.0, NAMES[0], 0)
    said: list[str] = []
    fetch(Store(URL), RunPaths(tmp_path / "empty"), said.append)
    assert "has no checkpoint" in said[0]
    assert not (tmp_path / "empty").exists()
    put(opened(other.paths), other.paths, NAMES[0])
    new = fetched(tmp_path / "new")
    assert journal(new) == journal(other.paths)
    with pytest.raises(RunDoesNotFit, match="belongs to run"):
        opened(run.paths)


def test_what_was_fetched_for_another_job_leaves_nothing_behind_though_it_is_pinned(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    run.paths.pin(NAMES[-1]).write_text('{"at": "2030-01-01"}')
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    empty = RunPaths(tmp_path / "empty")
    empty.root.mkdir()
    brought = fetch(Store(URL), empty, lambda text: None)
    assert NAMES[-1] in ring.names(empty)
    unfetch(empty, brought)
    assert list(empty.root.iterdir()) == []


def test_a_run_directory_that_is_ahead_stays_and_one_that_is_behind_is_completed(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    put(opened(run.paths), run.paths, NAMES[1])
    old = fetched(tmp_path / "old")
    run.commit(40.0, "c000003-s00000030", 30)
    write_checkpoint(run.paths, 3, 30)
    before = journal(run.paths)
    fetch(Store(URL), run.paths, lambda text: None)
    assert journal(run.paths) == before
    put(opened(run.paths), run.paths, "c000003-s00000030")
    said: list[str] = []
    fetch(Store(URL), old, said.append)
    assert journal(old) == before
    assert ring.names(old) == [NAMES[1], "c000003-s00000030"]
    assert "is newer than the one in" in said[0]


class HalfWay(Store):
    """It can be reached until an object with this in its key is asked for."""

    def __init__(self, url: str, last: str) -> None:
        super().__init__(url)
        self._last = last

    def get(self, key: str, limit: int) -> bytes | None:
        if self._last in key:
            raise RingUnavailable(f"reading {key}")
        return super().get(key, limit)


def judged(paths: RunPaths, steps: range) -> None:
    """Lines of steps are added to the metrics."""
    paths.metrics.parent.mkdir(exist_ok=True)
    with paths.metrics.open("a") as metrics:
        metrics.writelines(
            metric_line(
                step=step, batch=step, loss=2.0, grad_norm=None, verdict="healthy", attempt=1, timeline=0
            ) + "\n"
            for step in steps
        )  # fmt: skip


def test_a_run_directory_that_is_behind_gets_the_metrics_of_the_steps_since(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    judged(run.paths, range(20))
    put(opened(run.paths), run.paths, NAMES[1])
    old = fetched(tmp_path / "old")
    judged(run.paths, range(20, 30))
    run.commit(40.0, "c000003-s00000030", 30)
    write_checkpoint(run.paths, 3, 30)
    put(opened(run.paths), run.paths, "c000003-s00000030")
    judged(old, range(20, 2000))  # what was lost with the host before anything of it was at the URL
    writer = ColumnWriter(old.metrics)
    writer.catch_up(1)
    writer.close()
    assert [*read_blocks(old.metrics)]
    with pytest.raises(RingUnavailable):
        fetch(HalfWay(URL, "/metrics/"), old, lambda text: None)
    fetch(Store(URL), old, lambda text: None)
    assert not [*read_blocks(old.metrics)]
    opened(old).keep_record()
    for paths in (old, fetched(tmp_path / "third")):
        assert paths.metrics.read_text() == run.paths.metrics.read_text()


def test_a_run_directory_that_has_lost_its_identity_and_is_ahead_stays_too(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    judged(run.paths, range(20))
    put(opened(run.paths), run.paths, NAMES[1])
    identity = run.paths.identity.read_text()
    elsewhere = fetched(tmp_path / "elsewhere")
    other = RecordedRun.__new__(RecordedRun)
    other.__dict__.update(run.__dict__, paths=elsewhere)
    other.commit(50.0, "c000003-s00000040", 40)
    judged(run.paths, range(20, 30))
    run.commit(40.0, "c000003-s00000030", 30)
    for each in (run.paths, elsewhere):
        each.identity.unlink()
    before, metrics = journal(run.paths), run.paths.metrics.read_text()
    fetch(Store(URL), run.paths, lambda text: None)
    assert (journal(run.paths), run.paths.metrics.read_text()) == (before, metrics)
    assert run.paths.identity.read_text() == identity
    put(opened(run.paths), run.paths, NAMES[2])
    lines = journal(elsewhere)
    with pytest.raises(RunDoesNotFit, match="gone on differently"):
        fetch(Store(URL), elsewhere, lambda text: None)
    assert (journal(elsewhere), elsewhere.identity.exists()) == (lines, False)


def test_two_that_went_on_differently_are_both_left_alone(run: RecordedRun, bucket: Bucket, tmp_path: Path) -> None:
    put(opened(run.paths), run.paths, NAMES[1])
    elsewhere = fetched(tmp_path / "elsewhere")
    other = RecordedRun.__new__(RecordedRun)
    other.__dict__.update(run.__dict__, paths=elsewhere)
    other.commit(50.0, "c000003-s00000040", 40)
    run.commit(40.0, "c000003-s00000030", 30)
    put(opened(run.paths), run.paths, NAMES[2])
    objects, lines = dict(bucket.objects), journal(elsewhere)
    with pytest.raises(RunDoesNotFit, match="gone on differently"):
        fetch(Store(URL), elsewhere, lambda text: None)
    with pytest.raises(RunDoesNotFit, match="another process goes on"):
        opened(elsewhere)
    assert (bucket.objects, journal(elsewhere)) == (objects, lines)


def test_of_two_new_runs_at_one_url_the_one_that_comes_later_reads_that_it_is_another_run_s(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = opened(run.paths)
    other = RecordedRun(tmp_path / "other", monkeypatch)
    other.attach(0, 1, None, 0)
    write_checkpoint(other.paths, 0, 0)
    put(opened(other.paths), other.paths, NAMES[0])
    objects = dict(bucket.objects)
    with pytest.raises(RunDoesNotFit, match="belongs to run"):
        late.keep_record()
    assert bucket.objects == objects


def test_who_is_overtaken_stops_writing(run: RecordedRun, bucket: Bucket, tmp_path: Path) -> None:
    first = opened(run.paths)
    put(first, run.paths, NAMES[0])
    second = fetched(tmp_path / "second")
    opened(second).keep_record()
    objects = dict(bucket.objects)
    with pytest.raises(RunDoesNotFit, match="another process goes on"):
        first.keep_record()
    assert bucket.objects == objects


def test_a_long_record_goes_up_in_pieces_of_which_only_the_last_is_sent_again(
    run: RecordedRun, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.judge(0, 40_000)  # about 5 MB
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[1])
    first = {key for key in bucket.objects if "metrics" in key}
    run.judge(40_001, 40_010)
    with open(run.paths.metrics, "a") as file:
        file.write('{"torn":')
    at_url.keep_record()
    second = {key for key in bucket.objects if "metrics" in key}
    assert len(first) == 2
    assert len(first & second) == 2, "what the index before the last names is kept"
    at_url.keep_record()
    third = {key for key in bucket.objects if "metrics" in key}
    assert len(third) == 2
    assert len(first & third) == 1
    new = fetched(tmp_path / "new")
    assert new.metrics.read_bytes() == run.paths.metrics.read_bytes().removesuffix(b'{"torn":')


def test_a_slow_bucket_and_one_that_shows_new_objects_late_hold_up_nothing_but_the_copy(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    bucket.delay = 0.002
    put(opened(run.paths), run.paths, NAMES[0])
    bucket.delay, bucket.hide_new = 0.0, 1
    at_url = opened(run.paths)
    with pytest.raises(CheckpointDamaged, match="does not have ring/"):  # not taken for there on a promise
        put(at_url, run.paths, NAMES[1])
    bucket.heal()
    new = fetched(tmp_path / "new")
    assert ring.names(new) == NAMES[:1]


@pytest.mark.usefixtures("bucket")
def test_a_url_that_cannot_be_copied_aside_is_told_of_in_words(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(directory: Path, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(opened(run.paths), run.paths, NAMES[1])
    with monkeypatch.context() as without:
        without.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(OutputNotWritten, match="into a temporary directory: No such file"), readable(URL):
            pass
    with readable(URL) as place:
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda directory: SimpleNamespace(free=1))
            with pytest.raises(RingUnavailable, match="its disk has 1 bytes left") as full_disk:
                verify(place)
        assert "TMPDIR" in (full_disk.value.hint or ""), "the command has no --run"
        monkeypatch.setattr(storing, "require_room", refused)
        with pytest.raises(OutputNotWritten, match=f"copying {NAMES[1]} of {URL} into .*: No space left") as told:
            verify(place)
        assert told.value.hint == "make room there, or set TMPDIR to a directory that can be written"


@in_both_layouts
@pytest.mark.usefixtures("bucket")
def test_what_a_job_gives_up_while_a_url_is_read_is_no_damage(run: RecordedRun, tmp_path: Path) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    with readable(URL) as place:
        at_url.evict(NAMES[1])
        found = verify(place)
        with pytest.raises(CheckpointUnusable, match=f"{NAMES[1]} has left {URL} meanwhile; nothing was written"):
            export(place, NAMES[1], tmp_path / "weights.safetensors")
    assert [entry.checkpoint for entry in found.checkpoints] == [NAMES[0], NAMES[2]]
    assert f"{NAMES[1]} left the ring while it was looked at" in found.notices


@pytest.mark.usefixtures("bucket")
def test_what_leaves_with_its_frozen_weights_while_a_url_is_read_is_no_damage(run: RecordedRun) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    needing = [name for name in NAMES if read_manifest(run.paths.checkpoint(name)).frozen is not None]
    with readable(URL) as place:
        for name in needing:
            at_url.evict(name)
        found = verify(place)
    assert [entry.checkpoint for entry in found.checkpoints] == [name for name in NAMES if name not in needing]
    assert [f"{name} left the ring while it was looked at" in found.notices for name in needing] == [True, True]


def test_who_reads_a_url_that_does_not_answer_is_told_what_the_command_waits_for(
    run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(opened(run.paths), run.paths, NAMES[1])
    find, told = bucket.find, list[str]()

    def answer_once_it_is_told(key: str) -> bytes:
        wait_for(lambda: told.append(capsys.readouterr().err) or "has got through" in "".join(told))
        return find(key)

    with readable(URL) as place, place.shards(NAMES[1]):
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(storing, "STUCK", 0.05)
    monkeypatch.setattr(bucket, "find", answer_once_it_is_told)
    with readable(URL) as place:
        assert f"rollback: nothing has got through to {URL} for" in "".join(told)
        told.clear()
        with place.shards(NAMES[1]):
            pass
    assert f"rollback: nothing has got through to {URL} for" in "".join(told)


def test_what_a_url_says_of_itself_is_not_believed(run: RecordedRun, bucket: Bucket, tmp_path: Path) -> None:
    import json

    from rollback.ring.url import index as indexes

    put(opened(run.paths), run.paths, NAMES[1])
    sound = dict(bucket.objects)
    body = json.loads(sound["runs/one/index-1.json"])
    shard = f"runs/one/ring/{NAMES[1]}/manifest.json"
    manifest = json.loads(sound[shard])

    def signed(changed: dict[str, Any]) -> bytes:
        rest = {key: value for key, value in changed.items() if key != "check"}
        return json.dumps({**rest, "check": indexes.check_of(rest)}).encode()

    def index_with(**changes: Any) -> None:
        bucket.objects = {**sound, "runs/one/index-1.json": signed({**body, **changes})}
        bucket.objects.pop("runs/one/index-0.json", None)

    piece = {"size": 1, "xxh3_128": "0" * 32}
    for path in ("../../evil", "/etc/passwd", "journal/../../evil", "ring/x", "lock", "pins/../run.json"):
        index_with(record=[{"path": path, "pieces": [piece]}])
        with pytest.raises(RingUnavailable, match="is no file of a record"):
            fetched(tmp_path / path.replace("/", "-").replace(".", "-"))
    index_with(checkpoints=["../c000001-s00000010"])
    with pytest.raises(RingUnavailable, match="is no name of a checkpoint"):
        fetched(tmp_path / "name")
    index_with(record=[{"path": "run.json", "pieces": [{**piece, "size": 1 << 40}]}])
    with pytest.raises(RingUnavailable, match="damaged"):
        fetched(tmp_path / "size")
    bucket.objects = {**sound, "runs/one/index-1.json": b"[" * (17 << 20)}
    bucket.objects.pop("runs/one/index-0.json", None)
    with pytest.raises(RingUnavailable, match="believed"):
        fetched(tmp_path / "large")

    index_with(record=[{**kept, "pieces": []} for kept in body["record"]])
    with pytest.raises(RingUnavailable, match=r"run\.json is damaged"):
        fetched(tmp_path / "nothing")
    assert list((tmp_path / "nothing").rglob("*.json*")) == []
    with readable(URL) as place:
        assert read_listing(place.root).notices

    for changes in (
        {"shards": [{**manifest["shards"][0], "file": "../../evil"}, manifest["shards"][1]]},
        {"shards": [{**manifest["shards"][0], "size": 1 << 50}, manifest["shards"][1]]},
        {"world_size": 10**9},
    ):
        bucket.objects = {**sound, shard: signed({**manifest, **changes})}
        new = fetched(tmp_path / f"manifest-{len(list(tmp_path.iterdir()))}")
        assert ring.names(new) == []
    assert not list(tmp_path.parent.rglob("evil"))


@pytest.mark.parametrize("error", [TimeoutError("slow"), ConnectionResetError("reset"), OSError(16, "SlowDown")])
def test_what_may_pass_is_tried_again(
    run: RecordedRun, bucket: Bucket, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "PATIENCE", 60.0)
    bucket.error = lambda: error
    bucket.fail(3, "once")
    put(opened(run.paths), run.paths, NAMES[0])


def test_what_does_not_pass_is_said_at_once(run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "PATIENCE", 3600.0)
    bucket.error = lambda: PermissionError("Access Denied")
    bucket.fail(1, "for ever")
    with pytest.raises(RingUnavailable, match="Access Denied"):
        opened(run.paths)
    with pytest.raises(RingUnavailable, match="does not exist"):
        Store("faulty://nowhere/run").probe()


def test_a_file_system_that_cannot_write_is_said_in_words() -> None:
    with pytest.raises(RingUnavailable, match=r"writing http://127\.0\.0\.1:9/x/.*: its file system cannot do that"):
        Store("http://127.0.0.1:9/x").probe()


def test_given_up_means_no_further_request(run: RecordedRun, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "PATIENCE", 3600.0)
    at_url = opened(run.paths)
    bucket.fail(1, "for ever")
    bucket.error = lambda: at_url.give_up() or OSError(5, "unreachable")  # type: ignore[func-returns-value]
    with pytest.raises(RingUnavailable):
        put(at_url, run.paths, NAMES[0])
    assert len(bucket.operations) == 1


def frozen_there(bucket: Bucket) -> list[str]:
    return sorted(key.rpartition("/")[2] for key in bucket.objects if "/frozen/" in key)


def test_frozen_weights_are_uploaded_once_and_leave_with_the_last_checkpoint_that_needs_them(
    run: RecordedRun, bucket: Bucket
) -> None:
    others = [write_checkpoint(run.paths, seq, 10 * seq, still="another base") for seq in (3, 4)]
    first, second = (read_manifest(run.paths.checkpoint(name)).frozen for name in (NAMES[1], others[0]))
    assert first is not None
    assert second is not None
    at_url = opened(run.paths)
    put(at_url, run.paths, NAMES[1])
    assert frozen_there(bucket) == [first.file]
    (run.paths.frozen / first.file).rename(aside := run.paths.root / "aside")  # a second upload would need it
    put(at_url, run.paths, NAMES[2])
    aside.rename(run.paths.frozen / first.file)
    put(at_url, run.paths, others[0])
    assert frozen_there(bucket) == sorted([first.file, second.file])
    at_url.evict(NAMES[1])
    assert len(frozen_there(bucket)) == 2, "another one needs them"
    at_url = opened(run.paths)  # another process
    at_url.evict(NAMES[2])
    assert frozen_there(bucket) == [second.file]
    assert at_url.held() == (others[0],)


def test_frozen_weights_that_are_damaged_here_are_fetched_again_and_damaged_there_the_checkpoint_comes_alone(
    run: RecordedRun, bucket: Bucket, tmp_path: Path
) -> None:
    at_url = opened(run.paths)
    for name in NAMES:
        put(at_url, run.paths, name)
    (file,) = run.paths.frozen.iterdir()
    sound = file.read_bytes()
    damage(file)
    fetch(Store(URL), run.paths, lambda text: None)
    assert file.read_bytes() == sound
    (key,) = (key for key in bucket.objects if "/frozen/" in key)
    bucket.objects[key] = sound[:-1] + b"?"
    said: list[str] = []
    (tmp_path / "new").mkdir()
    fetch(Store(URL), new := RunPaths(tmp_path / "new"), said.append)
    assert ring.names(new) == NAMES[-2:]
    assert any("frozen weights at the ring cannot be used" in text and file.name in text for text in said)
    assert list(new.frozen.iterdir()) == []
