"""Orders that come late, or from one that leads no more."""

import contextlib
import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.errors import ExitCode, NodesMissing, RollbackError, RunDirectoryError, UsageError
from rollback.rundir.heartbeats import Heartbeat
from rollback.rundir.host_records import RecordPublisher, RecordWatcher, SharedDirectory, read_in_place, write_in_place
from rollback.rundir.lock import RunLock, read_holder
from rollback.rundir.paths import RunPaths
from rollback.rundir.record_location import read_record_location
from rollback.supervisor import hang_watch
from rollback.supervisor.attempts import Attempts
from rollback.supervisor.claim import read_past
from rollback.supervisor.diagnosis.hang import HangLimits
from rollback.supervisor.diagnosis.outcome import HostOutcome
from rollback.supervisor.journal import SupervisorJournal
from rollback.supervisor.nodes import follow
from rollback.supervisor.nodes.follow import Follower
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import SharedMeeting
from rollback.supervisor.nodes.membership import NodePlace, OwnNode, place_among_nodes
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport, RunResult, leaders_move, merged
from rollback.supervisor.signals import StopSignals

OTHER = LeaderOrders(leader="b:2:1.0", host="b", pid=2, phase="run", attempt=2)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def place(spares: int = 0) -> NodePlace:
    found = place_among_nodes({"nnodes": "2", "node-rank": "0", "local-addr": "127.0.0.1"}, spares=spares)
    assert found is not None
    return found


def say_as(orders: LeaderOrders, paths: RunPaths) -> None:
    write_in_place(paths.orders, orders.model_dump_json().encode())


def hold_as(orders: LeaderOrders, paths: RunPaths) -> None:
    host, pid, start = orders.leader.split(":")
    paths.holder.write_text(json.dumps({"host": host, "pid": int(pid), "start": start}))


def test_who_holds_the_lock_leads_on_and_who_has_lost_it_leaves_all_to_the_other(paths: RunPaths) -> None:
    lock = RunLock(paths, "rollback launch")
    leader = Leader(OwnNode(paths, place(), print), SharedMeeting(paths, 2))
    say_as(OTHER, paths)
    assert leader.move(None) == "wait", "what another one says late is passed over"
    hold_as(OTHER, paths)

    def look() -> None:
        for _ in range(1000):  # its own orders come in between
            say_as(OTHER, paths)
            leader.move(None)

    with pytest.raises(RunDirectoryError, match=r"b \(pid 2\) leads this run now"):
        look()
    leader.farewell(RunResult(exit_code=74, reason="overtaken"))
    assert LeaderOrders.model_validate_json(read_in_place(paths.orders)).phase != "over"
    lock.release()
    assert read_holder(paths) == {"host": "b", "pid": 2, "start": "1.0"}


def test_what_an_earlier_launch_of_the_same_host_and_pid_said_is_not_taken_for_the_leader_s(paths: RunPaths) -> None:
    """In containers pids repeat. Its last word was that the run is over."""
    lock = RunLock(paths, "rollback launch")
    own = place()
    before = LeaderOrders(leader=f"{own.host}:{own.pid}:0@of-another-boot", host=own.host, pid=own.pid, phase="over")
    meeting = SharedMeeting(paths, 2)
    assert not meeting.is_led_by(before)
    assert meeting.is_led_by(LeaderOrders(leader=own.launch, host=own.host, pid=own.pid))
    lock.release()


def test_a_stop_signal_on_another_node_is_heard_at_once_between_two_attempts(paths: RunPaths) -> None:
    """The next one may be a minute away, and whoever has signalled does not wait so long before it kills."""
    leader = Leader(OwnNode(paths, place(), print), SharedMeeting(paths, 2))
    told = NodeReport(node="node-1", launch="b:1:1.0", host="b", pid=1, leader=place().launch, signals=("SIGTERM",))
    order, own_journal = SimpleNamespace(paths=paths), SupervisorJournal(paths, print)
    attempts = Attempts(order, print, SimpleNamespace(), own_journal, StopSignals(), leader, lambda: None)  # type: ignore[arg-type]
    write_in_place(paths.node("node-1"), told.model_dump_json().encode())
    assert attempts._stopped_while_waiting(5.0)
    paths.node("node-1").unlink()
    leader.farewell(RunResult(exit_code=75, reason="told to stop"))


def test_a_run_directory_whose_name_is_no_utf_8_is_told_to_the_others(tmp_path: Path) -> None:
    """For people: no host opens another one's."""
    paths = RunPaths(tmp_path / os.fsdecode(b"caf\xe9"))
    leader = Leader(OwnNode(paths, place(), print), SharedMeeting(paths, 2))
    told = RecordWatcher(SharedDirectory(paths.nodes), "orders.json", LeaderOrders).look()["orders.json"]
    assert told.directory == f"{tmp_path}/caf\\udce9"
    leader.farewell(RunResult(exit_code=0, reason="done"))


@pytest.mark.parametrize(("hosts", "lag"), [(2, 1.0), (1600, 8.0 + 6.15)])
def test_heartbeats_of_other_nodes_may_be_as_old_as_what_is_heard_of_them(
    paths: RunPaths, hosts: int, lag: float
) -> None:
    leader, running = Leader(OwnNode(paths, place(), print), SharedMeeting(paths, hosts)), SimpleNamespace()
    watcher = hang_watch.HangWatcher(paths, HangLimits(), running, leader)  # type: ignore[arg-type]
    assert watcher._detector.lag == pytest.approx(lag)
    leader.farewell(RunResult(exit_code=0, reason="done"))


def test_a_hang_of_another_node_s_ranks_is_seen_where_the_leader_s_own_have_ended(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind torchrun's exit barrier, in which it waits five minutes for the others and no longer."""
    leader, until = Leader(OwnNode(paths, place(), print), SharedMeeting(paths, 2)), time.monotonic() + 20
    beat = Heartbeat(attempt=1, step=9, batch=9, doing="ended", monotonic=1.0, pid=1, host="b", start="1")
    report = NodeReport(
        node="node-1", launch="b:1:1.0", host="b", pid=1, leader=place().launch, attempt=1, beats={1: beat}, stacks=()
    )

    def say(**more: object) -> None:
        write_in_place(paths.node("node-1"), report.model_copy(update=more).model_dump_json().encode())

    def end() -> None:
        Leader.end(leader)
        say(state="ended", left=HostOutcome(status=-9))

    def poll() -> int:
        assert time.monotonic() < until, "nobody ends it"
        return 0

    monkeypatch.setattr(hang_watch, "_EVERY", 0.0)
    monkeypatch.setattr(leader, "end", end)
    say()
    assert leader.gather(1, lambda: False)
    say(state="running")
    running = SimpleNamespace(
        attempt=1, poll=poll, beats=dict, beats_in_memory=dict, look=dict, computing=set, take_stacks=tuple,
        await_end=time.sleep,
    )  # fmt: skip
    order = SimpleNamespace(paths=paths, hang=HangLimits(after=0.3), grace=60.0, restart_budget=1)
    attempts = Attempts(
        order, print, SimpleNamespace(), SupervisorJournal(paths, print), StopSignals(), leader, lambda: None
    )  # type: ignore[arg-type]
    status, hung = attempts._watch(running)  # type: ignore[arg-type]
    assert (status, hung and hung.kind, leader._publisher.record.phase) == (0, "hung", "end")
    left = leader.left(HostOutcome(status=0))
    assert left.status == -9, "the attempt has failed"
    paths.node("node-1").unlink()
    leader.farewell(RunResult(exit_code=1, reason="hung"))


def refuse_to_look_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file server that is away for a moment."""
    look = os.stat

    def refused(found: Any, *more: Any, **how: Any) -> os.stat_result:
        if found == path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return look(found, *more, **how)

    monkeypatch.setattr(os, "stat", refused)


class Following:
    """A follower in a thread, of a leader that is the publisher of its orders."""

    def __init__(self, paths: RunPaths, ring: str | None = None, spares: int = 0) -> None:
        self.paths, self.place, self.asked, self.looks = paths, place(spares), list[str](), 0
        self.told: list[str] = []
        own = LeaderOrders(leader="a:1:1.0", host="a", pid=1, attempt=1)
        self.leads = RecordPublisher(SharedDirectory(paths.nodes), "orders.json", own, lambda line: None)
        hold_as(own, paths)
        meeting, asked = SharedMeeting(paths, 2), self.asked

        class Watched:
            apart, transport = ring is not None, meeting.transport
            is_leaderless = staticmethod(self._is_leaderless)

            @staticmethod
            def is_led_by(orders: LeaderOrders) -> bool:
                asked.append(orders.leader)
                return meeting.is_led_by(orders)

        self.host = host = SimpleNamespace(end_leftovers=lambda say: None, keep_standby=lambda attempt: None)
        self.signals = SimpleNamespace(received=[], insistent=False)
        self.signals.take = lambda: self.signals.received
        own_node = OwnNode(paths, self.place, self.told.append, ring)
        follower = Follower(own_node, host, 1.0, self.signals, Watched())  # type: ignore[arg-type]
        self.found: list[RunResult | None] = []
        self.thread = threading.Thread(target=lambda: self.found.append(follower.follow()), daemon=True)
        self.thread.start()
        self.until(lambda: self.report is not None and self.report.state == "ready")

    def _is_leaderless(self) -> bool:
        self.looks += 1
        return False

    @property
    def report(self) -> NodeReport | None:
        with contextlib.suppress(FileNotFoundError, ValueError):  # it is being written
            return NodeReport.model_validate_json(read_in_place(self.paths.node("node-0")))
        return None

    def until(self, condition: Callable[[], object], act: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            act()

    def end(self) -> list[str | None]:
        """Returns how the run ended, as the follower knows it."""
        self.leads.show(phase="over", result=RunResult(exit_code=0, reason="done"))
        self.thread.join(60)
        self.leads.stop()
        return [result and result.reason for result in self.found]


@pytest.fixture
def following(paths: RunPaths) -> Iterator[Following]:
    following = Following(paths)
    yield following
    following.end()


def test_a_follower_goes_on_while_one_that_led_before_says_what_it_had_to_say(following: Following) -> None:
    following.until(
        lambda: OTHER.leader in following.asked or not following.thread.is_alive(),
        lambda: say_as(OTHER, following.paths),
    )
    assert following.end() == ["done"]


def test_how_long_who_leads_was_silent_is_told_as_it_was_waited_for(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an endpoint, and from the beginning: as where it is of a version whose orders this one does not read."""
    monkeypatch.setattr(follow, "_INTRODUCTION", 2.0)
    meeting = SimpleNamespace(
        apart=True, transport=SharedDirectory(paths.nodes), words="the store", is_leaderless=lambda: False
    )
    follower = Follower(OwnNode(paths, place(), print), SimpleNamespace(), 1.0, StopSignals(), meeting)  # type: ignore[arg-type]
    with pytest.raises(NodesMissing, match="whoever leads has been silent for 2 s, and still holds the store"):
        follower.follow()


def test_where_no_thread_can_hand_over_what_is_new_in_the_record_the_ranks_train_on(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the attempt is over. This host has raised nothing that would be worth an attempt of all."""

    def refused(*_: object) -> None:
        raise RollbackError("starting a thread: there is no room")

    monkeypatch.setattr(follow, "handing_over", refused)
    own, said = place(), list[str]()
    meeting = SimpleNamespace(
        apart=True, transport=SharedDirectory(paths.nodes), is_led_by=lambda orders: True, is_leaderless=lambda: False
    )
    host = SimpleNamespace(output=SimpleNamespace(keep=lambda: None), keep_standby=lambda attempt: None, guarded=True)
    own_node = OwnNode(paths, own, said.append, "s3://b/run")
    follower = Follower(own_node, host, 1.0, StopSignals(), meeting)  # type: ignore[arg-type]
    follower._last = orders = LeaderOrders(
        leader="a:1:1.0", host="a", pid=1, attempt=1, phase="run", members=(own.launch,), attached=True
    )
    SharedDirectory(paths.nodes).write("orders.json", orders.model_dump_json().encode())
    ends = iter([None, None, 0])
    waited = list[float]()  # until torchrun has ended, at the longest: it is heard of at once
    running = SimpleNamespace(attempt=1, poll=lambda: next(ends), look=dict, beats=dict, await_end=waited.append)
    report = NodeReport(node=own.name, launch=own.launch, host=own.host, pid=own.pid)
    publisher = SimpleNamespace(record=report, show=lambda **changes: None)
    with contextlib.ExitStack() as until_over:
        assert follower._watch(running, publisher, until_over) == 0  # type: ignore[arg-type]
    assert said == ["node-0 hands over nothing of the record meanwhile: starting a thread: there is no room"]
    assert waited == [0.1, 0.1]


def test_a_host_that_waited_removes_nothing_where_the_disk_does_not_say_whether_a_rank_has_run_there(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what the disk refuses at the end how it ended."""
    meeting = SimpleNamespace(apart=True, transport=SharedDirectory(paths.nodes))
    follower = Follower(OwnNode(paths, place(), print), SimpleNamespace(), 1.0, StopSignals(), meeting)  # type: ignore[arg-type]
    kept = paths.checkpoint("c000001-s00000001")
    kept.mkdir(parents=True)
    refuse_to_look_at(paths.identity, monkeypatch)
    follower._ahead = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    follower._end_waiting(over=True)
    assert kept.is_dir()


def test_a_host_of_another_job_at_the_same_endpoint_says_nothing_to_its_leader(paths: RunPaths) -> None:
    """By the name of its node it would take the place of one that trains. A slash behind the URL makes no other job."""
    meeting = SimpleNamespace(
        apart=True, transport=SharedDirectory(paths.nodes), words="the store at h:1", is_led_by=lambda orders: True
    )
    leader = Leader(OwnNode(paths, place(), print, "s3://b/run"), meeting)  # type: ignore[arg-type]
    own_nodes = (OwnNode(paths, place(), print, ring) for ring in ("s3://b/other", "s3://b/run/"))
    other, same = (Follower(own, SimpleNamespace(), 1.0, StopSignals(), meeting) for own in own_nodes)  # type: ignore[arg-type]
    try:
        with pytest.raises(UsageError, match="the store at h:1, and its job has --ring s3://b/run where this one has"):
            other.follow()
        same._require_same_ring(leader._publisher.record)
        assert not paths.node(place().name).exists()
    finally:
        leader._publisher.stop()


@pytest.mark.parametrize("phase", ["end", "stop"])
def test_who_hears_of_an_attempt_when_it_is_to_end_begins_nothing_and_holds_nobody_up(
    following: Following, phase: str
) -> None:
    """The leader's own ranks have failed, or it was told to stop, before this host has read that it may start."""
    following.leads.show(phase=phase, members=("a:1:1.0", following.place.launch))
    ended: list[NodeReport] = []
    following.until(
        lambda: ended,
        lambda: ended.extend(
            report for report in (following.report,) if report is not None and report.state == "ended"
        ),
    )
    assert leaders_move(1, {following.place.launch: ended[0]}) == "settled"
    left = merged(HostOutcome(status=1, guarded=False), {"node-0": ended[0].left})
    assert (left.status, left.guarded, left.lost_nodes) == (1, False, ()), "nothing ran here, and it is not lost"


def test_a_node_that_comes_back_during_an_attempt_waits_for_the_next_one_and_is_no_spare(paths: RunPaths) -> None:
    """As where its supervisor alone was killed. The job has no spare nodes."""
    following = Following(paths, ring=f"file://{paths.root.parent}/bucket")
    following.leads.show(phase="run", members=("a:1:1.0", "somebody else"), directory="/there/run")
    following.until(lambda: any("is fetched ahead" in line for line in following.told))
    assert read_record_location(paths) == ("a", "/there/run"), "who asks here is told where the run is"
    paths.frozen.mkdir()  # fetched with the checkpoint
    read_past(paths)  # where its leader is lost, or it is killed, this node begins anew with what it has fetched
    assert following.end() == ["done"]
    assert not paths.record_location.exists(), "nothing of the run has been here"
    assert not any("as a spare" in line for line in following.told), following.told


def test_a_spare_that_cannot_take_part_says_so_where_it_was_started(paths: RunPaths) -> None:
    following = Following(paths)
    following.leads.show(phase="run", members=("a:1:1.0", "somebody else"), unfit={following.place.name: "script"})
    told = f"{following.place.name} cannot take part: it has other script than a, which leads"
    following.until(lambda: any(line.startswith(told) for line in following.told))
    assert following.end() == ["done"]
    assert sum(line.startswith(told) for line in following.told) == 1


def test_what_is_handed_over_is_shown_until_the_leader_orders_to_begin(paths: RunPaths) -> None:
    """Where the leader took this host for lost at an attempt's end, it did not hear of that end."""
    following = Following(paths, ring=f"file://{paths.root.parent}/bucket")
    evidence, files_of_running = paths.failure(1, 0), list[dict[str, str] | None]()

    @contextlib.contextmanager
    def attempt(number: int, group: object) -> Iterator[SimpleNamespace]:
        if number == 1:
            evidence.parent.mkdir(parents=True)
            evidence.write_text("{}")
        files_of_running.append(following.report and following.report.files)
        yield SimpleNamespace(attempt=number, poll=lambda: 1, beats=dict)

    following.host.attempt, following.host.left = attempt, lambda status, running: HostOutcome(status=status)
    following.host.output = SimpleNamespace(release=lambda: None)

    def handed_over(state: str, number: int) -> bool:
        found = following.report
        return found is not None and (found.state, found.attempt) == (state, number) and bool(found.files)

    members = ("a:1:1.0", following.place.launch)
    following.leads.show(phase="run", members=members)
    following.until(lambda: handed_over("ended", 1))
    following.leads.show(phase="gather", attempt=2, members=())
    following.until(lambda: handed_over("ready", 2))
    following.leads.show(phase="run", members=members)
    following.until(lambda: following.report is not None and following.report.state == "ended")
    assert following.report is not None
    assert following.report.files == {}, "it has arrived"
    assert files_of_running[1:] == [{}], "what has arrived is not shown all the time"
    assert following.end() == ["done"]


@pytest.mark.parametrize("phase", ["run", "stop", "end", "gather"])
def test_a_node_without_a_seat_that_is_told_to_stop_goes_and_the_others_do_not_hear_of_it(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    """As where a scheduler takes the host of a spare back. A stop signal that it tells would stop the whole job, also
    between two attempts: the next one begins without it."""
    shown_at_last: list[NodeReport | None] = []
    close = follow.ShardCopier.close

    def closes(copier: follow.ShardCopier, **how: Any) -> None:
        shown_at_last.append(following.report)
        close(copier, **how)

    monkeypatch.setattr(follow.ShardCopier, "close", closes)
    following = Following(paths, spares=1)
    members = ("a:1:1.0", "somebody else")
    following.leads.show(phase="run" if phase == "gather" else phase, members=members)
    looks = following.looks
    following.until(lambda: following.looks > looks + 1)  # it has read that
    if phase == "gather":
        following.leads.show(phase=phase, attempt=2, members=())
        following.until(lambda: following.report is not None and following.report.attempt == 2)
    following.signals.received.append(signal.SIGTERM)
    told: list[NodeReport] = []
    following.until(
        lambda: following.found or told,
        lambda: told.extend(report for report in (following.report,) if report is not None and report.signals),
    )
    assert not told
    (result,) = following.found
    assert result is not None
    assert result.exit_code == ExitCode.RESUMABLE
    others = {"gather": "the others begin the next attempt once enough of them are there"}
    what = others.get(phase, "the others go on without it")
    assert result.reason == f"told to stop while node-0 waited without a seat: {what}"
    following.thread.join(60)
    assert shown_at_last == [None], "nobody counts with it any more, from before its end takes time"
