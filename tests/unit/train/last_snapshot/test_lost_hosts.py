"""Who speaks for a host that is lost, by the copies of its marks. The store is a real one."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_exchange import LIMIT, store

from rollback.checkpoints.fast_tier import last_account
from rollback.checkpoints.fast_tier.mark_copies import MARKS_EVERY, CopiedMarks, FedMarks
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.train.last_snapshot import lost_hosts
from rollback.train.last_snapshot.hosts import YES, Hosts, HostsOfJob
from rollback.train.last_snapshot.lost_hosts import speaking_for_lost_hosts

__all__ = ["store"]
CLOCK = 77


@pytest.fixture
def tier(tmp_path: Path) -> SlotPaths:
    return SlotPaths(tmp_path)


@pytest.fixture
def hosts(store: Any) -> Hosts:
    return Hosts(("127.0.0.1", store.port), "keys", (0, 2), 0)


def fed(tier: SlotPaths, hosts: Hosts, keys: str = "keys") -> FedMarks:
    job = HostsOfJob(place=("127.0.0.1", 1), keys=keys, hosts=(0, 2), own=2, ranks=(2, 3), attempt=1)
    marks = FedMarks(tier, 1, [2, 3], job.model_dump_json().encode())
    marks.hear(CLOCK)
    return marks


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Path, int]]]:
    """Where somebody has stood in, and when that host was last heard."""
    found: list[tuple[Path, int]] = []
    monkeypatch.setattr(lost_hosts, "_ANSWER", 0.05)
    monkeypatch.setattr(lost_hosts, "stand_in", lambda marks, noticed, deadline, seen: found.append((marks.root, seen)))
    yield found
    assert not [thread for thread in threading.enumerate() if thread.name == "rollback-lost-host"]


def test_a_host_that_goes_silent_has_somebody_who_speaks(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]]
) -> None:
    marks = fed(tier, hosts)
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        assert spoken == []
        marks.close()
        wait_for_threads()
    assert spoken == [(CopiedMarks(tier, 1).marks.root, CLOCK + int(MARKS_EVERY * 1e9))]


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "rollback-lost-host":
            thread.join(LIMIT)


@pytest.mark.parametrize("what", ["is heard", "answers", "is of another attempt"])
def test_nobody_speaks_for_a_host_that(
    tier: SlotPaths, hosts: Hosts, spoken: list[tuple[Path, int]], what: str
) -> None:
    marks = fed(tier, hosts, keys="others" if what == "is of another attempt" else "keys")
    if what == "answers":
        hosts.connect().set({"here/2": YES})
    if what != "is heard":
        marks.close()
    with speaking_for_lost_hosts(hosts, tier, LIMIT):
        if what != "is heard":
            wait_for_threads()
    assert spoken == []


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
    assert not last_account.read_accounts(CopiedMarks(tier, 1).marks)
