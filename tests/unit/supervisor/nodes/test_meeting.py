"""Both ways in which hosts meet do the same: by a directory that they share, and by a store of torch's."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from waiting import free_port, wait_for
from warm_server import WarmPopen

from rollback.errors import ExitCode, NodesMissing, RunDirectoryError
from rollback.facts.training import SkipAdded, Window
from rollback.inspect.record.reading import require_run_directory
from rollback.instructions import MeetingPoint
from rollback.rundir.host_records import LIMIT, SILENT_AFTER, RecordPublisher, RecordWatcher, SharedDirectory, Transport
from rollback.rundir.journal.journal import Journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.record_location import HandedOver, write_record_location
from rollback.rundir.skip_records import SkippedBatch
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.nodes import meeting, record_files
from rollback.supervisor.nodes import store as store_processes
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import EndpointMeeting, Meeting, SharedMeeting
from rollback.supervisor.nodes.membership import NodePlace, OwnNode, place_among_nodes
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport, RunResult
from rollback.supervisor.nodes.record_files import RecordFiles, RecordKeeper
from rollback.supervisor.nodes.seats import rank_by_name
from rollback.supervisor.nodes.store import StoreTransport
from rollback.supervisor.signals import StopSignals
from rollback.system.lines import LineWriter

LIMIT_OF_WAITS = 60.0


@pytest.fixture(scope="module", autouse=True)
def _warm_stores() -> Iterator[None]:
    """The processes that have the stores, or reach them, import torch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        warm = SimpleNamespace(Popen=WarmPopen, DEVNULL=subprocess.DEVNULL)
        monkeypatch.setattr(store_processes, "subprocess", warm)
        yield


@dataclass
class Sides:
    """leader, follower: the transports of two hosts. meeting: of the leader's."""

    leader: Transport
    follower: Transport
    meeting: Meeting
    paths: RunPaths


@pytest.fixture(scope="module")
def stores() -> Iterator[tuple[StoreTransport, StoreTransport]]:
    port = free_port()
    host = StoreTransport(MeetingPoint("127.0.0.1", port, True, "rollback/test"))
    guest = StoreTransport(MeetingPoint("127.0.0.1", port, False, "rollback/test"))
    wait_for(lambda: (host.role and guest.role) or host.gone or guest.gone)
    assert (host.role, guest.role) == ("host", "guest"), (host.gone, guest.gone)
    yield host, guest
    host.close()
    wait_for(lambda: guest.gone is not None)
    with pytest.raises(OSError, match="is gone"):
        guest.write("node-1.json", b"{}")
    assert EndpointMeeting(guest).is_leaderless()
    guest.close()


@pytest.fixture(params=["directory", "store"])
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Sides:
    paths = RunPaths(tmp_path)
    if request.param == "directory":
        meeting = SharedMeeting(paths, 2)
        return Sides(meeting.transport, SharedDirectory(paths.nodes), meeting, paths)
    host, guest = request.getfixturevalue("stores")
    return Sides(host, guest, EndpointMeeting(host), paths)


def report(node: str, **more: object) -> NodeReport:
    return NodeReport(node=node, launch=f"b:{node}", host="b", pid=1, **more)


def test_news_of_each_side_reaches_the_other_at_once(sides: Sides) -> None:
    orders = RecordPublisher(sides.leader, "orders.json", LeaderOrders(leader="a", host="a", pid=1, attempt=7), print)
    told = RecordPublisher(sides.follower, "node-1.json", report("node-1", leader="a", attempt=7), print)
    down, up = (
        RecordWatcher(sides.follower, "orders.json", LeaderOrders),
        RecordWatcher(sides.leader, "node-*.json", NodeReport),
    )
    wait_for(lambda: down.look() and up.look())
    orders.show(phase="run", members=("b",))
    wait_for(lambda: down.look()["orders.json"].phase == "run")
    told.show(state="running")
    wait_for(lambda: up.look()["node-1.json"].state == "running")
    told.stop()
    wait_for(lambda: not up.look())
    orders.stop()
    wait_for(lambda: not down.look())


def test_a_writer_that_says_nothing_more_is_silent_by_the_reader_s_clock(sides: Sides) -> None:
    now = [1000.0]
    watcher = RecordWatcher(sides.leader, "node-8.json", NodeReport, clock=lambda: now[0])
    sides.follower.write("node-8.json", report("node-8").model_dump_json().encode())
    wait_for(watcher.look)
    now[0] += SILENT_AFTER + 1
    assert watcher.look() == {}
    sides.follower.write("node-8.json", report("node-8", beat=2).model_dump_json().encode())
    wait_for(watcher.look)
    sides.follower.remove("node-8.json")
    wait_for(lambda: not watcher.look())


def test_what_is_no_record_is_not_taken_for_one(sides: Sides) -> None:
    watcher = RecordWatcher(sides.leader, "node-*.json", NodeReport)
    sides.follower.write("node-7.json", b'{"node": 3, "launch": []}')
    sides.follower.write("node-9.json", report("node-9").model_dump_json().encode())
    wait_for(watcher.look)
    assert [*watcher.look()] == ["node-9.json"]
    for name in ("node-7.json", "node-9.json"):
        sides.follower.remove(name)


def test_followers_are_gathered_in_the_order_of_their_names(sides: Sides) -> None:
    endpoint = sides.meeting.store.point if isinstance(sides.meeting, EndpointMeeting) else None
    place = NodePlace(3, 3, "node-0", "a:1:1", "a", 1, 60.0, endpoint=endpoint)
    leader = Leader(OwnNode(sides.paths, place, print), sides.meeting)
    there = [
        RecordPublisher(sides.follower, f"{node}.json", report(node, leader="a:1:1", attempt=4), print)
        for node in ("node-10", "node-9")
    ]
    assert leader.gather(4, lambda: False)
    assert leader.names == ("node-0", "node-9", "node-10")
    group = leader.group
    if sides.meeting.apart:
        assert group is not None
        assert (group.count, group.rank) == (3, 0)
        assert group.master.startswith("127.0.0.1:")
    else:
        assert group is None, "torchrun's own flags say it"
    for publisher in there:
        publisher.stop()
    leader._publisher.stop()


def test_a_stop_signal_that_a_lost_node_tells_late_stops_no_later_attempt(sides: Sides) -> None:
    """It was cut off and has ended since; the next launch there takes part."""
    endpoint = sides.meeting.store.point if isinstance(sides.meeting, EndpointMeeting) else None
    place = NodePlace(3, 3, "node-0", "a:1:1", "a", 1, 60.0, endpoint=endpoint)
    leader = Leader(OwnNode(sides.paths, place, print), sides.meeting)
    one = RecordPublisher(sides.follower, "node-71.json", report("node-71", leader="a:1:1", attempt=14), print)
    cut_off = RecordPublisher(sides.follower, "node-72.json", report("node-72", leader="a:1:1", attempt=14), print)
    assert leader.gather(14, lambda: False)
    cut_off.stop()
    one.show(state="ended", left=HostOutcome(status=1, guarded=False))
    wait_for(lambda: leader.move(1) == "settled" and leader._members()["node-72"] is None)
    assert leader.left(HostOutcome(status=1, guarded=False)).lost_nodes == ("node-72",)
    late = cut_off.record.model_copy(update={"state": "running", "signals": ("SIGTERM",)})
    sides.follower.write("node-72.json", late.model_dump_json().encode())
    wait_for(lambda: "node-72.json" in leader._watcher.look())
    one.show(state="ready", attempt=15, left=None)
    came: list[RecordPublisher[NodeReport]] = []

    def come() -> bool:
        if not came:
            came.append(
                RecordPublisher(sides.follower, "node-73.json", report("node-73", leader="a:1:1", attempt=15), print)
            )
        return False

    assert leader.gather(15, come), "the signal was for the launch that is over"
    assert leader.signals() == []
    for publisher in (one, *came):
        publisher.stop()
    sides.follower.remove("node-72.json")
    leader._publisher.stop()


def test_a_node_whose_supervisor_lost_the_leader_for_a_moment_has_left_the_attempt(sides: Sides) -> None:
    """It has ended its ranks and comes anew as the same launch, faster than two looks follow each other."""
    endpoint = sides.meeting.store.point if isinstance(sides.meeting, EndpointMeeting) else None
    place = NodePlace(2, 2, "node-0", "c:1:1", "c", 1, 60.0, endpoint=endpoint)
    leader = Leader(OwnNode(sides.paths, place, print), sides.meeting)
    node = RecordPublisher(sides.follower, "node-81.json", report("node-81", leader="c:1:1", attempt=24), print)
    assert leader.gather(24, lambda: False)
    node.show(state="running")
    wait_for(lambda: leader.move(None) == "wait" and leader._roster.reports["b:node-81"].state == "running")
    node.show(state="ended", attempt=-1)
    wait_for(lambda: leader.move(None) == "end")
    assert leader._publisher.record.phase == "end"
    assert leader.left(HostOutcome(status=-9)).lost_nodes == ("node-81",)
    node.show(state="ready", attempt=25)
    assert leader.gather(25, lambda: False)
    node.stop()
    leader._publisher.stop()


def test_of_what_strangers_say_in_the_store_nothing_counts_but_what_a_follower_may_say(
    stores: tuple[StoreTransport, StoreTransport],
) -> None:
    host, guest = stores
    lines = ["", "no json", "[]", "{}", json.dumps({"name": 1, "body": "x"}), json.dumps({"name": "node-1", "body": 2})]
    lines += [json.dumps({"name": name, "body": "{}"}) for name in ("orders.json", "../node-1.json", "node-1.json/..")]
    lines.append(json.dumps({"name": "node-5.json", "body": "x" * (LIMIT + 1)}))
    for line in lines:
        host._hear(line)
    # What another test has sent may still be on its way: only these names.
    assert not {"node-1", "node-1.json", "node-5.json", "orders.json", "../node-1.json", "node-1.json/.."} & {
        *host.read("*")
    }
    guest._hear(json.dumps({"name": "node-1.json", "body": "{}"}))
    assert "node-1.json" not in guest.read("node-*")
    with pytest.raises(OSError, match="too large"):
        host.write("orders.json", b"x" * (LIMIT + 1))


def test_what_a_host_said_before_it_came_anew_does_not_replace_what_it_says_now(
    stores: tuple[StoreTransport, StoreTransport],
) -> None:
    """A host that was cut off has a line under way, which arrives when the next launch has come there already."""
    host, before = stores
    anew = StoreTransport(MeetingPoint("127.0.0.1", before.point.port, False, "rollback/test"))
    try:
        wait_for(lambda: anew.role)
        for name, late in (("node-60.json", b"late"), ("node-61.json", b"")):
            before.write(name, b"old")
            wait_for(lambda: host.read(name) == {name: b"old"})  # noqa: B023 - called at once
            anew.write(name, b"new")
            wait_for(lambda: host.read(name) == {name: b"new"})  # noqa: B023
            before.write(name, late) if late else before.remove(name)
            before.write(f"part-{name}", b"behind it")
            wait_for(lambda: host.read(f"part-{name}"))  # noqa: B023
            assert host.read(name) == {name: b"new"}
        before.write("node-60.json", b"alive")  # as a second line that was sent later
        wait_for(lambda: host.read("node-60.json") == {"node-60.json": b"alive"})
        for name in ("node-60.json", "part-node-60.json", "part-node-61.json"):
            before.remove(name)
        anew.remove("node-61.json")
        wait_for(lambda: not host.read("*node-6?.json"))
    finally:
        anew.close()


class Cable:
    """A connection to a port, which can be cut: what is sent there then arrives when it is mended. Answers to what was
    sent before still come: whoever waits for one says nothing more."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._mended = threading.Event()
        self._mended.set()
        self.held = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_cut and not self._mended.is_set():
                    self.held += data
                    self._mended.wait()
                target.sendall(data)

    def cut(self) -> None:
        self._mended.clear()

    def mend(self) -> None:
        self._mended.set()

    def close(self) -> None:
        self.mend()
        self._listening.close()


def test_of_all_that_a_host_says_while_it_is_cut_off_one_line_arrives_late(
    stores: tuple[StoreTransport, StoreTransport],
) -> None:
    """It arrives behind what the host says on a new connection; of more, the second would be taken for news."""
    host, other = stores
    with contextlib.closing(Cable(other.point.port)) as cable:
        before = StoreTransport(MeetingPoint("127.0.0.1", cable.port, False, "rollback/test"))
        wait_for(lambda: before.role)
        before.write("node-62.json", b"old")
        wait_for(lambda: host.read("node-62.json"))
        cable.cut()
        before.write("part-node-62.json", b"under way")
        for _ in range(2):
            before.write("node-62.json", b"late")
        wait_for(lambda: b"under way" in cable.held)
        before.close()
        anew = StoreTransport(MeetingPoint("127.0.0.1", other.point.port, False, "rollback/test"))
        try:
            wait_for(lambda: anew.role)
            anew.write("node-62.json", b"new")
            wait_for(lambda: host.read("node-62.json") == {"node-62.json": b"new"})
            cable.mend()
            wait_for(lambda: host.read("part-node-62.json"))
            anew.write("part-node-63.json", b"behind it")
            wait_for(lambda: host.read("part-node-63.json"))
            assert host.read("node-62.json") == {"node-62.json": b"new"}
            for name in ("node-62.json", "part-node-62.json", "part-node-63.json"):
                anew.remove(name)
            wait_for(lambda: not host.read("*node-6?.json"))
        finally:
            anew.close()


def test_where_the_store_of_a_rendezvous_is() -> None:
    def point(**flags: str) -> tuple[str, int, bool | None] | None:
        found = place_among_nodes({"nnodes": "2", **{name.replace("_", "-"): flags[name] for name in flags}})
        assert found is not None
        return (found.endpoint.host, found.endpoint.port, found.endpoint.is_host) if found.endpoint else None

    assert point() is None
    assert point(rdzv_endpoint="h:7", node_rank="0") == ("h", 7, True)
    assert point(rdzv_endpoint="h:7", node_rank="3") == ("h", 7, False)
    assert point(master_addr="h", node_rank="1") == ("h", 29500, False)
    assert point(rdzv_backend="c10d", rdzv_endpoint="h") == ("h", 29400, None)
    assert point(rdzv_backend="c10d", rdzv_endpoint="[::1]:5", rdzv_conf="is_host=true") == ("::1", 5, True)
    assert point(rdzv_backend="etcd-v2", rdzv_endpoint="h:7") is None


def find_meeting(
    folder: Path,
    place: NodePlace,
    nothing_left: Callable[[], str | None] = lambda: None,
    *,
    received: Sequence[int] = (),
    again: bool = False,
) -> tuple[Meeting, bool] | RunResult:
    signals = cast("StopSignals", SimpleNamespace(received=received))
    own = OwnNode(RunPaths(folder), place, print, "s3://bucket/run")
    return meeting.find_meeting(own, signals, nothing_left, again=again)


@pytest.mark.parametrize(("timeout", "again"), [(600.0, True), (0.2, False)], ids=["left behind", "come late"])
def test_who_meets_nobody_since_the_run_is_complete_ends_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float, again: bool
) -> None:
    monkeypatch.setattr(meeting, "_LEFT_BEHIND", 0.2)
    place = place_among_nodes({"nnodes": "2", "node-rank": "1", "rdzv-endpoint": f"127.0.0.1:{free_port()}"}, timeout)
    assert place is not None
    answers = iter([None, "the run is complete"] if again else ["the run is complete"])
    found = find_meeting(tmp_path, place, lambda: next(answers), again=again)
    assert found == RunResult(exit_code=ExitCode.DONE, reason="the run is complete")


def test_who_meets_nobody_is_told_why_the_store_was_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SimpleNamespace(
        role=None, gone="connection refused", place="h:29500", close=lambda: None, renew=lambda: None
    )
    monkeypatch.setattr(meeting, "StoreTransport", lambda point: store)
    place = place_among_nodes({"nnodes": "2", "node-rank": "1", "rdzv-endpoint": "h:29500"}, timeout=0.2)
    assert place is not None
    with pytest.raises(NodesMissing, match=r"to h:29500 \(connection refused\) or to "):
        find_meeting(tmp_path, place)


def test_why_the_store_is_not_reached_is_said_once_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens there may take its time to say nothing."""
    monkeypatch.setattr(meeting, "_SAY_AFTER", -1.0)
    said: list[str] = []
    patience = meeting.Patience(60.0, said.append, lambda: None, again=False)
    for unreached in ("", "", "it is mute", "it is mute", "connection reset"):
        assert patience.result("h:29500", unreached, RunPaths(tmp_path)) is None
    assert [line.partition(", ")[0] for line in said] == [
        "waiting for other nodes: they meet at h:29500",
        "waiting for other nodes: they meet at h:29500 (it is mute)",
    ]


def test_where_no_process_can_be_started_for_the_store_that_is_told_with_what_to_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(store_processes.subprocess, "Popen", refuse)
    place = place_among_nodes({"nnodes": "2", "node-rank": "1", "rdzv-endpoint": "h:29500"}, timeout=0.2)
    assert place is not None
    with pytest.raises(NodesMissing, match=r"the store at h: Resource temporarily .*\n  hint: raise"):
        find_meeting(tmp_path, place)


def test_a_store_that_cannot_be_made_anew_at_present_is_told_once_and_again_when_it_is_there() -> None:
    store = SimpleNamespace(role="host", gone=None, place="h:29500", renew=lambda: None)
    meets = EndpointMeeting(store)  # type: ignore[arg-type]
    told = [meets.keep_up()]
    store.gone = "no descriptor is to be had"
    told += [meets.keep_up() for _ in range(3)]
    store.gone, store.role = None, None
    told += [meets.keep_up()]
    store.role = "host"
    told += [meets.keep_up() for _ in range(2)]
    lost, back = filter(None, told)
    assert "was lost (no descriptor is to be had)" in lost
    assert back == "the store at h:29500 is there again"


def test_a_store_that_is_lost_while_nobody_has_come_is_made_anew_with_the_orders_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StoreTransport] = []

    class Watched(StoreTransport):
        def __init__(self, point: MeetingPoint) -> None:
            super().__init__(point)
            made.append(self)

    monkeypatch.setattr(meeting, "StoreTransport", Watched)
    endpoint = f"127.0.0.1:{free_port()}"
    place = place_among_nodes({"nnodes": "2", "node-rank": "0", "rdzv-endpoint": endpoint})
    assert place is not None
    assert place.endpoint is not None
    found: list[tuple[Meeting, bool] | RunResult] = []
    received: list[int] = []
    waits = threading.Thread(target=lambda: found.append(find_meeting(tmp_path, place, received=received)), daemon=True)
    waits.start()
    wait_for(lambda: made and made[0].role == "host" and "orders.json" in made[0]._shown)
    (process,) = made[0].processes
    process.kill()
    guest = StoreTransport(replace(place.endpoint, is_host=False))
    try:
        wait_for(lambda: guest.gone is not None or guest.read("orders.json"))
        assert guest.gone is None
        guest.write("node-1.json", report("node-1", leader=place.launch).model_dump_json().encode())
        waits.join(LIMIT_OF_WAITS)
        assert isinstance(found[0], tuple)
        assert found[0][1] is True
    finally:
        received.append(15)  # ends what still waits
        waits.join(LIMIT_OF_WAITS)
        guest.close()
        for store in made:
            store.close()


def test_nodes_keep_their_order_however_many_there_are() -> None:
    assert sorted(["node-10", "node-9", "node-1", "node-b"], key=rank_by_name) == [
        "node-1",
        "node-9",
        "node-10",
        "node-b",
    ]


def skips(*batches: int, size: int = 1) -> str:
    """Lines of a skip record."""
    lines = [SkippedBatch(batch=one, epoch=0, offset=one, indices=[one] * size, timeline=0) for one in batches]
    return "".join(f"{line.model_dump_json()}\n" for line in lines)


def keeps(paths: RunPaths, said: list[str], last: int = 9999) -> RecordKeeper:
    """The leader's part, of a record by which the batches up to the last one are skipped."""
    journal = Journal(paths.train_journal, 1)
    journal.append(SkipAdded(window=Window(first=0, last=last), who="test", why="test"))
    journal.close()
    return RecordKeeper(paths, said.append)


def test_the_leader_keeps_the_small_files_of_a_follower_and_nothing_else(tmp_path: Path) -> None:
    here, there = RunPaths(tmp_path / "here"), RunPaths(tmp_path / "there")
    said: list[str] = []
    keeper, gatherer = keeps(here, said, last=2), RecordFiles(there, said.append)
    for name in ("failures/attempt-0001/rank-00003.json", "skips/rank-00003.jsonl", "ring/secret", "failures/x"):
        (there.root / name).parent.mkdir(parents=True, exist_ok=True)
        (there.root / name).write_text(skips(1))
    found = gatherer.new()
    assert [*found] == ["failures/attempt-0001/rank-00003.json", "skips/rank-00003.jsonl"]
    assert gatherer.new() == {}, "what has not changed is not sent again"
    keeper.keep("b:1", "node-1", {**found, "../outside": "x", "run.json": "x", "skips/../../x": "x"})
    kept = {path.relative_to(here.root).parts[0] for path in here.root.rglob("*") if path.is_file()}
    assert kept == {"failures", "skips", "journal"}
    keeper.keep("b:2", "node-1", {"skips/rank-00003.jsonl": skips(2)})
    assert here.skip_record(3).read_text() == skips(1, 2), "a new host has not what the old one had sent"
    there.stacks(1).mkdir(parents=True)
    there.rank_stacks(1, 3).write_text("x" * (1 << 19))
    assert gatherer.new() == {}
    assert said == []
    assert gatherer.all() == found, "nobody has said that it has arrived"
    assert said == [f"1 files of the record stay on this host, or lines of them, as {there.rank_stacks(1, 3)}"]


def test_what_a_follower_hands_over_while_it_runs_is_kept_at_once(
    stores: tuple[StoreTransport, StoreTransport], tmp_path: Path
) -> None:
    """Its host may be lost, and its disk with it."""
    host, guest = stores
    paths = RunPaths(tmp_path)
    place = NodePlace(2, 2, "node-0", "d:1:1", "d", 1, 60.0, endpoint=host.point)
    keeps(paths, [])
    leader = Leader(OwnNode(paths, place, print), EndpointMeeting(host))
    node = RecordPublisher(guest, "node-91.json", report("node-91", leader="d:1:1", attempt=34), print)
    assert leader.gather(34, lambda: False)
    node.show(state="running", files={"skips/rank-00003.jsonl": skips(1)})
    wait_for(lambda: leader.move(None) == "wait" and paths.skip_record(3).exists())
    assert paths.skip_record(3).read_text() == skips(1)
    node.stop()
    leader._publisher.stop()


def test_what_a_host_hands_over_that_was_taken_for_lost_is_kept_when_it_is_ready_again(
    stores: tuple[StoreTransport, StoreTransport], tmp_path: Path
) -> None:
    """It takes the order to begin for a word that all of it has arrived."""
    host, guest = stores
    paths = RunPaths(tmp_path)
    place = NodePlace(2, 2, "node-0", "e:1:1", "e", 1, 60.0, endpoint=host.point)
    keeps(paths, [])
    leader = Leader(OwnNode(paths, place, print), EndpointMeeting(host))
    node = RecordPublisher(guest, "node-92.json", report("node-92", leader="e:1:1", attempt=44), print)
    assert leader.gather(44, lambda: False)
    node.show(state="ended", attempt=-1)  # for a moment it saw no leader
    wait_for(lambda: leader.move(1) == "settled")
    assert leader.left(HostOutcome(status=1)).lost_nodes == ("node-92",)
    node.show(state="ready", attempt=45, files={"skips/rank-00003.jsonl": skips(1)})
    assert leader.gather(45, lambda: False)
    assert paths.skip_record(3).read_text() == skips(1)
    node.stop()
    leader._publisher.stop()


def test_a_file_that_cannot_be_kept_costs_no_other_one_and_is_told_of_once(tmp_path: Path) -> None:
    """A disk that is full stays so, and every few seconds there is something new to keep."""
    paths, said = RunPaths(tmp_path), list[str]()
    keeper = keeps(paths, said)
    paths.skip_record(3).mkdir(parents=True)
    for batch in (1, 2):
        given = {f"skips/rank-0000{rank}.jsonl": skips(batch) for rank in (3, 4)}
        keeper.keep("b:1", "node-1", given)
    assert paths.skip_record(4).read_text() == skips(1, 2)
    (told,) = said
    assert "rank-00003" in told
    paths.skip_record(3).rmdir()
    keeper.keep("b:1", "node-1", {"skips/rank-00003.jsonl": skips(3)})
    paths.skip_record(3).unlink()
    paths.skip_record(3).mkdir()
    keeper.keep("b:1", "node-1", {"skips/rank-00003.jsonl": skips(4)})
    assert said == [told, told.replace("2 files", "1 files")], "it was well in between"


def test_what_the_disk_refused_is_kept_once_it_can_be_and_the_skip_list_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The follower shows the same until the next attempt begins, and takes it as kept then."""
    paths, said, folds = RunPaths(tmp_path), list[str](), list[Path]()
    keeper, fold = keeps(paths, said), record_files.fold_journal
    monkeypatch.setattr(record_files, "fold_journal", lambda path: (folds.append(path), fold(path))[1])
    names = [f"skips/rank-0000{rank}.jsonl" for rank in range(4)]
    stacks = paths.rank_stacks(1, 3)
    stacks.mkdir(parents=True)
    given = {**dict.fromkeys(names, skips(1)), "stacks/attempt-0001/rank-00003.txt": "here"}
    keeper.keep("b:1", "node-1", given)
    assert (len(said), len(folds)) == (1, 1)
    stacks.rmdir()
    keeper.keep("b:1", "node-1", {**given})
    assert stacks.read_text() == "here"
    assert {paths.skip_record(rank).read_text() for rank in range(4)} == {skips(1)}
    keeper.keep("b:2", "node-1", {**given})
    assert (len(said), len(folds)) == (1, 1), "nothing is new"


def test_what_was_skipped_in_a_time_that_was_lost_with_another_leader_is_not_kept(tmp_path: Path) -> None:
    """An operator's skip, say, which was not in the bucket yet: those batches are trained now."""
    paths, said = RunPaths(tmp_path), list[str]()
    keeper = keeps(paths, said, last=4)
    keeper.keep("b:1", "node-1", {"skips/rank-00003.jsonl": skips(3, 7) + "no line of ours\n"})
    assert paths.skip_record(3).read_text() == skips(3)
    assert said == []


def test_files_that_are_handed_over_fit_into_the_record_whatever_is_in_them(tmp_path: Path) -> None:
    """What a crash leaves of a file may be zeros, which JSON writes as six characters each."""
    paths, said = RunPaths(tmp_path), list[str]()
    gatherer = RecordFiles(paths, said.append)
    paths.stacks(1).mkdir(parents=True)
    paths.rank_stacks(1, 2).write_text("x" * 1000)
    paths.rank_stacks(1, 3).write_bytes(bytes(200 << 10))
    found = gatherer.all()
    assert [*found] == ["stacks/attempt-0001/rank-00002.txt"]
    assert said == [f"1 files of the record stay on this host, or lines of them, as {paths.rank_stacks(1, 3)}"]


def test_of_skip_records_of_any_size_the_new_lines_are_handed_over(tmp_path: Path) -> None:
    here, there, said = RunPaths(tmp_path / "here"), RunPaths(tmp_path / "there"), list[str]()
    keeper, gatherer = keeps(here, said), RecordFiles(there, said.append)
    for first in range(0, 5000, 250):
        there.skip_record(3).parent.mkdir(parents=True, exist_ok=True)
        with there.skip_record(3).open("a") as file:
            file.write(skips(*range(first, first + 250), size=64) + '{"batch": 7, "ind')  # killed in a line
        keeper.keep("b:1", "node-1", gatherer.all())
        gatherer.arrived()
        LineWriter(there.skip_record(3)).close()  # as the next one begins
    assert here.skip_record(3).read_text() == skips(*range(5000), size=64)
    keeper.keep("b:2", "node-1", RecordFiles(there, said.append).new())  # by another supervisor
    assert here.skip_record(3).read_text() == skips(*range(5000), size=64)
    assert said == []


def test_lines_that_are_too_many_for_one_record_come_with_the_next_ones_and_are_not_said_to_stay(
    tmp_path: Path,
) -> None:
    here, there, said = RunPaths(tmp_path / "here"), RunPaths(tmp_path / "there"), list[str]()
    keeper, gatherer = keeps(here, said), RecordFiles(there, said.append)
    there.skip_record(3).parent.mkdir(parents=True)
    lines = skips(*range(1000), size=64)
    there.skip_record(3).write_text(lines)
    while given := gatherer.new():
        keeper.keep("b:1", "node-1", given)
    assert here.skip_record(3).read_text() == lines
    assert lines.endswith(gatherer.all()["skips/rank-00003.jsonl"])
    assert said == []


def test_lines_of_many_ranks_all_come_and_share_the_room(tmp_path: Path) -> None:
    paths, said, handed_over = RunPaths(tmp_path), list[str](), dict[str, str]()
    paths.skip_record(0).parent.mkdir()
    lines = skips(*range(300), size=64)
    for rank in range(16):
        paths.skip_record(rank).write_text(lines)
    gatherer = RecordFiles(paths, said.append)
    while given := gatherer.new():
        handed_over = {name: handed_over.get(name, "") + given.get(name, "") for name in {**handed_over, **given}}
    assert [*handed_over.values()] == [lines] * 16
    assert len(gatherer.all()) == 16
    assert said == [], "all of them were in a call"
    assert len(RecordFiles(paths, said.append).all()) == 16
    assert len(said) == 1


def test_a_line_that_fits_into_no_record_is_told_to_stay(tmp_path: Path) -> None:
    paths, said = RunPaths(tmp_path), list[str]()
    paths.skip_record(3).parent.mkdir()
    paths.skip_record(3).write_text(skips(1, size=1 << 18))
    gatherer = RecordFiles(paths, said.append)
    assert (gatherer.new(), gatherer.all()) == ({}, {})
    gatherer.arrived()
    assert gatherer.handed_over == HandedOver()
    assert said == [f"1 files of the record stay on this host, or lines of them, as {paths.skip_record(3)}"]


def test_lines_that_no_record_had_room_for_are_handed_over_by_the_next_supervisor(tmp_path: Path) -> None:
    paths, said = RunPaths(tmp_path), list[str]()
    paths.skip_record(3).parent.mkdir()
    for rank in (3, 4):
        paths.skip_record(rank).write_text(skips(1, size=40 << 10))
    os.utime(paths.skip_record(3), (1, 1))
    files = RecordFiles(paths, said.append)
    assert [*files.all()] == ["skips/rank-00004.jsonl"]
    assert said == [f"1 files of the record stay on this host, or lines of them, as {paths.skip_record(3)}"]
    files.arrived()
    write_record_location(paths, "head", "/data/run", said.append, has=files.handed_over)
    os.utime(paths.skip_record(4), (2, 2))
    assert [*RecordFiles(paths, said.append).all()] == ["skips/rank-00003.jsonl"]


def test_a_directory_that_cannot_be_listed_is_told_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, said, glob = RunPaths(tmp_path), list[str](), Path.glob
    paths.rank_stacks(1, 3).parent.mkdir(parents=True)
    paths.rank_stacks(1, 3).write_text("here")
    paths.skip_record(3).parent.mkdir()

    def of_a_failing_disk(path: Path, pattern: str) -> Iterator[Path]:
        if pattern.startswith("skips"):
            raise OSError(errno.EIO, "Input/output error")
        return glob(path, pattern)

    monkeypatch.setattr(Path, "glob", of_a_failing_disk)
    assert [*RecordFiles(paths, said.append).all()] == ["stacks/attempt-0001/rank-00003.txt"]
    assert said == [f"1 files of the record stay on this host, or lines of them, as {paths.root / 'skips'}"]


@pytest.mark.parametrize("arrived", [True, False])
def test_lines_that_have_arrived_are_not_said_to_stay_by_another_supervisor(tmp_path: Path, arrived: bool) -> None:
    """The last ones go to its leader once more; there are more of them than one record takes."""
    paths, said = RunPaths(tmp_path), list[str]()
    paths.skip_record(3).parent.mkdir()
    paths.skip_record(3).write_text(skips(*range(300), size=64))
    files = RecordFiles(paths, said.append)
    assert files.all()
    files.arrived()
    write_record_location(paths, "head", "/data/run", said.append, has=files.handed_over if arrived else HandedOver())
    with paths.skip_record(3).open("a") as file:
        file.write(skips(*range(300, 600), size=64))
    assert said == []
    told = RecordFiles(paths, said.append).all()["skips/rank-00003.jsonl"]
    assert told.endswith(skips(599, size=64))
    assert bool(said) is not arrived


def test_what_has_not_arrived_is_handed_over_again_also_by_another_supervisor(tmp_path: Path) -> None:
    """The leader, or the supervisor here, may be gone when an attempt ends; or the leader's host, before the bucket has
    what it was told."""
    paths, said = RunPaths(tmp_path), list[str]()
    paths.skip_record(3).parent.mkdir()
    paths.skip_record(3).write_text(skips(1))
    minute = 60 * 10**9

    def so_long_ago(path: Path, nanoseconds: int) -> None:
        os.utime(path, ns=(paths.root.stat().st_mtime_ns - nanoseconds,) * 2)

    so_long_ago(paths.skip_record(3), 2 * minute)
    files = RecordFiles(paths, said.append)
    assert [*files.new()] == ["skips/rank-00003.jsonl"]
    write_record_location(paths, "head", "/data/run", said.append, has=files.handed_over)
    files = RecordFiles(paths, said.append)
    assert [*files.new()] == ["skips/rank-00003.jsonl"], "nobody has said that it has arrived"
    paths.stacks(2).mkdir(parents=True)
    paths.rank_stacks(2, 3).write_text("here\n")
    assert [*files.new()] == ["stacks/attempt-0002/rank-00003.txt"]
    files.arrived()
    assert files.all() == {}
    write_record_location(paths, "head", "/data/run", said.append, has=files.handed_over)
    files = RecordFiles(paths, said.append)
    assert [*files.new()] == ["stacks/attempt-0002/rank-00003.txt"], "it may be lost with that leader"
    with paths.skip_record(3).open("a") as file:
        file.write(skips(2))
    assert files.new() == {"skips/rank-00003.jsonl": skips(2)}
    assert said == []


def test_a_directory_without_the_record_says_where_the_record_is(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.identity.write_text("{}")
    write_record_location(paths, "head", "/data/run", print)
    with pytest.raises(RunDirectoryError, match="its record is on head, in /data/run"):
        require_run_directory(tmp_path)


def test_an_old_record_of_a_host_that_follows_by_now_is_not_taken_for_the_record(tmp_path: Path) -> None:
    """It led before: what is read there, and asked for there, would be of a run that has gone on elsewhere."""
    paths = RunPaths(tmp_path)
    paths.train_journal.parent.mkdir()
    paths.train_journal.write_text("")
    os.utime(paths.train_journal, (1, 1))
    write_record_location(paths, "head", "/data/run", print)
    with pytest.raises(RunDirectoryError, match="its record is on head, in /data/run"):
        require_run_directory(tmp_path)
    os.utime(paths.record_location, (0, 0))  # it was trained there later, as by torchrun
    assert require_run_directory(tmp_path).root == tmp_path
