"""What thousands of hosts do to the directory that they share: visits of files are counted, on a clock of our own."""

import subprocess
from pathlib import Path

import pytest

from rollback.rundir import host_records
from rollback.rundir.heartbeat_board import HeartbeatBoard, HeartbeatCell
from rollback.rundir.heartbeats import Heartbeat, write_heartbeat
from rollback.rundir.host_records import SILENT_AFTER, RecordWatcher, SharedDirectory, write_in_place
from rollback.rundir.paths import RunPaths
from rollback.supervisor.nodes.meeting import ORDERS, REPORTS, SharedMeeting
from rollback.supervisor.nodes.protocol import LeaderOrders, NodeReport
from rollback.supervisor.torchrun.host import Running
from rollback.supervisor.torchrun.processes import THIS_HOST
from rollback.train.process.heartbeat import seconds_between_files

HOSTS, RANKS = 2048, 16_384
SECONDS = 60


class Clock:
    """Time that passes when it is told to, for the shared directory."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host_records, "time", made)
    return made


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read from now on."""
    found: list[Path] = []
    really = host_records.read_in_place

    def note(path: Path) -> bytes:
        found.append(path)
        return really(path)

    monkeypatch.setattr(host_records, "read_in_place", note)
    return found


def report(number: int) -> NodeReport:
    return NodeReport(node=f"node-{number}", launch=f"h{number}:1", host=f"h{number}", pid=1)


def looks(directory: Path, pattern: str, hosts: int, clock: Clock, visits: list[Path]) -> float:
    """Files that one supervisor reads in a second. It looks more often than it may read."""
    model = LeaderOrders if pattern == ORDERS else NodeReport
    watcher: RecordWatcher[LeaderOrders | NodeReport] = RecordWatcher(
        SharedDirectory(directory, hosts), pattern, model, clock=clock.monotonic
    )
    visits.clear()
    for _ in range(SECONDS * 2):
        assert watcher.look()
        clock.now += 0.5
    return len(visits) / SECONDS


def test_sixteen_thousand_ranks_on_two_thousand_hosts_visit_less_than_a_thousand_files_a_second(
    tmp_path: Path, clock: Clock, visits: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_records, "SILENT_AFTER", 10.0 * SECONDS)  # the records do not change in this test
    paths = RunPaths(tmp_path)
    paths.nodes.mkdir()
    write_in_place(paths.orders, LeaderOrders(leader="a", host="a", pid=1).model_dump_json().encode())
    for number in range(HOSTS):
        body = report(number).model_dump_json().encode()
        paths.node(f"node-{number}").write_bytes(body + b"\n" + _hash(body) + b"\n")
    leader = looks(paths.nodes, REPORTS, HOSTS, clock, visits)
    followers = looks(paths.nodes, ORDERS, HOSTS, clock, visits) * HOSTS
    meeting = SharedMeeting(paths, HOSTS)
    signs, locks = HOSTS / meeting.transport.every, HOSTS / meeting._lock_every
    heartbeats = 2 * RANKS / seconds_between_files(RANKS)  # a new file, and a rename
    helpers = HOSTS / (3 * meeting.transport.pace)  # each reads which checkpoint is wanted
    assert leader + followers + signs + locks + heartbeats + helpers <= 1000


def _hash(body: bytes) -> bytes:
    return host_records.xxhash.xxh3_128_hexdigest(body).encode()


@pytest.mark.parametrize("hosts", [1, 8, 24, 2048, 100_000])
def test_nobody_is_taken_for_silent_who_shows_signs_of_life_as_often_as_his_transport_says(
    hosts: int, tmp_path: Path
) -> None:
    transport = SharedDirectory(tmp_path, hosts)
    assert transport.every + transport.pace < SILENT_AFTER
    if hosts <= 24:
        assert (transport.every, transport.pace < 0.01) == (1.0, True), "few hosts are as prompt as ever"


def test_a_supervisor_with_a_board_reads_no_heartbeats_from_the_shared_directory(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.ranks.mkdir()
    own = Heartbeat(pid=1, host=THIS_HOST, attempt=3, step=5, batch=5, doing="training", monotonic=1.0)
    write_heartbeat(paths.heartbeat(0), own)
    write_heartbeat(paths.heartbeat(9), own.model_copy(update={"host": "elsewhere"}))
    torchrun = subprocess.Popen(["true"])
    board = HeartbeatBoard()
    HeartbeatCell(board.path, 0, 0).write(own.model_copy(update={"step": 6}))
    try:
        with_board = Running(paths, 3, (), torchrun, board, "node-0")
        assert {rank: beat.step for rank, beat in with_board.beats().items()} == {0: 6}
        without = Running(paths, 3, (), torchrun, None, "node-0")
        assert {rank: beat.step for rank, beat in without.beats().items()} == {0: 5}, "those of this host"
    finally:
        board.close()
        torchrun.wait()
