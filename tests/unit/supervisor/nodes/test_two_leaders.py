"""A host that led was cut off from the shared directory, and another one leads when it is back."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollback.errors import RunDirectoryError
from rollback.rundir.beacon import Beacon, SharedDirectory, read_in_place, write_in_place
from rollback.rundir.lock import RunLock, read_holder
from rollback.rundir.paths import RunPaths
from rollback.supervisor.nodes.follow import Follower
from rollback.supervisor.nodes.lead import Leader
from rollback.supervisor.nodes.meeting import SharedMeeting
from rollback.supervisor.nodes.membership import NodePlace, place_among_nodes
from rollback.supervisor.nodes.protocol import NodeReport, Orders, RunResult

OTHER = Orders(leader="b:2:1.0", host="b", pid=2, phase="run", attempt=2)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


def place() -> NodePlace:
    found = place_among_nodes({"nnodes": "2", "node-rank": "0", "local-addr": "127.0.0.1"})
    assert found is not None
    return found


def say_as(orders: Orders, paths: RunPaths) -> None:
    write_in_place(paths.orders, orders.model_dump_json().encode())


def hold_as(orders: Orders, paths: RunPaths) -> None:
    paths.holder.write_text(json.dumps({"host": orders.host, "pid": orders.pid}))


def test_who_holds_the_lock_leads_on_and_who_has_lost_it_leaves_all_to_the_other(paths: RunPaths) -> None:
    lock = RunLock(paths, "rollback launch")
    leader = Leader(paths, place(), lambda line: None, SharedMeeting(paths, 2))
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
    assert Orders.model_validate_json(read_in_place(paths.orders)).phase != "over"
    lock.release()
    assert read_holder(paths) == {"host": "b", "pid": 2}


def test_a_follower_goes_on_while_one_that_led_before_says_what_it_had_to_say(paths: RunPaths) -> None:
    own = Orders(leader="a:1:1.0", host="a", pid=1, attempt=1)
    leads = Beacon(SharedDirectory(paths.nodes), "orders.json", own, lambda line: None)
    hold_as(own, paths)
    asked: list[str] = []

    class Meeting(SharedMeeting):
        def is_led_by(self, orders: Orders) -> bool:
            asked.append(orders.leader)
            return super().is_led_by(orders)

        def is_leaderless(self) -> bool:
            return False

    host = SimpleNamespace(end_leftovers=lambda say: None)
    signals = SimpleNamespace(received=[], take=list, insistent=False)
    follower = Follower(paths, place(), host, 1.0, signals, lambda line: None, Meeting(paths, 2))  # type: ignore[arg-type]
    found: list[RunResult | None] = []
    thread = threading.Thread(target=lambda: found.append(follower.follow()), daemon=True)
    thread.start()
    until = time.monotonic() + 60

    def ready() -> bool:
        told = paths.node("node-0")
        return told.exists() and NodeReport.model_validate_json(read_in_place(told)).state == "ready"

    try:
        while not ready():
            assert time.monotonic() < until
        while OTHER.leader not in asked and thread.is_alive():
            assert time.monotonic() < until
            say_as(OTHER, paths)
    finally:
        leads.show(phase="over", verdict=RunResult(exit_code=0, reason="done"))
        thread.join(60)
        leads.put_out()
    assert [result and result.reason for result in found] == ["done"]
