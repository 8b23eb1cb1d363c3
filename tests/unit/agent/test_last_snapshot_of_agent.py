"""When torchrun's process has somebody speak for its host."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rollback.agent.last_snapshot import wait_for_last_snapshot
from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result
from rollback.checkpoints.fast_tier.end_marks import EndMark, EndMarkPaths
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult

LIMIT = 20.0


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EndMarkPaths:
    """Of a host with two ranks, which are gone."""
    made = EndMarkPaths(tmp_path / "tier" / "last")
    made.root.parent.mkdir(0o700)
    end_marks.prepare(made)
    for rank in range(2):
        EndMark(made, rank).close()
    made.hosts.write_text(json.dumps({"attempt": 3}))
    (tmp_path / "fast-tier.json").write_text(json.dumps({"directory": str(made.root.parent)}))
    monkeypatch.setenv("ROLLBACK_RUN", str(tmp_path))
    monkeypatch.setenv("ROLLBACK_ATTEMPT", "3")
    return made


class Started:
    """What was started, and how it was waited for."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.waited: float | None = None

    def __call__(self, arguments: Sequence[str]) -> "Started":
        self.arguments = [*arguments]
        return self

    def wait(self, timeout: float) -> int:
        self.waited = timeout
        raise subprocess.TimeoutExpired("it", timeout)


def test_where_no_rank_is_left_somebody_speaks_for_the_host(paths: EndMarkPaths) -> None:
    started, before = Started(), time.monotonic()
    wait_for_last_snapshot(LIMIT, started)
    script, last, noticed, limit = started.arguments
    assert (Path(script).name, last, float(limit)) == ("host_proxy.py", str(paths.root), LIMIT)
    assert started.waited is not None
    assert 0 < started.waited < LIMIT, "what was waited for before is a part of it"
    assert before <= float(noticed) <= time.monotonic()


def leave(paths: EndMarkPaths) -> None:
    for rank in range(2):
        paths.mark(rank).unlink()
        paths.bell(rank).unlink()
        mark = EndMark(paths, rank)
        mark.leave()
        mark.close()


ELSE: dict[str, Callable[[EndMarkPaths], object]] = {
    "there is one host": lambda paths: paths.hosts.unlink(),
    "the marks are of an earlier attempt": lambda paths: paths.hosts.write_text(json.dumps({"attempt": 2})),
    "a rank has told what became of it": lambda paths: last_snapshot_result.write_result(
        paths, LastSnapshotResult(attempt=3, rank=1, reason="")
    ),
    "all have ended as they should": leave,
    "there is no fast tier": lambda paths: Path(os.environ["ROLLBACK_RUN"], "fast-tier.json").unlink(),
}


@pytest.mark.parametrize("why", ELSE)
def test_nobody_speaks_for_a_host_where(paths: EndMarkPaths, why: str) -> None:
    ELSE[why](paths)
    started = Started()
    wait_for_last_snapshot(LIMIT, started)
    assert started.arguments == []


@pytest.fixture
def living(paths: EndMarkPaths) -> Iterator[int]:
    """A descriptor at which rank 1 hears its bell."""
    yield (fd := os.open(paths.bell(1), os.O_RDWR | os.O_NONBLOCK))
    os.close(fd)


def test_nobody_else_speaks_for_a_host_on_which_a_rank_lives_and_no_bell_is_rung(
    paths: EndMarkPaths, living: int
) -> None:
    started = Started()
    wait_for_last_snapshot(LIMIT, started)
    assert started.arguments == []
    with pytest.raises(BlockingIOError):
        os.read(living, 1)
