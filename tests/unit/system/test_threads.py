"""Where the system makes no further thread (`ulimit -u`): an error for the reader, and no run that dies of it."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollback.checkpoints.format.hashing import PIECE, hash_of
from rollback.config import Settings
from rollback.errors import CheckpointOutOfReach, RollbackError
from rollback.instructions import MeetingPoint
from rollback.ring.copy_requests import CopyReport
from rollback.ring.shard_copier import ShardCopier
from rollback.rundir.host_records import RecordPublisher, SharedDirectory
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.nodes import store
from rollback.supervisor.nodes.store import StoreTransport
from rollback.supervisor.nodes.waiting import FetchAhead
from rollback.system.threads import Threads
from rollback.train.catalogue.draining import start_draining
from rollback.train.catalogue.remote import CheckpointDownload
from rollback.train.comm.ranks import Ranks

TOLD = r"starting a thread \(.*\): can't start new thread"


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        """As Python does where the system refuses."""
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def publisher(folder: Path) -> None:
    RecordPublisher(SharedDirectory(folder / "nodes"), "part-host.json", CopyReport(order="one"), print)


@pytest.mark.parametrize(
    "begin",
    [
        publisher,
        lambda folder: ShardCopier(RunPaths(folder), "host", print).start(),
        lambda folder: FetchAhead(RunPaths(folder), f"file://{folder}/ring", print),
        lambda folder: Buddy(RunPaths(folder), folder, "node-0", "127.0.0.1", print),
    ],
    ids=["publisher", "copier", "fetch-ahead", "buddy"],
)
@pytest.mark.usefixtures("crowded")
def test_the_error_is_for_the_reader_and_nothing_is_left(begin: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(RollbackError, match=TOLD):
        begin(tmp_path)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.usefixtures("crowded")
def test_who_shares_work_among_threads_is_told_too() -> None:
    with pytest.raises(RollbackError, match=TOLD):
        hash_of(memoryview(bytes(2 * PIECE)), threads=2)
    pool = Threads(1, "rollback-test")
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int)


@pytest.mark.usefixtures("crowded")
def test_a_store_that_nobody_could_listen_to_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    process = SimpleNamespace(kill=lambda: asked.append("kill"), wait=lambda: asked.append("wait"))
    monkeypatch.setattr(store.subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(OSError, match=TOLD):
        StoreTransport(MeetingPoint(host="127.0.0.1", port=1, is_host=True, keys=""))
    assert asked == ["kill", "wait"]


@pytest.mark.usefixtures("crowded")
def test_a_rank_trains_without_the_ring_that_no_thread_can_fill(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(ring=f"file://{tmp_path}/ring")
    record: Any = SimpleNamespace(note=None)
    assert start_draining(RunPaths(tmp_path / "run"), settings, record, Ranks()) is None
    assert "the durable ring is not filled: starting a thread" in capfd.readouterr().err
    download = CheckpointDownload(RunPaths(tmp_path / "run"), f"file://{tmp_path}/ring", "c000001-s00000001")
    assert download.is_over()
    with pytest.raises(CheckpointOutOfReach, match="starting a thread"):
        download.require()
