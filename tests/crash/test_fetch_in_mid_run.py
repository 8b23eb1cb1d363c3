"""Fetching one checkpoint from a URL beside the training, with a file system that fails at any operation."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from faulty import Bucket, Died, Manner, patience

from checkpoints import whole, write_checkpoint
from recorded_run import RecordedRun
from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import read_manifest
from rollback.errors import CheckpointDamaged, CheckpointOutOfReach
from rollback.facts.training import Drained, Fetched, Quarantined
from rollback.ring.url import store as storing
from rollback.ring.url.ring import RingAtUrl
from rollback.ring.url.store import Store
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths, shard_name
from rollback.train.catalogue import remote
from rollback.train.catalogue.remote import CheckpointDownload, RemoteRing
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder

URL = "faulty://bucket/runs/one"
NAMES = ["c000000-s00000000", "c000001-s00000010", "c000002-s00000020"]
ORDINARY: tuple[Manner, ...] = ("once", "for ever", "dies")


@pytest.fixture(autouse=True)
def hurried(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.001)
    monkeypatch.setattr(remote, "_PATIENCE", patience(request))
    monkeypatch.setattr(remote, "MEET_EVERY", 0.01)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> RunPaths:
    """Of a run with three checkpoints, all good, at the URL only; the record says so."""
    run = RecordedRun(tmp_path / "run", monkeypatch)
    run.attach(0, 1, None, 0)
    at_url = RingAtUrl(run.paths, Store(URL), print)
    at_url.open()
    for seq, name in enumerate(NAMES):
        write_checkpoint(run.paths, seq, 10 * seq)
        run.commit(10.0 * seq, name, 10 * seq)
        at_url.put(read_manifest(run.paths.checkpoint(name)), run.paths.checkpoint(name))
        run.tell(10.0 * seq + 1, Drained(checkpoint=name, step=10 * seq, place=URL, bytes=1, seconds=0.0))
        ring.evict(run.paths, name)
    return run.paths


def reaching(paths: RunPaths) -> tuple[RemoteRing, list[str], Recorder]:
    done: list[str] = []
    record = Recorder(paths, 1, is_rank_0=True)
    return RemoteRing(paths, Ranks(), record, f"{URL}/", done.append), done, record


def fetched(paths: RunPaths) -> list[Fetched]:
    return [line.fact for line in read_journal(paths.train_journal).records if isinstance(line.fact, Fetched)]


def offered(there: RemoteRing) -> list[str]:
    return [point.name for point in there.offered()]


def test_what_the_record_says_is_there_is_offered_and_comes_whole(paths: RunPaths, bucket: Bucket) -> None:
    there, done, _ = reaching(paths)
    operations = len(bucket.operations)
    assert offered(there) == NAMES
    assert len(bucket.operations) == operations, "nobody asks a network to make a plan"
    found = there.fetch(NAMES[1])
    assert found == read_manifest(paths.checkpoint(NAMES[1]))
    assert whole(paths, NAMES[1])
    assert done == ["fetching", "rewinding"]
    (fact,) = fetched(paths)
    assert (fact.checkpoint, fact.step, fact.bytes) == (NAMES[1], 10, found.bytes)


@pytest.mark.parametrize("manner", ORDINARY)
def test_whatever_operation_fails_the_checkpoint_is_here_whole_or_not_at_all(
    paths: RunPaths, bucket: Bucket, manner: Manner
) -> None:
    there, _, _ = reaching(paths)
    bucket.fail(10**6, "once")
    there.fetch(NAMES[1])
    ring.evict(paths, NAMES[1])
    numbers = range(1, len(bucket.operations) + 1)
    assert len(numbers) >= 3
    for number in numbers:
        there.try_again()
        bucket.fail(number, manner)
        failing: Any = contextlib.nullcontext() if manner == "once" else pytest.raises((Died, CheckpointOutOfReach))
        with failing:
            there.fetch(NAMES[1])
        assert ring.names(paths) == ([NAMES[1]] if manner == "once" else [])
        assert not [line for line in read_journal(paths.train_journal).records if isinstance(line.fact, Quarantined)]
        if manner == "for ever":
            assert offered(there) == [], "the next one would have to be waited for just as long"
        bucket.heal()
        there.try_again()
        assert offered(there) == NAMES, "the next plan tries again"
        if manner != "once":
            there.fetch(NAMES[1])
        assert whole(paths, NAMES[1])
        ring.evict(paths, NAMES[1])


def test_a_checkpoint_that_is_not_there_any_more_costs_that_choice_only(paths: RunPaths, bucket: Bucket) -> None:
    there, _, _ = reaching(paths)
    for key in [key for key in bucket.objects if NAMES[2] in key]:
        del bucket.objects[key]
    with pytest.raises(CheckpointDamaged, match="any more") as refused:
        there.fetch(NAMES[2])
    assert str(refused.value) == f"{URL} has no checkpoint {NAMES[2]} any more"
    assert offered(there) == NAMES[:2]


def test_a_checkpoint_that_is_in_the_run_directory_all_the_same_is_not_fetched(paths: RunPaths, bucket: Bucket) -> None:
    """As one that a full ring gave up and a pin kept: a copy would have put it into quarantine."""
    there, done, _ = reaching(paths)
    there.fetch(NAMES[1])
    operations = len(bucket.operations)
    done.clear()
    assert there.fetch(NAMES[1]) == read_manifest(paths.checkpoint(NAMES[1]))
    assert (len(bucket.operations), done) == (operations, [])
    assert not paths.quarantine.exists()
    assert len(fetched(paths)) == 1


def test_what_has_come_here_is_on_record_also_where_another_host_did_not_get_it(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as good again, though it was quarantined before. The next plan needs nothing here any more."""
    there, _, _ = reaching(paths)
    with monkeypatch.context() as of_two_hosts:
        require = CheckpointDownload.require

        def require_of_all(download: CheckpointDownload) -> None:
            require(download)
            raise CheckpointOutOfReach("no room on the other one")

        of_two_hosts.setattr(CheckpointDownload, "require", require_of_all)
        with pytest.raises(CheckpointOutOfReach):
            there.fetch(NAMES[1])
    assert [fact.checkpoint for fact in fetched(paths)] == [NAMES[1]]
    there.try_again()
    there.fetch(NAMES[1])
    assert len(fetched(paths)) == 1


def test_what_is_here_and_cannot_be_read_stays_until_its_copy_is_here(paths: RunPaths, bucket: Bucket) -> None:
    """It may be sound, and a pin may keep it: a disk that fails for a moment shows as much."""
    there, _, _ = reaching(paths)
    there.fetch(NAMES[1])
    shard = paths.checkpoint(NAMES[1]) / shard_name(0)
    sound = shard.read_bytes()
    shard.write_bytes(sound[:8])
    bucket.fail(0, "for ever")
    with pytest.raises(CheckpointOutOfReach):
        there.fetch(NAMES[1])
    assert shard.read_bytes() == sound[:8]
    bucket.heal()
    there.try_again()
    there.fetch(NAMES[1])
    assert whole(paths, NAMES[1])
    assert (paths.quarantine / NAMES[1] / shard.name).read_bytes() == sound[:8]


def test_a_record_that_cannot_be_read_offers_nothing(paths: RunPaths) -> None:
    there, _, _ = reaching(paths)
    lines = paths.supervisor_journal.read_bytes().splitlines(keepends=True)
    paths.supervisor_journal.write_bytes(b"".join([lines[0][:-5] + b"\n", *lines[1:]]))
    assert offered(there) == []
    assert read_journal(paths.train_journal).records
