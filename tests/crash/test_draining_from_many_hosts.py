"""From the slots of two hosts into one durable ring: whole or not at all, whoever dies when."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faulty import new_bucket
from waiting import wait_for

from checkpoints import LAYOUTS, RANKS, damage, lay_out_as, manifest_of, whole, write_checkpoint
from mortal import Mortal
from recorded_run import RecordedRun
from rollback.checkpoints import ring, tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.format.manifest import Manifest, ShardRecord, read_manifest
from rollback.config import Settings
from rollback.errors import CheckpointDamaged, CheckpointLeft, CheckpointUnreadable, CheckpointUnusable, RingUnavailable
from rollback.facts.training import Drained, Fact
from rollback.ring import copy_requests, shard_copier
from rollback.ring.copy_requests import CopyingHosts, CopyReport, CopyRequest, unclaimed, under_way
from rollback.ring.drainer import DrainPhase, drainer_for
from rollback.ring.in_run import RingInRun
from rollback.ring.shard_copier import ShardCopier
from rollback.ring.url import store as storing
from rollback.ring.url.index import checkpoint_key
from rollback.ring.url.ring import RingAtUrl
from rollback.ring.url.store import Store
from rollback.rundir import host_records
from rollback.rundir import paths as names
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import MANIFEST, RunPaths, pack_name, shard_name

URL = "faulty://bucket/runs/one"


class SecondHost(RunPaths):
    """The run directory as another host sees it, whose memory is its own."""

    @property
    def fast_pointer(self) -> Path:
        return self.root / "fast-tier-of-the-second.json"


class Run:
    """A run of two ranks, each on a host of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.record = RecordedRun(folder / "run", monkeypatch)
        self.paths = self.record.paths
        self.record.attach(0, 1, None, 0)
        self.hosts = (self.paths, SecondHost(self.paths.root))
        self._folder = folder
        identity = read_identity(self.paths)
        assert identity is not None
        for number, paths in enumerate(self.hosts):
            (folder / f"memory-{number}").mkdir()
            tier = slots.tier_of(folder / f"memory-{number}", identity.run_id)
            slots.claim(tier, paths.root)
            tiers.point_to_fast_tier(paths, tier, 2)

    def into_slots(self, seq: int, step: int) -> str:
        """Commit a checkpoint in one of three slots of both hosts, which takes the place of what was there."""
        source = RunPaths(self._folder / f"source-{seq}")
        source.root.mkdir()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(names, "MOST_FILES", RANKS + 1)  # in memory each has a file of its own
            name = write_checkpoint(source, seq, step)
        manifest = read_manifest(source.checkpoint(name))
        for rank, paths in enumerate(self.hosts):
            tier = tiers.fast_tier_of(paths)
            assert tier is not None
            while not slots.uncommit(tier, seq % 3):
                time.sleep(0.01)
            tier.slot(seq % 3).mkdir(mode=0o700, exist_ok=True)
            os.replace(source.checkpoint(name) / shard_name(rank), tier.slot(seq % 3) / shard_name(rank))
            # The hosts' clocks differ.
            slots.commit(tier, seq % 3, manifest.model_copy(update={"created": f"2030-01-01T00:00:0{rank}+00:00"}))
        return name

    def slot_of(self, host: int, name: str) -> Path:
        return next(place.directory for place in tiers.in_slots(self.hosts[host]) if place.name == name)

    def put(self, at_run: RingInRun | RingAtUrl, name: str) -> None:
        directory = self.slot_of(0, name)
        at_run.put(read_manifest(directory, in_slot=True), directory)

    def ring_in_run(self) -> RingInRun:
        at_run = RingInRun(self.paths)
        at_run.open()
        return at_run

    @contextmanager
    def ring_at_url(self) -> Iterator[RingAtUrl]:
        at_url = RingAtUrl(self.paths, Store(URL), print)
        try:
            at_url.open()
            yield at_url
        finally:
            at_url.close()

    def held_at_url(self) -> list[str]:
        with self.ring_at_url() as at_url:
            return list(at_url.held())

    @contextmanager
    def helped(self) -> Iterator[ShardCopier]:
        copier = ShardCopier(self.hosts[1], "node-1", print)
        copier.start()
        try:
            yield copier
        finally:
            copier.close(over=False)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    lay_out_as(getattr(request, "param", "files"), monkeypatch)
    monkeypatch.setattr(copy_requests, "_POLL", 0.01)
    monkeypatch.setattr(shard_copier, "_POLL", 0.01)
    return Run(tmp_path, monkeypatch)


in_both_layouts = pytest.mark.parametrize("run", LAYOUTS, indirect=True)


@in_both_layouts
def test_each_host_copies_its_part_and_the_checkpoint_is_there_when_all_have(run: Run) -> None:
    name = run.into_slots(1, 10)
    with run.helped():
        at_run = run.ring_in_run()
        run.put(at_run, name)
        at_run.close()
    assert ring.names(run.paths) == [name]
    assert whole(run.paths, name)
    assert not run.paths.nodes.exists()


@in_both_layouts
def test_at_a_url_too(run: Run) -> None:
    new_bucket("bucket")
    name = run.into_slots(1, 10)
    with run.helped(), run.ring_at_url() as at_url:
        run.put(at_url, name)
    assert run.held_at_url() == [name]


@in_both_layouts
def test_a_bucket_that_fails_at_any_operation_holds_the_old_checkpoint_or_both(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever host it fails for."""
    monkeypatch.setattr(storing, "PATIENCE", 0.05)
    monkeypatch.setattr(storing, "_LONGEST_WAIT", 0.001)
    bucket = new_bucket("bucket")
    old, new = run.into_slots(0, 0), run.into_slots(1, 10)

    def fill(name: str) -> None:
        with run.ring_at_url() as at_url:
            run.put(at_url, name)

    with run.helped():
        fill(old)
        before, bucket.operations = dict(bucket.objects), []
        fill(new)
        total, both = len(bucket.operations), set()
        for number in range(1, total + 1):
            bucket.objects = dict(before)
            bucket.fail(number, "for ever")
            with contextlib.suppress(RingUnavailable):
                fill(new)
            bucket.heal()
            held = run.held_at_url()
            assert held in ([old], [old, new])
            both.add(len(held) == 2)
            if len(held) == 1:
                fill(new)
            assert run.held_at_url() == [old, new]
            for rank in range(2):
                file = pack_name([rank]) if names.has_packs(RANKS) else shard_name(rank)
                found = Store(URL).get(checkpoint_key(new, file), 1 << 20)
                assert found == (run.slot_of(rank, new) / shard_name(rank)).read_bytes()
    assert False in both


@in_both_layouts
@pytest.mark.parametrize("fault", ["flipped", "cut", "let go", "another"])
def test_a_part_that_is_not_what_the_manifest_says_makes_no_checkpoint(run: Run, fault: str) -> None:
    name = run.into_slots(1, 10)
    slot = run.slot_of(1, name)
    match fault:
        case "flipped":
            damage(slot / shard_name(1))
        case "cut":
            os.truncate(slot / shard_name(1), 100)
        case "let go":
            (slot / "manifest.json").unlink()
        case _:
            manifest = read_manifest(slot, in_slot=True)
            (slot / "manifest.json").write_bytes(manifest.model_copy(update={"batch": 99}).to_json())
    with run.helped():
        at_run = run.ring_in_run()
        with pytest.raises(CheckpointUnusable, match="another host cannot copy its part") as raised:
            run.put(at_run, name)
        at_run.close()
    assert isinstance(raised.value, CheckpointLeft) is (fault == "let go")
    assert list(run.paths.ring.iterdir()) == []


def test_a_host_that_does_not_answer_costs_this_try_and_no_more(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    name = run.into_slots(1, 10)
    at_run = run.ring_in_run()
    monkeypatch.setattr(copy_requests, "PATIENCE", 0.2)
    with pytest.raises(RingUnavailable, match="no host has said within 0 s that it has shard 1"):
        run.put(at_run, name)
    assert list(run.paths.ring.iterdir()) == []
    monkeypatch.setattr(copy_requests, "PATIENCE", 30.0)
    with run.helped():
        run.put(at_run, name)
    at_run.close()
    assert whole(run.paths, name)


def test_a_host_whose_ranks_have_not_made_their_slots_yet_is_asked_again(run: Run) -> None:
    name = run.into_slots(1, 10)
    pointer = run.hosts[1].fast_pointer
    pointer.rename(pointer.with_suffix(".later"))
    with run.helped():
        at_run = run.ring_in_run()
        with pytest.raises(RingUnavailable, match="there is no fast tier on node-1"):
            run.put(at_run, name)
        pointer.with_suffix(".later").rename(pointer)
        run.put(at_run, name)
        at_run.close()
    assert whole(run.paths, name)


@pytest.mark.parametrize("run", ["packs"], indirect=True)
@pytest.mark.parametrize(
    ("claims", "into_run", "shares"),
    [
        ([(1, 2), (3,)], False, {(1, 2), (3,)}),
        ([(1, 2), (2, 3)], False, None),
        ([(1, 2), (2, 3)], True, {(1, 2), (2, 3)}),
    ],
    ids=["apart", "one in both", "one in both, in the run directory"],
)
def test_which_host_has_which_shards_is_known_unless_two_have_the_same(
    run: Run, tmp_path: Path, claims: list[tuple[int, ...]], into_run: bool, shares: set[tuple[int, ...]] | None
) -> None:
    """At a URL each of them makes a pack of what it has, so two packs would have the same shard. In the run directory
    both write the same bytes to the same place."""
    shards = tuple(ShardRecord(file=shard_name(rank), size=8, hash="0" * 32) for rank in range(4))
    manifest = manifest_of(1, 10, 4).model_copy(update={"shards": shards})
    (tmp_path / shard_name(0)).touch()
    meeting = host_records.SharedDirectory(run.paths.nodes)
    others, watcher = CopyingHosts(run.paths, URL), host_records.RecordWatcher(meeting, "wanted.json", CopyRequest)
    parts: list[host_records.RecordPublisher[CopyReport]] = []
    with pytest.raises(RingUnavailable, match="two hosts say") if shares is None else contextlib.nullcontext():
        with others.copying(manifest, tmp_path, into_run=into_run) as found:
            (wanted,) = watcher.look().values()
            assert (found.own, wanted.shards) == ((0,), (1, 2, 3))
            for number, claim in enumerate(claims):
                part = CopyReport(order=wanted.order, shards=claim, done=claim)
                parts.append(host_records.RecordPublisher(meeting, f"part-{number}.json", part, print))
        assert found.others == shares
    for shown in parts:
        shown.stop()
    others.close()


def test_the_part_of_a_host_that_is_lost_is_with_nobody() -> None:
    claimed = CopyReport(order="1", shards=(1, 2), done=(1,))
    assert unclaimed([1, 2], [], [claimed]) == []
    assert under_way([claimed])
    assert unclaimed([1, 2], [1], []) == [2], "what was done stays done"
    assert not under_way([CopyReport(order="1", shards=(1, 2), done=(2, 1)), CopyReport(order="1")])


@pytest.mark.covering
@in_both_layouts
@pytest.mark.parametrize("lost", ["nothing", "contents", "names"])
def test_whoever_fills_the_ring_may_die_at_any_moment(run: Run, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The other host goes on, and helps the successor. lost: with the power, of what was not synced."""
    monkeypatch.setattr(host_records, "_SIGNS", 0.001)  # one host shows signs of life every 1,000 s
    monkeypatch.setattr(host_records, "_SELDOM", 1000.0)
    old, new = run.into_slots(0, 0), run.into_slots(1, 10)
    mortal = Mortal(monkeypatch)
    seen = set()
    with run.helped():
        first = run.ring_in_run()
        run.put(first, old)
        total = mortal.live(lambda: run.put(first, new))
        first.close()
        for number in range(1, total + 1):
            if new in ring.names(run.paths):
                ring.evict(run.paths, new)
            dying = run.ring_in_run()
            mortal.die(number, lambda dying=dying: run.put(dying, new))
            stop_publishing(dying)
            if lost == "contents":
                mortal.lose_power(run.paths.root)
            elif lost == "names":
                mortal.lose_names(run.paths.root)
            successor = run.ring_in_run()
            names = ring.names(run.paths)
            seen.add(len(names))
            assert names in ([old], [old, new])
            assert all(whole(run.paths, held) for held in names)
            assert not list(run.paths.ring.glob(".*"))
            if len(names) == 1:
                run.put(successor, new)
                assert whole(run.paths, new)
            successor.close()
    assert seen == {1, 2}


def test_a_host_that_still_copies_for_a_dead_one_does_not_keep_its_successor_from_starting(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving = run.paths.draining(run.into_slots(1, 10))
    arriving.mkdir(parents=True)
    really = os.rmdir

    def rmdir(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            (arriving / "the-part-of-the-other-host").write_bytes(b"")
        really(*args, **kwargs)

    monkeypatch.setattr(os, "rmdir", rmdir)
    run.ring_in_run().close()
    assert not list(run.paths.ring.glob(".*"))


def test_good_checkpoints_of_two_hosts_are_drained_and_their_memory_is_given_back(run: Run) -> None:
    facts: list[Fact] = []

    def note(fact: Fact) -> None:
        facts.append(fact)
        run.record.tell(200.0, fact)

    drainer = drainer_for(run.paths, Settings(keep=3, checkpoint_every="10"), note, print)
    assert drainer is not None
    with run.helped() as copier:
        drainer.start()
        for seq in range(6):
            name = run.into_slots(seq, 10 * seq)
            run.record.commit(10.0 * seq, name, 10 * seq)
            wait_for(lambda name=name: name in drained(facts))
        run.record.commit(100.0, run.into_slots(6, 60), 60, good=False)
        drainer.finish()
        assert drainer.wait(DrainPhase.FINISHED, 60)
        drainer.close()
        assert drainer.wait(DrainPhase.CLOSED, 60)
        copier.linger(60)
        copier.close(over=True)
    assert ring.names(run.paths) == [manifest_of(seq, 10 * seq).name for seq in (3, 5, 6)]
    assert all(whole(run.paths, name) for name in ring.names(run.paths))
    assert [tiers.fast_tier_of(paths) for paths in run.hosts] == [None, None]
    assert not run.paths.nodes.exists()


def test_a_host_keeps_its_memory_where_the_newest_in_it_is_nowhere_else(run: Run) -> None:
    run.record.commit(0.0, run.into_slots(0, 0), 0)
    copier = ShardCopier(run.hosts[1], "node-1", print)
    copier.start()
    copier.close(over=True)
    assert tiers.fast_tier_of(run.hosts[1]) is not None


def test_a_part_that_leaves_its_slot_while_it_is_copied_is_not_taken_for_damaged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing gets through, the slot is let go: its ranks take another snapshot, and the hash is of that one."""

    def copied_too_late(source: Path, target: Path, shard: ShardRecord) -> None:
        (source.parent / MANIFEST).unlink()
        raise CheckpointDamaged("the hash is another one")

    name = run.into_slots(1, 10)
    monkeypatch.setattr(shard_copier, "copy_shard", copied_too_late)
    with run.helped(), pytest.raises(CheckpointLeft, match="the hash is another one"):
        run.put(run.ring_in_run(), name)


def test_an_error_that_nobody_has_foreseen_on_another_host_is_told_to_who_waits_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Path, target: Path, shard: ShardRecord) -> None:
        raise KeyError("ETag")

    name = run.into_slots(1, 10)
    monkeypatch.setattr(shard_copier, "copy_shard", broken)
    with run.helped(), pytest.raises(RingUnavailable, match=r"KeyError\('ETag'\)"):
        run.put(run.ring_in_run(), name)


def refuse_to_read(slot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(directory: Path, **how: bool) -> Manifest:
        if directory == slot:
            raise CheckpointUnreadable("too many open files")
        return read_manifest(directory, **how)

    monkeypatch.setattr(tiers, "read_manifest", refused)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("another is ahead of the journal", CheckpointLeft), ("it is ahead of the journal", CheckpointUnreadable),
        ("a manifest is damaged", CheckpointDamaged), ("a manifest cannot be read", CheckpointUnreadable),
    ],
)  # fmt: skip
def test_what_is_in_no_slot_that_can_be_used_is_told_as_what_it_may_be(
    run: Run, monkeypatch: pytest.MonkeyPatch, fault: str, kind: type[Exception]
) -> None:
    wanted, other = run.into_slots(1, 10), run.into_slots(2, 20)
    directory, manifest = run.slot_of(0, wanted), run.slot_of(1, other) / MANIFEST
    ahead = {"another is ahead of the journal": other, "it is ahead of the journal": wanted}.get(fault)
    monkeypatch.setattr(tiers, "is_ahead_of", lambda slot, name, journal: name == ahead)
    if ahead != wanted:  # it has left
        (run.slot_of(1, wanted) / MANIFEST).unlink()
    if fault == "a manifest is damaged":
        manifest.write_bytes(b"")
    elif fault == "a manifest cannot be read":
        refuse_to_read(manifest.parent, monkeypatch)
    with run.helped(), pytest.raises(kind, match="another host cannot copy its part"):
        run.ring_in_run().put(read_manifest(directory, in_slot=True), directory)


@pytest.mark.parametrize("what", ["shard", "manifest"])
def test_a_part_that_cannot_be_read_for_a_moment_is_tried_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def refused(source: Path, target: Path, shard: ShardRecord) -> None:
        raise CheckpointUnreadable("too many open files")

    name = run.into_slots(1, 10)
    slot, directory = run.slot_of(1, name), run.slot_of(0, name)
    manifest = read_manifest(directory, in_slot=True)
    with run.helped():
        at_run = run.ring_in_run()
        with pytest.MonkeyPatch.context() as for_a_moment:
            if what == "shard":
                for_a_moment.setattr(shard_copier, "copy_shard", refused)
            else:
                refuse_to_read(slot, for_a_moment)
            with pytest.raises(CheckpointUnreadable, match="another host cannot copy its part"):
                at_run.put(manifest, directory)
        at_run.put(manifest, directory)
        at_run.close()
    assert whole(run.paths, name)


def test_a_record_that_cannot_be_read_keeps_no_rank_from_ending(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_copier, "_MOMENT", 0.2)
    run.paths.train_journal.write_bytes(b"not\na journal\n")
    with run.helped() as copier:
        copier.linger(60.0)


def stop_publishing(at_run: RingInRun) -> None:
    """What a process that is gone shows stays, and is not rewritten any more."""
    shown = at_run._others._publisher
    if shown is not None:
        shown.stop(remove=False)


def drained(facts: list[Fact]) -> list[str]:
    return [fact.checkpoint for fact in facts if isinstance(fact, Drained)]


def test_manifests_of_two_hosts_are_of_one_checkpoint_unless_more_than_the_clock_differs() -> None:
    one: Manifest = manifest_of(1, 10)
    assert one.content == one.model_copy(update={"created": "2030-01-01T00:00:09+00:00"}).content
    assert one.content != one.model_copy(update={"batch": 99}).content
