"""What a supervisor waits for before it ends the ranks of its host, and torchrun's process with them."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil
import pytest
from waiting import wait_for

from rollback.checkpoints.fast_tier import end_marks, last_locks, last_snapshot_result
from rollback.checkpoints.fast_tier.end_marks import EndMark, EndMarkPaths, StepEnd
from rollback.checkpoints.fast_tier.last_snapshot_result import LastSnapshotResult
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.facts.training import Finished, LastSnapshotMade
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.supervisor import last_snapshot
from rollback.supervisor.journal import SupervisorJournal
from rollback.supervisor.torchrun import host
from rollback.system.processes import state_of

LONG = 30.0


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EndMarkPaths:
    """Of a host whose only rank is gone."""
    paths = end_marks.marks_of(SlotPaths(tmp_path))
    end_marks.prepare(paths)
    EndMark(paths, 0).close()
    monkeypatch.setattr(last_snapshot, "_marks", lambda run: paths)
    return paths


def ask(while_waiting: Callable[[], None]) -> bool:
    """Whether it waits until that is done."""
    asking = threading.Thread(
        target=last_snapshot.ask_for_last_snapshot, args=(RunPaths(Path("run")), 1, end_marks.ATTEMPT_ENDS), daemon=True
    )
    asking.start()
    asking.join(2 * last_snapshot._ANSWER)
    waits = asking.is_alive()
    while_waiting()
    asking.join(LONG)
    assert not asking.is_alive()
    return waits


def test_who_speaks_for_ranks_that_are_gone_is_waited_for(marks: EndMarkPaths) -> None:
    """Torchrun's process, which would be ended next, may have the store by which the hosts agree."""
    marks.hosts.write_text("{}")
    with last_locks.busy(marks):
        assert ask(
            lambda: last_snapshot_result.write_result(
                marks, LastSnapshotResult(attempt=1, rank=0, reason="rank 0 is gone")
            )
        )


@pytest.mark.parametrize("hosts", [True, False])
def test_where_nobody_speaks_for_them_nobody_is_waited_for_long(marks: EndMarkPaths, hosts: bool) -> None:
    if hosts:
        marks.hosts.write_text("{}")
    began = time.monotonic()
    last_snapshot.ask_for_last_snapshot(RunPaths(Path("run")), 1, end_marks.ATTEMPT_ENDS)
    assert time.monotonic() - began < (5 * last_snapshot._ANSWER if hosts else last_snapshot._ANSWER)


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_host_whose_ranks_live_and_do_not_answer_has_not_spoken(marks: EndMarkPaths, others_wait: bool) -> None:
    """Where others wait for it, its ranks must be gone before anybody speaks for them. A stopped one is not waited
    for."""
    if others_wait:
        marks.hosts.write_text("{}")

    def has_spoken(stopped: Collection[int], within: float = LONG) -> bool:
        return last_snapshot.ask_for_last_snapshot(
            RunPaths(Path("run")), 1, end_marks.RANKS_HANG, stopped, begins_within=within
        )

    hears = os.open(marks.bell(0), os.O_RDONLY | os.O_NONBLOCK)
    assert has_spoken((), within=0.05) != others_wait
    assert has_spoken((0,)) != others_wait
    last_snapshot_result.write_result(marks, LastSnapshotResult(attempt=1, rank=0, reason="rank 1 is gone"))
    assert has_spoken(())
    os.close(hears)


@pytest.mark.parametrize("spoken", [True, False])
def test_ranks_that_do_not_answer_are_gone_before_somebody_is_asked_to_speak_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoken: bool
) -> None:
    rank, torchrun = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    rank.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(rank.pid) == "T")
    asked: list[tuple[list[int], bool]] = []

    def ask(paths: RunPaths, attempt: int, why: bytes, stopped: Collection[int] = (), **within: float) -> bool:
        asked.append(([*stopped], psutil.pid_exists(rank.pid)))
        return spoken

    monkeypatch.setattr(host, "living_ranks", lambda beats, paths: {3: psutil.Process(rank.pid)})
    monkeypatch.setattr(host, "ask_for_last_snapshot", ask)
    running = host.Running(RunPaths(tmp_path), 1, ("torchrun",), torchrun, None, None)
    running.kill(end_marks.RANKS_HANG)
    assert asked == [([3], True), *([] if spoken else [([], False)])]
    rank.kill()
    rank.wait()


@pytest.mark.parametrize("by_supervisor", [True, False])
def test_what_the_supervisor_has_killed_the_kernel_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_supervisor: bool
) -> None:
    torchrun = subprocess.Popen(["sleep", "60"])
    running = host.Running(RunPaths(tmp_path), 1, ("torchrun",), torchrun, None, None)
    monkeypatch.setattr(running, "oom_struck", lambda: True)
    assert not running.torchrun_oom_killed()
    if by_supervisor:
        running.kill(None)
    else:
        torchrun.kill()
        torchrun.wait()
    assert running.torchrun_oom_killed() != by_supervisor


def test_how_far_ranks_had_come_is_counted_since_their_last_rollback(marks: EndMarkPaths) -> None:
    mark = EndMark(marks, 1)
    mark.write(StepEnd(1, 0, 18, 18, 0, 0), b"before")
    mark.write(StepEnd(1, 1, 3, 3, 0, 1), b"behind")
    last_snapshot_result.write_result(marks, LastSnapshotResult(attempt=1, rank=1, reason="rank 0 is gone"))
    kept = last_snapshot.last_snapshot_on_host(RunPaths(Path("run")))
    mark.close()
    assert kept is not None
    assert kept.furthest == 3


def test_why_there_is_none_may_name_a_directory_whose_name_is_no_utf_8(marks: EndMarkPaths) -> None:
    """Else the rank raises in the place of what it tells."""
    why = f"{os.fsdecode(b'/data/run' + bytes([255]))} is full"
    last_snapshot_result.write_result(marks, LastSnapshotResult(attempt=1, rank=0, reason="r", why_not=why))
    (told,) = last_snapshot_result.read_results(marks)
    assert told.why_not == "/data/run\\udcff is full"


def test_of_a_complete_run_no_last_snapshot_is_missed(tmp_path: Path) -> None:
    """As where the supervisor was killed and the ranks have trained on to the end: they do not leave all at once."""
    said: list[str] = []
    own_journal = SupervisorJournal(RunPaths(tmp_path), said.append)
    missed = LastSnapshotMade(reason="another rank is about to end", checkpoint=None, step=None, steps_lost=0)
    last_snapshot.note_last_snapshot(missed, 200, Finished(step=200, batch=200), own_journal, said.append)
    assert said == []
    for told, finished in (
        (missed, None),
        (missed.model_copy(update={"steps_lost": 3}), Finished(step=200, batch=200)),  # of a pass behind that one
        (missed.model_copy(update={"checkpoint": "c000001-s00000203", "step": 203}), Finished(step=200, batch=200)),
    ):
        last_snapshot.note_last_snapshot(told, told.step, finished, own_journal, said.append)
        assert said.pop() == told.in_words()


def test_a_last_snapshot_is_not_told_of_where_the_ranks_have_saved_more_behind_it(tmp_path: Path) -> None:
    """As when torchrun is killed: they keep what they have, and are told to stop, and save that. It is on record."""
    said: list[str] = []
    paths = RunPaths(tmp_path)
    own_journal = SupervisorJournal(paths, said.append)
    own_journal.open()
    last = LastSnapshotMade(reason="the attempt is ended", checkpoint="c000001-s00000058", step=58, steps_lost=0)
    for newest in (61, 58):
        last_snapshot.note_last_snapshot(last, newest, None, own_journal, said.append)
    assert said == [last.in_words()]
    assert len(read_journal(paths.supervisor_journal).records) == 2
