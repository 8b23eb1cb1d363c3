"""What the ranks print: kept in files for each rank, shown from the first, and lost only where the disk refuses."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import launched
from waiting import wait_for

from rollback.checkpoints.fast_tier import slots
from rollback.errors import RollbackError, RunDoesNotFit
from rollback.live import screen as screen_module
from rollback.live.screen import Screen
from rollback.rundir import seal
from rollback.rundir.identity import Identity, JobIdentity, write_identity
from rollback.rundir.paths import FORMAT, RunPaths
from rollback.supervisor.torchrun import host as host_module
from rollback.supervisor.torchrun import output as output_module
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.host import Host
from rollback.supervisor.torchrun.output import Output, Stream, user_decides
from rollback.supervisor.torchrun.processes import descendants
from rollback.terminal.messages import line_for

JOB = LaunchedJob({}, "train.py", [])
LIMIT = 20.0


class Listener:
    """An audience that remembers."""

    def __init__(self, captures: bool = False) -> None:
        self.captures = captures
        self.said: list[str] = []
        self.shown = {"out": b"", "err": b""}

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, stream: Stream, data: bytes) -> None:
        self.shown[stream] += data


class Ranks:
    """Stands in for torchrun's process: makes pipes and writes into them."""

    def __init__(self, job: LaunchedJob) -> None:
        self._folder = Path(str(job.flags["log-dir"]))
        self._files: dict[str, int] = {}

    def write(self, name: str, data: bytes) -> None:
        path = self._folder / name
        if name not in self._files:
            os.mkfifo(path)
            self._files[name] = os.open(path, os.O_RDWR)
        view = memoryview(data)
        while view:
            view = view[os.write(self._files[name], view) :]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def output(tmp_path: Path, listener: Listener) -> Output:
    private = tmp_path / "private"
    private.mkdir()
    return Output(private, lambda attempt: tmp_path / "logs" / f"attempt-{attempt}", listener)


def test_all_ranks_are_kept_and_the_first_is_shown(output: Output, listener: Listener, tmp_path: Path) -> None:
    output.keep()
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        for rank in (4, 5):  # of the second node
            ranks.write(f"rank-{rank:05d}.out", b"out of %d\n" % rank)
            ranks.write(f"rank-{rank:05d}.err", b"err of %d" % rank)
        os.write(streams.stderr or -1, b"torchrun\n")
    folder = tmp_path / "logs" / "attempt-1"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "rank-00004.out": b"out of 4\n", "rank-00004.err": b"err of 4",
        "rank-00005.out": b"out of 5\n", "rank-00005.err": b"err of 5",
        "torchrun.err": b"torchrun\n",
    }  # fmt: skip
    assert listener.shown["out"] == b"out of 4\n"
    assert listener.shown["err"] in (b"err of 4torchrun\n", b"torchrun\nerr of 4")
    assert output.stderr_tail(4) is None
    assert output.stderr_tail(5) == f"the end of {folder / 'rank-00005.err'}:\n  err of 5"


TRACEBACK = b"[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: a peer is gone\n"


def test_the_exception_that_ends_the_first_rank_waits_for_the_account(
    output: Output, listener: Listener, tmp_path: Path
) -> None:
    output.is_ending = lambda attempt, rank: (attempt, rank) == (1, 0)
    output.keep()
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.err", b"step 7\n" + TRACEBACK)
        wait_for(lambda: listener.shown["err"])
        ranks.write("rank-00000.err", b"and what follows it\n")
        ranks.write("rank-00000.out", b"out\n")
    assert listener.shown == {"out": b"out\n", "err": b"step 7\n"}
    assert output.held_of == 0
    output.release()
    assert listener.shown["err"] == b"step 7\n" + TRACEBACK + b"and what follows it\n"
    assert (tmp_path / "logs/attempt-1/rank-00000.err").read_bytes() == listener.shown["err"]


@pytest.mark.parametrize("kept", [True, False])
def test_an_exception_that_another_ranks_failure_brought_about_is_told_in_a_line(
    output: Output, listener: Listener, tmp_path: Path, kept: bool
) -> None:
    """All of it where no file keeps it, as of a script that made no guard."""
    output.is_ending = lambda attempt, rank: True
    if kept:
        output.keep()
    raised = TRACEBACK.replace(b":\n", b':\n[rank0]:   File "train.py", line 7\n') + b"terminate called\n"
    with output.of_attempt(1, JOB) as streams:
        Ranks(streams.job).write("rank-00000.err", raised)
    for _ in range(2):
        output.tell_consequence()
    path = tmp_path / "logs/attempt-1/rank-00000.err"
    assert listener.said == ([f"rank 0 raised, too: RuntimeError: a peer is gone (all of it: {path})"] if kept else [])
    assert listener.shown["err"] == (b"" if kept else raised)


def test_an_exception_of_which_the_disk_has_lost_a_part_is_shown_whole(
    output: Output, listener: Listener, tmp_path: Path
) -> None:
    output.is_ending = lambda attempt, rank: True
    output.keep()
    (tmp_path / "logs").write_text("in the way")
    with output.of_attempt(1, JOB) as streams:
        Ranks(streams.job).write("rank-00000.err", TRACEBACK)
    output.tell_consequence()
    assert listener.shown["err"] == TRACEBACK
    assert not [line for line in listener.said if "raised, too" in line]


def test_an_exception_that_a_script_prints_and_survives_is_shown_at_once(output: Output, listener: Listener) -> None:
    with output.of_attempt(1, JOB) as streams:
        Ranks(streams.job).write("rank-00000.err", TRACEBACK)
    assert listener.shown["err"] == TRACEBACK


def test_a_rank_that_does_not_end_after_its_exception_is_not_waited_for(
    output: Output, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "HELD_FOR", 0.2)
    output.is_ending = lambda attempt, rank: True
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.err", TRACEBACK)
        wait_for(lambda: listener.shown["err"] == TRACEBACK)
        ranks.write("rank-00000.err", b"more\n")
        wait_for(lambda: listener.shown["err"] == TRACEBACK + b"more\n")


def test_a_disk_that_fails_when_it_is_asked_of_an_exception_ends_no_reading(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the ranks would wait for ever for somebody to empty their pipes."""
    host = Host(launched(RunPaths(tmp_path / "run"), JOB, expects_guard=True), {}, tmp_path, listener)
    look = os.stat

    def failing(path: Any, **how: Any) -> os.stat_result:
        if "failures" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return look(path, **how)

    monkeypatch.setattr(os, "stat", failing)
    with host.output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.err", TRACEBACK)
        ranks.write("rank-00000.err", b"more\n")
        wait_for(lambda: listener.shown["err"] == TRACEBACK + b"more\n")
    host.close()


def test_where_no_thread_can_be_made_the_output_is_torchrun_s_own_affair(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", refused)
    with Output(tmp_path, lambda attempt: tmp_path / "logs", listener).of_attempt(1, JOB) as streams:
        assert (streams.job, streams.stdout, streams.stderr) == (JOB, None, None)
        assert os.listdir("/proc/self/fd") == before
    (said,) = listener.said
    assert "(starting a thread (rank output): can't start new thread); the run goes on" in said


def test_where_pipes_cannot_be_watched_the_output_is_torchrun_s_own_affair(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks would else write into pipes that nobody empties, and wait for ever."""

    def refused() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(output_module.selectors, "DefaultSelector", refused)
    with Output(tmp_path, lambda attempt: tmp_path / "logs", listener).of_attempt(1, JOB) as streams:
        assert (streams.job, streams.stdout, streams.stderr) == (JOB, None, None)
        assert os.listdir("/proc/self/fd") == before, "there are too few as it is"
    assert listener.said == [
        f"making pipes in {tmp_path} fails (Too many open files); the run goes on, and what is lost is counted"
    ]


@pytest.mark.parametrize("to_be_had", [0, 1])
def test_where_no_pipe_can_be_made_the_output_is_torchrun_s_own_affair(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch, to_be_had: int
) -> None:
    made, make, before = list[tuple[int, int]](), os.pipe2, os.listdir("/proc/self/fd")

    def refused(flags: int) -> tuple[int, int]:
        if len(made) == to_be_had:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        made.append(make(flags))
        return made[-1]

    monkeypatch.setattr(os, "pipe2", refused)
    with Output(tmp_path, lambda attempt: tmp_path / "logs", listener).of_attempt(1, JOB) as streams:
        assert (streams.job, streams.stdout, streams.stderr) == (JOB, None, None)
        assert os.listdir("/proc/self/fd") == before, "there are too few as it is"
    assert listener.said == [
        f"making pipes in {tmp_path} fails (Too many open files); the run goes on, and what is lost is counted"
    ]


def test_what_a_file_server_refuses_when_a_file_is_closed_is_said(
    output: Output, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = os.close

    def refusing(fd: int) -> None:
        close(fd)
        if fd in output._files.values():
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.out", b"a")
        wait_for(lambda: listener.shown["out"] == b"a")
        wait_for(lambda: output._files)
        monkeypatch.setattr(os, "close", refusing)
    (said,) = listener.said
    assert said.endswith("logs-1 fails (Disk quota exceeded); the run goes on, and what is lost is counted")


def test_what_ended_an_attempt_that_a_lost_leader_numbered_alike_is_forgotten(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leads in its place counts from an older record."""
    paths = RunPaths(tmp_path / "run")
    paths.failures(2).mkdir(parents=True)
    paths.failure(2, 1).write_text("{}")
    (tmp_path / "private").mkdir()
    host = Host(launched(paths, JOB), {}, tmp_path / "private", listener)
    host.stay_apart(list)
    monkeypatch.setattr(host_module, "torchrun_command", lambda job, group: [sys.executable, "-c", ""])
    forgotten: list[int] = []
    monkeypatch.setattr(host_module, "forget_last_snapshot", lambda paths, attempt: forgotten.append(attempt))
    with host.attempt(2) as running:
        assert not paths.failure(2, 1).exists()
        assert forgotten == [2]
        wait_for(lambda: running.poll() is not None)
    host.close()


def test_what_an_attempt_started_is_ended_where_it_cannot_be_told_whose_run_it_was(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has changed the run.json of a sealed run meanwhile: that is refused, and no rank may go on."""
    paths, key = RunPaths(tmp_path / "run"), tmp_path / "key"
    paths.root.mkdir()
    (tmp_path / "private").mkdir()
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    tier = slots.tier_of(tmp_path / "memory", "0123456789")
    paths.fast_pointer.write_text(json.dumps({"format": FORMAT, "directory": str(tier.root)}))
    job = JobIdentity(world_size=1, model=[], optimizer={}, objects=[], data={})
    write_identity(paths, Identity(format=FORMAT, run_id="0123456789", created="", job=job))
    monkeypatch.setenv(seal.ENV_SEAL, str(key))
    host = Host(launched(paths, JOB), {}, tmp_path / "private", listener)
    rank = "import time; print(flush=True); time.sleep(600)"
    torchrun = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)"
    monkeypatch.setattr(host_module, "torchrun_command", lambda job, group: [sys.executable, "-c", torchrun])
    left = list[psutil.Process]()

    def attempt() -> None:
        with host.attempt(1) as running:
            wait_for(lambda: listener.shown["out"])
            wait_for(lambda: running.poll() is not None)
            left.extend(each for each in descendants() if rank in each.cmdline())

    with pytest.raises(RunDoesNotFit):
        attempt()
    assert [each.is_running() for each in left] == [False]
    host.close()


def test_until_a_guard_is_made_all_ranks_are_shown(tmp_path: Path, listener: Listener) -> None:
    made: list[bool] = []
    output = Output(tmp_path, lambda attempt: tmp_path / "logs", listener, lambda: bool(made))
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.out", b"a")
        ranks.write("rank-00001.out", b"b")
        wait_for(lambda: len(listener.shown["out"]) == 2)
        assert output.stderr_tail(1) is None
        made.append(True)
        ranks.write("rank-00001.out", b"c")
        ranks.write("rank-00000.out", b"d")
    assert sorted(listener.shown["out"]) == sorted(b"abd")


def test_nothing_is_left_in_the_run_directory_by_a_job_that_is_refused(output: Output, tmp_path: Path) -> None:
    with output.of_attempt(1, JOB) as streams:
        Ranks(streams.job).write("rank-00000.out", b"refused\n")
    assert not (tmp_path / "logs").exists()


def test_what_came_before_the_job_was_accepted_is_kept_too(output: Output, tmp_path: Path) -> None:
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.out", b"before\n")
        wait_for(lambda: any(output.private.glob("logs-1/*")))
        output.keep()
        ranks.write("rank-00000.out", b"after\n")
    assert (tmp_path / "logs" / "attempt-1" / "rank-00000.out").read_bytes() == b"before\nafter\n"


def test_a_job_that_may_have_no_guard_fills_no_disk(
    output: Output, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_module, "_BEFORE_IT_IS_KEPT", 10)
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        for number, text in enumerate((b"first twelve", b"lost", b"lost too")):
            ranks.write("rank-00000.out", text)
            wait_for(lambda text=text: listener.shown["out"].endswith(text))
            wait_for(lambda: list(output.private.glob("logs-1/*")))
            wait_for(lambda: sum(path.stat().st_size for path in output.private.glob("logs-1/*")) >= 12)
            assert sum(path.stat().st_size for path in output.private.glob("logs-1/*")) == 12, number
        output.keep()
        ranks.write("rank-00000.out", b"kept\n")
    found = (tmp_path / "logs" / "attempt-1" / "rank-00000.out").read_bytes()
    assert found == b"first twelve\n[rollback: 12 bytes of output are missing here]\nkept\n"
    assert listener.said == []


def test_what_attempts_printed_before_the_guard_is_kept_too(output: Output, tmp_path: Path) -> None:
    for attempt in (1, 2):
        with output.of_attempt(attempt, JOB) as streams:
            Ranks(streams.job).write("rank-00000.out", b"%d" % attempt)
            if attempt == 2:
                output.keep()
    logs = sorted((tmp_path / "logs").glob("*/*"))
    assert [path.read_bytes() for path in logs] == [b"1", b"2"]


def test_where_the_disk_refuses_the_ranks_go_on_and_the_loss_is_counted(
    output: Output, listener: Listener, tmp_path: Path
) -> None:
    output.keep()
    (tmp_path / "logs").write_text("in the way")
    log = tmp_path / "logs" / "attempt-1" / "rank-00000.out"
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.out", bytes(3 << 20))  # far more than a pipe holds: it would block if nobody read
        wait_for(lambda: len(listener.shown["out"]) == 3 << 20)
        (tmp_path / "logs").unlink()
        ranks.write("rank-00000.out", b"there is room again\n")
    # What was shown last may have been written only when there was room: it is either there or counted.
    told = rb"\n\[rollback: (\d+) bytes of output are missing here\]\n(\x00*)there is room again\n"
    found = re.fullmatch(told, log.read_bytes())
    assert found
    assert int(found[1]) + len(found[2]) == 3 << 20
    (said,) = listener.said
    assert "writing the output of the ranks" in said


def test_ranks_are_read_on_when_somebody_has_emptied_tmp(output: Output, listener: Listener) -> None:
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        ranks.write("rank-00000.out", b"1")
        # It is shown before it is kept, which makes a folder.
        wait_for((output.private / "logs-1" / "rank-00000.out").exists)
        shutil.rmtree(output.private)
        for shown, piece in ((b"12", b"2"), (b"123", b"3")):  # before the last, the thread has looked for new pipes
            ranks.write("rank-00000.out", piece)
            wait_for(lambda shown=shown: listener.shown["out"] == shown)  # type: ignore[misc]


def test_what_is_lost_at_the_end_is_said(output: Output, listener: Listener, tmp_path: Path) -> None:
    output.keep()
    (tmp_path / "logs").write_text("in the way")
    with output.of_attempt(1, JOB) as streams:
        Ranks(streams.job).write("rank-00000.err", b"12345")
    assert listener.said[-1].startswith("5 bytes of output at the end of")


def test_a_growing_log_is_said_at_each_doubling(
    output: Output, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.keep()
    output._said = 1000
    with output.of_attempt(1, JOB) as streams:
        ranks = Ranks(streams.job)
        for total in (900, 1100, 1900, 2100, 3900, 4100):
            ranks.write("rank-00000.out", bytes(total - len(listener.shown["out"])))
            wait_for(lambda total=total: len(listener.shown["out"]) == total)
    assert sum("have printed" in text for text in listener.said) == 3


@pytest.mark.parametrize("flags", [{"tee": "3"}, {"redirects": "0:1"}, {"log-dir": "x"}, {"run-path": True}])
def test_where_the_user_decides_torchrun_does_as_it_does_by_itself(
    output: Output, flags: dict[str, str | bool]
) -> None:
    job = LaunchedJob(flags, "train.py", [])
    assert user_decides(job)
    with output.of_attempt(1, job) as streams:
        assert (streams.job, streams.stdout, streams.stderr) == (job, None, None)


def test_a_panel_captures_also_what_the_user_has_torchrun_print(tmp_path: Path) -> None:
    listener = Listener(captures=True)
    output = Output(tmp_path, lambda attempt: tmp_path / "logs", listener)
    job = LaunchedJob({"tee": "3"}, "train.py", [])
    with output.of_attempt(1, job) as streams:
        assert streams.job == job
        os.write(streams.stdout or -1, b"[default0]:hello\n")
    assert listener.shown["out"] == b"[default0]:hello\n"


def test_pipes_that_cannot_be_made_leave_the_output_to_torchrun(output: Output, listener: Listener) -> None:
    shutil.rmtree(output.private)
    with output.of_attempt(1, JOB) as streams:
        assert streams.stdout is None
    assert "making" in listener.said[0]


def test_of_two_attempts_of_one_number_all_output_is_kept(output: Output, listener: Listener) -> None:
    """Who leads after a lost leader counts the attempts from an older record."""
    output.keep()
    for said in (b"one\n", b"two\n"):
        with output.of_attempt(2, JOB) as streams:
            Ranks(streams.job).write("rank-00001.out", said)
    assert (output.folder_of(2) / "rank-00001.out").read_bytes() == b"one\ntwo\n"
    assert listener.said == []


# The screen -----------------------------------------------------------------------------------------------------------


def test_a_launch_that_can_make_no_thread_says_so_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RollbackError, match=r"starting a thread \(screen\): can't") as refused, Screen(line_for):
        pass
    assert "ulimit -u" in str(refused.value.hint)


def test_nobody_waits_for_a_slow_reader_and_what_is_not_shown_is_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "_ROOM", 1 << 20)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as slow:
        with Screen(line_for, out=writing) as screen:
            for _ in range(48):
                screen.show("out", bytes(1 << 16))  # the pipe holds 64 KiB: this would block
            missed = screen._missed
            for _ in range(48 - missed // (1 << 16)):
                slow.read(1 << 16)
            screen.say("over")
        os.close(writing)
        assert slow.read() == b""
    assert missed > 1 << 20
    said = capfd.readouterr().err.splitlines()
    assert said[-2:] == [
        f"rollback: {missed} bytes of output were not shown, since nobody read them; the logs have them",
        "rollback: over",
    ]


def test_a_reader_is_waited_for_where_our_end_of_its_stream_does_not_block() -> None:
    """As where another program of the same terminal has made it so: for all that have it open."""
    (reading, writing), come = os.pipe(), bytearray()
    for end in (reading, writing):
        os.set_blocking(end, False)

    def all_of_it_has_come() -> bool:
        with contextlib.suppress(BlockingIOError):
            come.extend(os.read(reading, 1 << 16))
        return len(come) == 1 << 18

    with Screen(line_for, out=writing) as screen:
        for _ in range(4):
            screen.show("out", bytes(1 << 16))  # the pipe holds 64 KiB
        wait_for(all_of_it_has_come)
    os.close(reading)
    os.close(writing)


def test_a_last_word_that_nobody_reads_does_not_keep_a_launch_from_its_end() -> None:
    code = (
        "import sys\n"
        "from rollback.live import screen\n"
        "from rollback.terminal.messages import line_for, say\n"
        "screen._LAST_CHANCE = 0.1\n"
        "with screen.Screen(line_for) as ours:\n"
        "    ours.show('out', bytes(1 << 20))\n"
        "say('stopped, resumable')\n"
        "sys.exit(75)\n"
    )
    reading, writing = os.pipe()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=writing, timeout=LIMIT, check=False)
        assert done.returncode == 75
    finally:
        os.close(reading)
        os.close(writing)


def test_streams_that_are_gone_end_nothing() -> None:
    code = (
        "from rollback.live.screen import Screen\n"
        "with Screen(str) as screen:\n"
        "    screen.show('out', b'x'); screen.say('y'); screen.show('out', b'z')\n"
    )
    closed = subprocess.run([sys.executable, "-c", code], stdout=None, close_fds=True, check=False, preexec_fn=_close)
    assert closed.returncode == 0
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, check=False).returncode in (
            0,
            120,
        )


def _close() -> None:
    os.close(1)
    os.close(2)


def test_the_limits_are_what_the_documents_say() -> None:
    assert output_module.GROWN == 1 << 30
