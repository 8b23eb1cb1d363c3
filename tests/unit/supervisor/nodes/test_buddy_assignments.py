"""The leader's part in copies of snapshots on other hosts."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from checkpoints import manifest_of
from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result, slots
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.format.manifest import ShardRecord
from rollback.errors import RunDirectoryError
from rollback.facts.training import Committed, Fact, NoBuddyCopy, NoLastSnapshot, PartBroughtBack
from rollback.rundir.host_records import RecordPublisher, SharedDirectory, read_in_place, write_in_place
from rollback.rundir.identity import JobIdentity, new_identity, write_identity
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths, shard_name
from rollback.supervisor import patience, supervise
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.buddy.wire import Buddies
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.last_snapshot import forget_last_snapshot, last_snapshot_on_host
from rollback.supervisor.nodes import buddy_assignments
from rollback.supervisor.nodes.buddy_assignments import BuddyAssignments, addresses
from rollback.supervisor.nodes.follow import Follower
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import SharedMeeting
from rollback.supervisor.nodes.membership import NodePlace, OwnNode, place_among_nodes
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport, RunResult

SOON = 20.0
IDENTITY = new_identity(JobIdentity(world_size=2, model=[], optimizer={}, objects=[], data={}))
BROUGHT = PartBroughtBack(node="node-1", checkpoint="c000001-s00000020", step=20, bytes=9, seconds=0.1, source="h")


def place(nodes: str = "2") -> NodePlace:
    found = place_among_nodes({"nnodes": nodes, "node-rank": "0", "local-addr": "127.0.0.1"})
    assert found is not None
    return found


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


@pytest.fixture
def buddy(paths: RunPaths, tmp_path: Path) -> Iterator[Buddy]:
    buddy = Buddy(paths, tmp_path, "node-0", "127.0.0.1", lambda line: None)
    yield buddy
    buddy.close()


def report(node: int = 1, **more: Any) -> NodeReport:
    fields = {"node": f"node-{node}", "launch": f"h{node}:1", "host": f"h{node}", "pid": 1, "buddy": f"h{node}:7"}
    return NodeReport(**{**fields, **more})


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"a": ("h1", "h1:1"), "b": ("h2", "h2:1")}, ("h1:1", "h2:1")),
        ({"a": ("h1", "h1:1"), "b": ("h2", "")}, ("h1:1", "")),
        ({"a": ("h1", "h1:1"), "b": ("h1", "h1:2")}, ("", "")),
        ({"a": ("h1", "h1:1")}, ("h1:1", "")),
    ],
    ids=["each keeps one", "one keeps none", "both on one host", "one is unknown"],
)
def test_nodes_that_share_a_host_keep_no_copies(members: dict[str, tuple[str, str]], found: tuple[str, ...]) -> None:
    assert addresses(("a", "b"), members) == found


def test_the_secret_is_new_at_each_gathering_and_a_record_says_what_may_be_brought_back(
    paths: RunPaths, buddy: Buddy
) -> None:
    assignments = BuddyAssignments(OwnNode(paths, place(), print, buddy=buddy), lambda fact: None)
    first, second = assignments.get_ready(), assignments.get_ready()
    assert first is not None
    assert second is not None
    assert first.secret != second.secret
    arranged = assignments.arrange(second, ("node-0", "node-1"), [report(), report(2)])
    assert arranged == second.model_copy(update={"addresses": (buddy.address, "h1:7")}), "the run begins"
    write_identity(paths, IDENTITY)
    paths.train_journal.parent.mkdir()
    journal = Journal(paths.train_journal, 1)
    for seq in (1, 2):
        name = f"c{seq:06d}-s{20 * seq:08d}"
        journal.append(Committed(checkpoint=name, step=20 * seq, batch=40, timeline=0, bytes=1, seconds=0.1))
    journal.close()
    arranged = assignments.arrange(second, ("node-1", "node-0"), [report()])
    assert arranged is not None
    assert arranged.run == IDENTITY.run_id
    assert arranged.wanted == ("c000002-s00000040", "c000001-s00000020")
    assert arranged.addresses == ("h1:7", buddy.address)


def test_without_replicas_there_is_nothing(paths: RunPaths) -> None:
    noted: list[Fact] = []
    assignments = BuddyAssignments(OwnNode(paths, place(), print), noted.append)
    assert assignments.get_ready() is None
    assert assignments.arrange(None, ("node-0", "node-1"), [report()]) is None
    assignments.begin(0, None, lambda: False)
    assignments.look(1, [report(attempt=1)])
    assignments.rest()
    assert noted == []


def test_a_reason_is_journalled_when_it_comes_and_when_it_goes(paths: RunPaths, buddy: Buddy) -> None:
    noted: list[Fact] = []
    assignments = BuddyAssignments(OwnNode(paths, place(), print, buddy=buddy), noted.append)
    for reason in (None, "no room", "no room", None, None):
        assignments.look(
            3, [report(attempt=3, uncopied=reason), report(2, attempt=2, uncopied="of an earlier attempt"), None]
        )
    assert noted == [NoBuddyCopy(node="node-1", reason="no room"), NoBuddyCopy(node="node-1", reason=None)]
    assert [fact.in_words() for fact in noted if isinstance(fact, NoBuddyCopy)] == [
        "snapshots of node-1 are in no other host's memory: no room",
        "snapshots of node-1 are in another host's memory again",
    ]


def test_a_part_is_journalled_once_and_in_the_attempt_that_it_came_for(
    paths: RunPaths, buddy: Buddy, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[Fact] = []
    own = BROUGHT.model_copy(update={"node": "node-0"})
    monkeypatch.setattr(buddy, "begin", lambda seat, buddies, given_up: own)
    assignments = BuddyAssignments(OwnNode(paths, place(), print, buddy=buddy), noted.append)
    assignments.begin(0, None, lambda: False)
    assert noted == [], "the attempt has not begun on the record"
    for _ in range(2):
        assignments.look(2, [report(attempt=2, brought_back=BROUGHT)])
    assert noted == [BROUGHT, own]
    assignments.rest()
    assignments.look(3, [])
    assert noted == [BROUGHT, own]


def test_nodes_know_the_secret_before_any_of_them_starts_and_nobody_does_behind_the_end(
    paths: RunPaths, buddy: Buddy
) -> None:
    meeting = SharedMeeting(paths, 2)
    leader = Leader(OwnNode(paths, place(), print, buddy=buddy), meeting)
    seen: list[Buddies | None] = []

    def look() -> bool:
        """Called while nodes are waited for: the other one comes once it knows the secret."""
        orders = LeaderOrders.model_validate_json(paths.nodes.joinpath("orders.json").read_bytes().split(b"\n")[0])
        seen.append(orders.buddies)
        if orders.buddies is not None and orders.buddies.secret == buddy._server.secret:
            other = report(leader=orders.leader, attempt=1)
            write_in_place(paths.node(other.node), other.model_dump_json().encode())
        return len(seen) > 100

    try:
        assert leader.gather(1, look)
        assert seen[0] is not None
        assert seen[0].addresses == ()
        assert leader._publisher.record.buddies == seen[0].model_copy(update={"addresses": (buddy.address, "h1:7")})
        leader.left(HostOutcome(status=1))
        assert buddy._server.secret == ""
    finally:
        leader._publisher.stop()


class RankThatEnds:
    """What a follower needs to see of its own torchrun, which ends at once."""

    attempt = 1
    poll = staticmethod(lambda: 0)
    look = beats = staticmethod(dict)


def test_a_follower_knows_the_secret_before_it_is_ready_and_not_behind_its_ranks_end(
    paths: RunPaths, buddy: Buddy, monkeypatch: pytest.MonkeyPatch
) -> None:
    buddies = Buddies(secret="5" * 64)
    leads = RecordPublisher(
        SharedDirectory(paths.nodes), "orders.json",
        LeaderOrders(leader="a:1", host="a", pid=1, attempt=1, buddies=buddies), lambda line: None,
    )  # fmt: skip
    own, told = place(), paths.node("node-0")
    seen: list[object] = []

    def reported() -> NodeReport:
        return NodeReport.model_validate_json(read_in_place(told))

    def says(state: str) -> bool:
        with suppress(OSError, ValueError):  # not there, or not whole yet
            return reported().state == state
        return False

    def get_ready(given: Buddies | None) -> None:
        seen.append((reported().state, given))
        of_buddy(given)

    def begin(seat: int, given: Buddies | None, given_up: Callable[[], bool]) -> PartBroughtBack:
        seen.append((reported().state, buddy._server.secret == buddies.secret, seat, given_up()))
        leads.show(phase="stop")
        wait_for(given_up)
        return BROUGHT

    def attempt(number: int, group: object) -> AbstractContextManager[RankThatEnds]:
        seen.append((number, reported().brought_back))
        return nullcontext(RankThatEnds())

    of_buddy = buddy.get_ready
    monkeypatch.setattr(buddy, "get_ready", get_ready)
    monkeypatch.setattr(buddy, "begin", begin)
    host = SimpleNamespace(
        end_leftovers=lambda say: None, attempt=attempt, left=lambda status, running: HostOutcome(status=status),
        output=SimpleNamespace(release=lambda: None),
    )  # fmt: skip
    meeting = SimpleNamespace(
        apart=False, transport=SharedDirectory(paths.nodes), is_led_by=lambda orders: True, is_leaderless=lambda: False
    )
    signals = SimpleNamespace(received=[], take=list, insistent=False)
    follower = Follower(OwnNode(paths, own, print, buddy=buddy), host, 1.0, signals, meeting)  # type: ignore[arg-type]
    thread = threading.Thread(target=follower.follow, daemon=True)
    thread.start()
    try:
        wait_for(lambda: says("ready"))
        assert seen == [("ended", buddies)]
        assert buddy._server.secret == buddies.secret
        running = buddies.model_copy(update={"addresses": ("a:1", "b:1")})
        leads.show(phase="run", members=("a:1", own.launch), buddies=running)
        wait_for(lambda: says("ended"))
        assert seen[1:] == [("running", True, 1, False), (1, BROUGHT)]
        assert buddy._server.secret == ""
    finally:
        leads.show(phase="over", result=RunResult(exit_code=0, reason="done"))
        thread.join(SOON)
        leads.stop()
    assert not thread.is_alive()


# The launch ----------------------------------------------------------------------------------------------------------


def order(paths: RunPaths, replicas: int, base: Path) -> Any:
    return SimpleNamespace(paths=paths, replicas=replicas, settings=SimpleNamespace(fast_tier=str(base)))


def test_a_port_that_cannot_be_listened_on_costs_the_copies_and_no_launch(
    paths: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object) -> None:
        raise OSError("no ports")

    said: list[str] = []
    monkeypatch.setattr(supervise, "Buddy", fails)
    with supervise._buddy(order(paths, 2, tmp_path), place(), said.append) as found:
        assert found is None
    assert said == ["no snapshot is copied to or from this host (no ports)"]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_launch_without_replicas_gives_the_memory_of_copies_back(
    paths: RunPaths, tmp_path: Path, nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_identity(paths, IDENTITY)
    tier = slots.tier_of(tmp_path / "memory", IDENTITY.run_id)
    tier.root.parent.parent.mkdir()
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier)
    copy = tier.root / "buddy-00001-02-c000001-s00000001"
    copy.mkdir()
    (copy / "manifest.json").write_text(json.dumps({}))
    said: list[str] = []
    at = place_among_nodes({"nnodes": nodes})
    with monkeypatch.context() as patch:
        patch.setattr(supervise.slots, "remove_copies", lambda tier: (_ for _ in ()).throw(OSError("busy")))
        with supervise._buddy(order(paths, 1, tmp_path / "memory"), at, said.append):
            assert said == [f"giving back the memory of other hosts' snapshots in {tier.root}: busy"]
    with supervise._buddy(order(paths, 1, tmp_path / "memory"), at, said.append) as found:
        assert found is None
    assert not copy.exists()


def test_what_the_ranks_have_kept_at_the_end_may_be_brought_back_though_no_journal_has_it_yet(
    paths: RunPaths, buddy: Buddy, tmp_path: Path
) -> None:
    write_identity(paths, IDENTITY)
    tier = slots.tier_of(tmp_path / "memory", IDENTITY.run_id)
    tier.root.parent.parent.mkdir()
    slots.claim(tier, paths.root)
    tiers.point_to_fast_tier(paths, tier, 2)
    marks = end_marks.marks_of(tier)
    end_marks.prepare(marks)
    shards = tuple(ShardRecord(file=shard_name(rank), size=8, hash="0" * 32) for rank in range(2))
    kept, lost = (manifest_of(seq, seq, 2).model_copy(update={"shards": shards}) for seq in (7, 8))
    tier.slot(90).mkdir(0o700)
    slots.commit(tier, 90, kept)
    assert [place.name for place in tiers.in_slots(paths)] == [kept.name]
    assert last_snapshot_on_host(paths) is None, "nobody has told of it"
    for rank, checkpoint in enumerate((kept.name, lost.name, None)):
        last_snapshot_result.write_result(
            marks, LastSnapshotResult(attempt=1, rank=rank, reason="a rank", checkpoint=checkpoint)
        )
    here = last_snapshot_on_host(paths)
    assert here is not None
    assert (here.attempt, here.checkpoint) == (1, kept.name), "the other one was taken back"
    assert last_snapshot_on_host(paths, 2) is None, "a later attempt has begun elsewhere"
    journal = Journal(paths.train_journal, 1)
    journal.append(NoLastSnapshot(reason="a test"))
    journal.close()
    assignments = BuddyAssignments(OwnNode(paths, place(), print, buddy=buddy), lambda fact: None)
    arranged = assignments.arrange(assignments.get_ready(), ("node-0", "node-1"), [report()])
    assert arranged is not None
    assert arranged.wanted == (kept.name,)
    slots.discard(tier, 90)
    gone = last_snapshot_on_host(paths)
    assert gone is not None
    assert (gone.checkpoint, gone.step) == (None, None)
    forget_last_snapshot(paths, 2)
    assert last_snapshot_on_host(paths) == gone
    forget_last_snapshot(paths, 1)
    assert last_snapshot_on_host(paths) is None, (
        "another attempt of that number begins, as after a leader that was lost"
    )
    end_marks.prepare(marks)
    last_snapshot_result.write_result(marks, LastSnapshotResult(attempt=1, rank=0, reason="a rank"))
    end_marks.prepare(marks)
    assert last_snapshot_on_host(paths) is None, "another attempt has begun"


@pytest.mark.parametrize("name", ["run.json", "journal/train.jsonl"])
def test_a_disk_that_refuses_the_record_for_a_moment_does_not_end_the_run_between_two_attempts(
    paths: RunPaths, buddy: Buddy, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_identity(paths, IDENTITY)
    journal = Journal(paths.train_journal, 3)
    journal.append(NoLastSnapshot(reason="a test"))
    journal.close()
    refusals, open_file, said = [errno.EIO], os.open, list[str]()

    def refused(path: Any, *how: Any, **more: Any) -> int:
        if str(path).endswith(Path(name).name) and refusals:
            raise OSError(refusals.pop(), "Input/output error", str(path))
        return open_file(path, *how, **more)

    monkeypatch.setattr(patience, "_POLL", 0.0)
    assignments = BuddyAssignments(OwnNode(paths, place(), said.append, buddy=buddy), lambda fact: None)
    ready = assignments.get_ready()
    monkeypatch.setattr(os, "open", refused)
    arranged = assignments.arrange(ready, ("node-0", "node-1"), [report(kept=kept_by(3, "c000007-s00000007"))])
    assert arranged is not None
    assert (arranged.run, arranged.wanted) == (IDENTITY.run_id, ("c000007-s00000007",))
    assert [line.partition(";")[2] for line in said] == [" it is tried again for 10 s"]


def test_a_job_that_is_told_to_stop_waits_for_no_disk_before_its_next_attempt(
    paths: RunPaths, buddy: Buddy, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals: list[RunPaths] = []

    def refused(paths: RunPaths) -> None:
        refusals.append(paths)
        raise RunDirectoryError(f"reading {paths.identity}") from OSError(errno.EIO, "Input/output error")

    def told_to_stop() -> bool:
        """Once the disk is waited for. Before that, the other node comes."""
        other = report(leader=leader._publisher.record.leader, attempt=1)
        write_in_place(paths.node(other.node), other.model_dump_json().encode())
        return len(refusals) > 2

    monkeypatch.setattr(buddy_assignments, "read_identity", refused)
    monkeypatch.setattr(patience, "_POLL", 0.0)
    leader = Leader(OwnNode(paths, place(), print, buddy=buddy), SharedMeeting(paths, 2))
    try:
        assert not leader.gather(1, told_to_stop)
        assert len(refusals) == 3
        assert leader._publisher.record.phase == "gather", "no node is told to start"
    finally:
        leader._publisher.stop()


def test_a_leader_whose_host_has_nothing_hears_from_the_others_what_their_ranks_have_kept(
    paths: RunPaths, buddy: Buddy
) -> None:
    """It was started anew on an empty host when the one that led was lost, or it was a spare."""
    write_identity(paths, IDENTITY)
    journal = Journal(paths.train_journal, 3)
    journal.append(NoLastSnapshot(reason="a test"))
    journal.close()
    assignments = BuddyAssignments(OwnNode(paths, place(), print, buddy=buddy), lambda fact: None)

    def wanted(*kept: LastSnapshotResult | None) -> tuple[str, ...]:
        reports = [report(kept=each) for each in kept]
        arranged = assignments.arrange(assignments.get_ready(), ("node-0", "node-1"), reports)
        assert arranged is not None
        return arranged.wanted

    assert wanted(kept_by(3, "c000007-s00000007"), kept_by(3, None), None) == ("c000007-s00000007",)
    assert wanted(kept_by(2, "c000007-s00000007")) == (), "another attempt has begun since"


def kept_by(attempt: int, checkpoint: str | None) -> LastSnapshotResult:
    return LastSnapshotResult(
        attempt=attempt, reason="a rank is gone", checkpoint=checkpoint, step=7 if checkpoint else None, rank=0,
        seconds=0.1, why_not=None, furthest=7,
    )  # fmt: skip
