"""A script that makes no guard runs under `rollback launch` as it does under torchrun, and leaves nothing behind."""

import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch, launching, tree
from waiting import LIMIT, wait_for

from rollback.facts.training import Attached, AttemptStarted
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.lock import RunLock

BARE = Path(__file__).parent / "jobs" / "bare.py"
TINY = Path(__file__).parent / "jobs" / "tiny.py"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path, with_torchrun=True, script=BARE) as launch:
        yield launch


def test_it_is_started_again_as_often_as_max_restarts_says_and_reads_which_start_it_is(job: Launch) -> None:
    code, output = job.finish("fail-twice", "--max-restarts", "3", ranks=2)
    assert code == 0, output
    starts = re.findall(r"^start (\d) of 3 in (\S+)$", output, re.MULTILINE)
    assert sorted(number for number, _ in starts) == ["0", "0", "1", "1", "2", "2"]  # of both ranks
    assert len({run_id for _, run_id in starts}) == 1
    assert tree(job.folder) == {}


def test_by_itself_it_is_started_once(job: Launch) -> None:
    code, output = job.finish("fail-twice")
    assert code == 1, output
    assert output.count("start 0 of 0") == 1
    assert "--max-restarts allows 0 restarts" in output.splitlines()[-1]
    assert tree(job.folder) == {}


def test_it_gets_the_signal_that_came_and_the_grace_to_save_although_another_rank_dies_of_it(job: Launch) -> None:
    supervisor = job.start("save", "--signals-to-handle=SIGHUP", ranks=2)
    wait_for(lambda: len(list(job.folder.glob("waits-*"))) == 2)
    supervisor.send_signal(signal.SIGHUP)
    output, _ = supervisor.communicate(timeout=LIMIT)
    assert supervisor.returncode == 1, output
    assert "rank 0 has saved on SIGHUP" in output
    assert "SIGHUP: telling the ranks to stop (again to end now)" in output, "what a rank saves is its own affair"
    assert not job.run.exists()


def test_two_launches_of_it_run_side_by_side_in_one_folder(job: Launch) -> None:
    both = [job.start("meet"), job.start("meet")]
    ended = [(process.communicate(timeout=LIMIT)[0], process.returncode) for process in both]
    assert [code for _, code in ended] == [0, 0], ended
    assert not job.run.exists()


def test_a_folder_that_is_no_run_directory_is_in_the_way_of_a_guard_only(job: Launch, tmp_path: Path) -> None:
    for name in ("bare", "tiny"):
        (job.folder / "runs" / name).mkdir(parents=True)
        (job.folder / "runs" / name / "events.out").write_text("of somebody else")
    before = tree(job.folder)
    code, output = job.finish("fail-twice", "--max-restarts", "2")
    assert code == 0, output
    with launching(tmp_path, with_torchrun=True, script=TINY) as guarded:
        code, output = guarded.finish("")
    assert code == 78, output
    assert "is not a run directory" in output
    assert tree(job.folder) == before


def test_a_guard_is_refused_where_a_script_without_one_holds_the_run_directory(tmp_path: Path) -> None:
    with launching(tmp_path, with_torchrun=False, script=TINY) as job:
        lock = RunLock(job.paths, "rollback launch")
        before = tree(tmp_path)
        code, output = job.finish("")
        assert code == 73, output
        assert "in use by rollback launch" in output
        assert tree(tmp_path) == before
        lock.release()


def test_a_range_of_nodes_begins_with_those_that_come(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--nnodes=1:2", "--rdzv-backend=c10d", meeting, "--rdzv-conf=last_call_timeout=60"]
    with launching(tmp_path, with_torchrun=True, script=TINY) as job:
        nodes = [job.start("", *flags), job.start("", *flags)]
        ended = [(process.communicate(timeout=LIMIT)[0], process.returncode) for process in nodes]
        assert [code for _, code in ended] == [0, 0], ended
        (attached,) = (
            record.fact for record in read_journal(job.paths.train_journal).records if isinstance(record.fact, Attached)
        )
        assert attached.world_size == 2
        shutil.rmtree(job.run)
        flags[-1] = "--rdzv-conf=last_call_timeout=1"
        code, output = job.finish("", *flags)
        assert code == 0, output
        (started,) = job.facts(AttemptStarted)
        assert "--nnodes=1" in started.command
