"""Who speaks for a host that is lost, by the copies of its marks. The store is a real one."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exchange import LIMIT, store

from rollback.checkpoints.fast_tier import last_snapshot_result
from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks, LiveMarkCopies, MarkPiece
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.train.last_snapshot import host_proxy
from rollback.train.last_snapshot.host_proxy import speaking_for_lost_hosts
from rollback.train.last_snapshot.hosts import YES, Hosts, HostsOfJob

__all__ = ["store"]
CLOCK = 77


@pytest.fixture
def tier(tmp_path: Path) -> SlotPaths:
    return SlotPaths(tmp_path)


@pytest.fixture
def hosts(store: Any) -> Hosts:
    place = "127.0.0.1", store.port
    return Hosts(HostsOfJob(place=place, keys="keys", hosts=(0, 2), own=0, ranks=(0, 1), attempt=1))


def fed(tier: SlotPaths, hosts: Hosts, keys: str = "keys") -> LiveMarkCopies:
    ranks = 2, 3
    job = hosts.job.model_copy(update={"keys": keys, "own": 2, "ranks": ranks})
    marks = LiveMarkCopies(tier, 1, ranks, job.model_dump_json().encode())
    marks.hear(CLOCK)
    return marks


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Path, int]]]:
    """Where somebody has stood in, and when that host was last heard."""
    found: list[tuple[Path, int]] = []
    monkeypatch.setattr(host_proxy, "_HEARD", 0.05)
    monkeypatch.setattr(
        host_proxy, "speak_for_host", lambda marks, noticed, deadline, lost_at: found.append((marks.root, lost_at))
    )
    yield found
    assert not [thread for thread in threading.enumerate() if thread.name == "rollback-lost-host"]


def test_a_host_that_goes_silent_has_somebody_who_speaks(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]]
) -> None:
    began = time.monotonic_ns()
    marks = fed(tier, hosts)
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        assert spoken == []
        marks.close()
        wait_for_threads()
    ((root, lost_at),) = spoken
    assert root == CopiedMarks(tier, 1).marks.root
    assert CLOCK < lost_at < CLOCK + time.monotonic_ns() - began, "as long as it was heard, by its own clock"


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "rollback-lost-host":
            thread.join(LIMIT)


@pytest.mark.parametrize("what", ["answers", "is of another attempt", "has left"])
def test_nobody_speaks_for_a_host_that(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]], what: str
) -> None:
    marks = fed(tier, hosts, keys="others" if what == "is of another attempt" else "keys")
    if what == "answers":
        hosts.connect().set({"here/2": YES})
    if what == "has left":
        for rank in (2, 3):
            marks.put(MarkPiece(rank, 2048, b"\1"))
    marks.close()
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        wait_for_threads()
    assert spoken == []


@pytest.mark.parametrize("heard", [[True], [False, True]], ids=["all the time", "again in a moment"])
def test_nobody_speaks_for_a_host_that_is_heard(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]], monkeypatch: pytest.MonkeyPatch, heard: list[bool]
) -> None:
    """It is asked so often that somebody would have spoken by then."""
    fed(tier, hosts).close()
    asked, enough = iter([*heard, *[True] * 10]), threading.Event()

    def is_live(copied: CopiedMarks) -> bool:
        told = next(asked, None)
        if told is None:
            enough.set()
        return told is not False

    monkeypatch.setattr(CopiedMarks, "is_live", is_live)
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        assert enough.wait(LIMIT), spoken
    assert spoken == []


def test_whoever_speaks_for_a_lost_host_leaves_it_its_bell_and_is_not_taken_for_it(hosts: Hosts) -> None:
    lost = Hosts(hosts.job.model_copy(update={"own": 2}))
    rung = threading.Event()
    lost.wait_for_bell(rung.set, lambda text: None)
    lost.speak_for()
    assert not hosts.answers(2), "who takes over if the speaker dies"
    hosts.ring()
    assert rung.wait(LIMIT)
    assert hosts.answers(2)
    lost.close()


def test_where_nothing_is_copied_there_is_nobody_to_speak_for(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]]
) -> None:
    fed(tier, hosts).close()
    (CopiedMarks(tier, 1).marks.hosts).unlink()
    with speaking_for_lost_hosts(None, tier, LIMIT):
        pass
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        wait_for_threads()
    assert spoken == []
    assert not last_snapshot_result.read_results(CopiedMarks(tier, 1).marks)
