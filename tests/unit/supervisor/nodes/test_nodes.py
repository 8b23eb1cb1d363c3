"""What leader and followers make of each other's words: the tables, and liveness by a clock of one's own."""

import json
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from disks import disk_of, fill, may_mount
from hypothesis import given
from hypothesis import strategies as st
from open_files import no_descriptor_free

from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.config import Settings
from rollback.errors import RunInUse, UsageError
from rollback.facts.training import LastSnapshotMade
from rollback.rundir.heartbeats import UnrecordedEnd
from rollback.rundir.host_records import (
    SILENT_AFTER,
    RecordPublisher,
    RecordWatcher,
    SharedDirectory,
    read_in_place,
    write_in_place,
)
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.outcome import Failures, HostOutcome, RankFailure, Refusal
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import SharedMeeting
from rollback.supervisor.nodes.membership import OwnNode, command_of, differences, membership, place_among_nodes
from rollback.supervisor.nodes.protocol import (
    LeaderOrders,
    NodeReport,
    RunResult,
    followers_move,
    leaders_move,
    leaves_alone,
    merged,
    must_end,
    ready,
)
from rollback.supervisor.torchrun.command import LaunchedJob

LAUNCH = "b:1:1.0"


def orders(phase: str, attempt: int = 3, *, member: bool = True) -> LeaderOrders:
    members = (LAUNCH,) if member else ()
    return LeaderOrders(leader="a:1:1.0", host="a", pid=1, phase=phase, attempt=attempt, members=members)


def report(state: str, status: int | None = None, attempt: int = 3) -> NodeReport:
    left = HostOutcome(status=status) if status is not None else None
    return NodeReport(
        node="node-1", launch=LAUNCH, host="b", pid=1, leader="a:1:1.0", attempt=attempt, state=state, left=left
    )


def test_a_follower_s_table() -> None:
    rows = {
        "ready": {"gather": "wait", "run": "start", "stop": "pass", "end": "pass", "over": "quit"},
        "running": {"gather": "end", "run": "wait", "stop": "tell", "end": "end", "over": "quit"},
        "ended": {"gather": "wait", "run": "wait", "stop": "wait", "end": "wait", "over": "quit"},
    }
    for state, row in rows.items():
        assert {phase: followers_move(state, 3, orders(phase), LAUNCH) for phase in row} == row, state
    for state, move in (("ready", "get ready"), ("ended", "get ready"), ("running", "end")):
        assert followers_move(state, 2, orders("gather"), LAUNCH) == move


def test_orders_for_others_start_nothing_and_end_what_runs() -> None:
    for other in (orders("run", member=False), orders("run", attempt=4)):
        assert followers_move("ready", 3, other, LAUNCH) == "wait"
        assert followers_move("ready", 3, other.model_copy(update={"phase": "end"}), LAUNCH) == "wait"
        assert followers_move("running", 3, other, LAUNCH) == "end"


def test_who_has_no_part_in_the_attempt_and_is_told_to_stop_leaves_alone() -> None:
    all_orders = [orders(phase, member=False) for phase in ("gather", "run", "stop", "end", "over")]

    def leaves(*, waits: bool, seated: bool) -> list[str]:
        return [told.phase for told in all_orders if leaves_alone(told, waits=waits, seated=seated)]

    assert leaves(waits=True, seated=True) == ["gather", "run", "stop", "end"]
    assert leaves(waits=True, seated=False) == ["run", "stop", "end"], "the next attempt cannot do without it"
    assert leaves(waits=False, seated=True) == leaves(waits=False, seated=False) == []


@pytest.mark.parametrize(
    ("own", "member", "move", "ends"),
    [
        (None, report("running"), "wait", False),
        (None, report("ready"), "wait", False),  # it has not read yet that it is to start
        (None, report("ended", 0), "wait", False),
        (None, report("ended", 1), "end", True),
        (None, None, "end", True),
        (0, report("running"), "wait", False),
        (0, report("ended", 0), "settled", False),
        (1, report("running"), "end", True),
        (1, report("ended", -9), "settled", True),
        (1, None, "settled", True),
    ],
)
def test_the_leader_s_table(own: int | None, member: NodeReport | None, move: str, ends: bool) -> None:
    assert leaders_move(own, {LAUNCH: member}) == move
    assert must_end(own, {LAUNCH: member}) is ends


@given(
    own=st.sampled_from([None, 0, 1, -9]),
    members=st.lists(
        st.sampled_from([None, report("ready"), report("running"), report("ended", 0), report("ended", 1)])
    ),
)
def test_an_attempt_that_has_failed_anywhere_settles_once_everybody_has_obeyed(
    own: int | None, members: list[NodeReport | None]
) -> None:
    known = {str(number): member for number, member in enumerate(members)}
    if must_end(own, known):
        # What the orders lead to: the leader kills its own torchrun, and followers end theirs, or begin none.
        moves = {state: followers_move(state, 3, orders("end"), LAUNCH) for state in ("ready", "running", "ended")}
        obeyed = {name: member and moves[member.state] in ("end", "pass") for name, member in known.items()}
        after = {name: report("ended", -9) if obeyed[name] else member for name, member in known.items()}
        assert leaders_move(own if own is not None else -9, after) == "settled"
    if leaders_move(own, known) == "settled":
        assert own is not None
        assert all(member is None or member.state == "ended" for member in members)


def test_only_those_count_as_ready_who_follow_this_leader_for_this_attempt() -> None:
    mine = report("ready")
    others = [report("ready", attempt=2), report("ended", 0), mine.model_copy(update={"leader": "c:1:1.0"})]
    assert ready([*others, mine], "a:1:1.0", 3) == {LAUNCH: mine}


def test_what_all_nodes_left_begins_with_the_rank_that_a_signal_ended() -> None:
    def failed(rank: int, exitcode: int) -> HostOutcome:
        failure = RankFailure(rank=rank, pid=1, exitcode=exitcode, message=None)
        return HostOutcome(status=1, failures=Failures(error="ChildFailedError", failures=(failure,)))

    whole = merged(failed(0, 1), {"node-1": failed(1, -9), "node-2": failed(2, -15)})
    assert whole.status == 1
    assert [failure.rank for failure in whole.failures.failures] == [1, 0, 2]
    assert whole.lost_nodes == ()
    assert not whole.failures.shortage
    short = failed(1, 1)
    short = short.model_copy(update={"failures": short.failures.model_copy(update={"shortage": True})})
    assert merged(failed(0, 1), {"node-1": short}).failures.shortage
    killed, raised = failed(1, -9), failed(0, 1)
    silent = killed.model_copy(update={"failures": killed.failures.with_ended({1, 2})})
    assert [failure.rank for failure in merged(silent, {"node-1": raised}).failures.failures] == [0, 1], "by its end"
    assert raised.failures.with_ended({0}) == raised.failures, "it had ended before"
    lost = merged(HostOutcome(status=-9), {"node-1": None, "node-2": HostOutcome(status=0)})
    assert (lost.status, lost.lost_nodes) == (-9, ("node-1",))
    starved = {host: HostOutcome(status=1, oom_hosts=(host,)) for host in ("node-1", "node-2")}
    assert merged(HostOutcome(status=1), starved).oom_hosts == ("node-1", "node-2")
    torchrun = HostOutcome(status=-9, oom_hosts=("node-1",), torchrun_oom_killed=True)
    assert merged(HostOutcome(status=-9), {"node-1": torchrun}).torchrun_oom_killed
    refusal = Refusal(exit_code=78, message="another model")
    assert merged(HostOutcome(status=0), {"node-1": HostOutcome(status=0, refusal=refusal)}).refusal == refusal
    unrecorded = UnrecordedEnd(how="complete", why="no space left", step=9, batch=9)
    assert (
        merged(HostOutcome(status=0), {"node-1": HostOutcome(status=0, unrecorded=unrecorded)}).unrecorded == unrecorded
    )


def test_what_the_hosts_made_of_the_last_snapshot_is_one_fact() -> None:
    """A host that tells of a checkpoint knows that all have it; the furthest step may be known on another one."""

    def left(rank: int, step: int | None, furthest: int | None) -> HostOutcome:
        kept = LastSnapshotResult(
            attempt=1, reason="rank 3 is gone", checkpoint=None if step is None else "c", step=step, rank=rank,
            seconds=0.5, why_not="it was in its update" if step is None else None, furthest=furthest,
        )  # fmt: skip
        return HostOutcome(status=1, kept=kept)

    whole = merged(
        left(0, None, 21), {"node-1": left(2, 21, None), "node-2": HostOutcome(status=0), "node-3": None}
    ).kept
    assert whole is not None
    assert whole.as_fact(21, None) == LastSnapshotMade(
        reason="rank 3 is gone", checkpoint="c", step=21, rank=2, seconds=0.5, steps_lost=0
    )
    none = merged(left(0, None, 19), {"node-1": left(2, None, 21)}).kept
    assert none is not None
    assert none.as_fact(10, None).in_words() == (
        "the state of the last step could not be kept (rank 3 is gone): it was in its update; 11 steps are lost"
    )
    assert none.as_fact(None, None).steps_lost is None
    assert none.as_fact(10, None, host_lost=True).steps_lost is None, "it may lack the part of that host"
    assert whole.as_fact(21, None, host_lost=True).steps_lost == 0, "all have it"
    assert merged(HostOutcome(status=1), {"node-1": None}).kept is None


def test_a_record_that_does_not_change_is_silent_by_the_reader_s_own_clock(tmp_path: Path) -> None:
    now = [1000.0]
    watcher = RecordWatcher(SharedDirectory(tmp_path), "node-*.json", NodeReport, clock=lambda: now[0])
    path, said = RunPaths(tmp_path).node("node-1"), report("ready")
    path = tmp_path / path.name
    write_in_place(path, said.model_dump_json().encode())
    (tmp_path / "node-2.json").write_text("{")
    assert watcher.look() == {"node-1.json": said}
    now[0] += SILENT_AFTER - 1
    assert watcher.look()
    now[0] += 2
    assert watcher.look() == {}
    write_in_place(path, said.model_copy(update={"beat": 1}).model_dump_json().encode())
    assert watcher.look()


def test_who_is_read_in_the_middle_of_a_write_is_not_lost_for_a_moment(tmp_path: Path) -> None:
    watcher, path, said = (
        RecordWatcher(SharedDirectory(tmp_path), "node-*.json", NodeReport),
        tmp_path / "node-1.json",
        report("ready"),
    )
    write_in_place(path, said.model_dump_json().encode())
    assert watcher.look() == {"node-1.json": said}
    with path.open("r+b") as file:
        file.write(b'{"node":"half of a new one')
    assert watcher.look() == {"node-1.json": said}
    path.unlink()
    assert watcher.look() == {}


def test_nobody_is_lost_while_a_host_cannot_open_files_for_a_moment(tmp_path: Path) -> None:
    publishers = [
        RecordPublisher(SharedDirectory(tmp_path), name, report("ready"), print)
        for name in ("node-b.json", "orders.json")
    ]
    watchers = [RecordWatcher(SharedDirectory(tmp_path), name, NodeReport) for name in ("node-*.json", "orders.json")]
    assert all(watcher.look() for watcher in watchers)
    with no_descriptor_free():
        found = [watcher.look() for watcher in watchers]
    assert all(found)
    for publisher in publishers:
        publisher.stop()
    assert not any(watcher.look() for watcher in watchers)


def test_who_cannot_write_takes_nobody_for_silent(tmp_path: Path) -> None:
    now, writes_fail = [1000.0], [True]
    watcher = RecordWatcher(
        SharedDirectory(tmp_path), "node-*.json", NodeReport, clock=lambda: now[0], writes_fail=lambda: writes_fail[0]
    )
    write_in_place(tmp_path / "node-1.json", report("ready").model_dump_json().encode())
    for _ in range(5):
        now[0] += SILENT_AFTER
        assert watcher.look(), "whether it is silent cannot be told"
    writes_fail[0] = False
    now[0] += SILENT_AFTER - 1
    assert watcher.look(), "counted from when it could be told again"
    now[0] += 2
    assert watcher.look() == {}


@pytest.mark.skipif(not may_mount(), reason="only root may mount, and not everywhere")
def test_a_full_disk_holds_no_host_record_back(tmp_path: Path) -> None:
    with disk_of("1m", tmp_path / "disk") as disk:
        path, said = disk / "node-1.json", []
        publisher = RecordPublisher(SharedDirectory(path.parent), path.name, report("ready"), said.append)
        subprocess.run(["sh", "-c", fill(disk)], check=True)
        publisher.show(state="running", signals=("SIGTERM",) * 100)
        assert NodeReport.model_validate_json(read_in_place(path)).signals
        assert not said
        assert not publisher.failing
        publisher.stop()


def test_a_publisher_goes_on_until_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "nodes" / "node-1.json"
    publisher = RecordPublisher(SharedDirectory(path.parent), path.name, report("ready"), print)
    beats = set()
    enough = threading.Event()
    for _ in range(500):
        beats.add(NodeReport.model_validate_json(read_in_place(path)).beat)
        if len(beats) > 1 or enough.wait(0.02):
            break
    assert len(beats) > 1
    publisher.show(state="running")
    assert NodeReport.model_validate_json(read_in_place(path)).state == "running"
    publisher.stop()
    assert not path.exists()


def test_a_record_that_the_disk_does_not_remove_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("read-only file system")

    publisher = RecordPublisher(SharedDirectory(tmp_path), "node-1.json", report("ready"), lambda line: None)
    monkeypatch.setattr(SharedDirectory, "remove", refuse)
    publisher.stop()
    assert (tmp_path / "node-1.json").exists()


def test_a_verdict_that_refuses_reaches_the_other_nodes_as_the_same_error() -> None:
    error = RunResult.of_error(UsageError("no", hint="so")).as_error()
    assert (error.message, error.hint, error.exit_code) == ("no", "so", 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"result": {"exit_code": 999, "reason": "no such code"}},
        {"buddies": {"secret": "5" * 64, "addresses": ["a:1", "b:1"]}},
        {"phase": "dance"},
    ],
)
def test_orders_that_no_leader_gives_are_not_believed(tmp_path: Path, changes: dict[str, object]) -> None:
    sound = orders("run").model_dump(mode="json")
    watcher = RecordWatcher(SharedDirectory(tmp_path), "orders.json", LeaderOrders)
    write_in_place(tmp_path / "orders.json", json.dumps({**sound, **changes}).encode())
    assert watcher.look() == {}
    write_in_place(tmp_path / "orders.json", json.dumps(sound).encode())
    assert watcher.look() == {"orders.json": orders("run")}


def test_places() -> None:
    assert place_among_nodes({}) is None
    assert place_among_nodes({"nnodes": "1:1"}) is None
    assert place_among_nodes({"nnodes": "2", "node-rank": "1"}).name == "node-1"
    fixed, elastic = place_among_nodes({"nnodes": "4:4"}), place_among_nodes({"nnodes": "1:4"})
    assert (fixed.least, fixed.most, fixed.seated) == (4, 4, False)
    assert (elastic.least, elastic.most, elastic.seated, elastic.last_call) == (1, 4, True, 30.0)
    assert place_among_nodes({"nnodes": "1:4", "rdzv-conf": "timeout=9,last_call_timeout=2"}).last_call == 2.0
    for wrong in ("2:1", "0", "some", "1:2:3", "", "-1", "1:"):
        with pytest.raises(UsageError, match="neither a number of nodes nor a range"):
            place_among_nodes({"nnodes": wrong})


@pytest.mark.parametrize(
    ("nnodes", "followers", "gathered"), [("1:4", 0, 1), ("1:4", 2, 3), ("1:2", 3, 2), ("2:4", 0, 0)]
)
def test_of_a_range_those_take_part_that_have_come_by_the_last_call(
    tmp_path: Path, nnodes: str, followers: int, gathered: int
) -> None:
    """gathered: how many take part; 0 where the leader goes on waiting, until it is told to stop."""
    paths = RunPaths(tmp_path)
    place = place_among_nodes({"nnodes": nnodes, "rdzv-conf": "last_call_timeout=0.3"})
    leader = Leader(OwnNode(paths, place, print), SharedMeeting(paths, 2))
    for number in range(followers):
        there = NodeReport(
            node=f"node-{number}",
            launch=f"b:{number}:1.0",
            host="b",
            pid=1,
            leader=place.launch,
            attempt=1,
            state="ready",
        )
        write_in_place(paths.node(there.node), there.model_dump_json().encode())
    began = time.monotonic()
    assert leader.gather(1, lambda: time.monotonic() > began + 2) is bool(gathered)
    if gathered:
        assert len(leader.names) == gathered
        assert (time.monotonic() - began < 0.3) is (gathered == place.most)


def test_nobody_is_the_same_node_twice(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    place = place_among_nodes({"nnodes": "2", "node-rank": "1"})
    with membership(paths, place):
        with pytest.raises(RunInUse, match="node-1 of the run"), membership(paths, place):
            pass
        with membership(paths, place_among_nodes({"nnodes": "2", "node-rank": "0"})):
            pass
    assert not paths.nodes.exists()


def test_options_that_another_node_does_not_have_are_told_as_other_arguments_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("train()")

    def told(nodes: str = "2", arguments: Sequence[str] = (), spares: int = 0, each: str = "1") -> dict[str, str]:
        job = LaunchedJob({"nnodes": nodes, "nproc-per-node": each}, str(tmp_path / "train.py"), list(arguments))
        return command_of(job, Settings(), {"--spare-nodes": spares})

    assert differences(told(), told("3")) == "--nnodes"
    assert differences(told(), told(arguments=["--lr", "1"])) == "arguments"
    assert differences(told(), told(spares=1)) == "--spare-nodes"
    assert differences(told(), told(each="2")) == "--nproc", "a spare would give the job other ranks than it had"
    assert differences(told(each="8"), told(each="08")) == "", "torchrun reads a number"
