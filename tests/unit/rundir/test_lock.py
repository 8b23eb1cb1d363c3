"""One process runs a run directory; the others are told who, and a dead holder is no obstacle."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import filelock
import pytest
from warm_server import WarmPopen

from rollback.errors import ExitCode, RunDirectoryError, RunInUse
from rollback.rundir import lock
from rollback.rundir.lock import RunLock, launch_of, read_holder
from rollback.rundir.paths import RunPaths
from rollback.supervisor.claim import Claim

# Ready, then tries when told to by a line on stdin, says how it went, and holds on until stdin closes.
CONTENDER = """
import sys
import threading
from pathlib import Path
from rollback.errors import RunInUse
from rollback.rundir import lock
from rollback.rundir.lock import RunLock
from rollback.rundir.paths import RunPaths
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = RunLock(RunPaths(Path(sys.argv[1])), "supervisor")
    print("won", flush=True)
except RunInUse as error:
    print("lost:", error.message, flush=True)
sys.stdin.read()
"""


def contender(root: Path) -> subprocess.Popen[str]:
    return WarmPopen(
        [sys.executable, "-c", CONTENDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str], *, told: bool = False) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    if told:
        process.stdin.write("go\n")
        process.stdin.flush()
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=30)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "runs" / "demo")


def test_of_many_processes_at_once_exactly_one_wins(paths: RunPaths) -> None:
    contenders = [contender(paths.root) for _ in range(20)]
    for process in contenders:
        assert answer(process) == "ready\n"
    for process in contenders:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [answer(process) for process in contenders]
    assert answers.count("won\n") == 1
    winner = contenders[answers.index("won\n")]
    holder = read_holder(paths)
    assert holder is not None
    assert holder["pid"] == winner.pid
    for process in contenders:
        end(process)


def test_a_killed_holder_is_taken_over_from_without_ceremony(paths: RunPaths) -> None:
    process = contender(paths.root)
    answer(process)
    assert answer(process, told=True) == "won\n"
    with pytest.raises(RunInUse, match=f"supervisor with pid {process.pid} on host"):
        RunLock(paths, "supervisor")
    process.send_signal(signal.SIGKILL)
    process.wait()
    end(process)
    assert read_holder(paths) is not None, "it died without a chance to clean up"
    lock = RunLock(paths, "rank 0")
    holder = read_holder(paths)
    assert holder is not None
    assert (holder["pid"], holder["role"]) == (os.getpid(), "rank 0")
    lock.release()


def test_a_second_holder_in_the_same_process_is_refused_until_the_first_releases(paths: RunPaths) -> None:
    first = RunLock(paths, "supervisor")
    with pytest.raises(RunInUse, match=r"since 0 min \d+ s") as caught:
        RunLock(paths, "supervisor")
    assert caught.value.exit_code == ExitCode.IN_USE
    assert "one guard, in front of all loops" in (caught.value.hint or "")
    first.release()
    assert read_holder(paths) is None
    RunLock(paths, "supervisor").release()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", "{}", '{"since": 3}', '{"since": "2030-01-01T00:00:00"}', '{"since": "yesterday"}', "[" * 9999],
)
def test_a_damaged_holder_file_spoils_neither_lock_nor_message(paths: RunPaths, text: str) -> None:
    lock = RunLock(paths, "supervisor")
    paths.holder.write_text(text)
    with pytest.raises(RunInUse, match="in use by") as caught:
        RunLock(paths, "supervisor")
    assert (caught.value.hint or "").startswith("wait for it")
    lock.release()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", r"in use by another process \(which has not said yet who it is\)"),
        (
            '{"role": "r", "pid": 4, "host": "h", "since": "2999-01-01T00:00:00+00:00"}',
            "r with pid 4 on host h, since 0 min 0 s",
        ),
        ('{"role": "r", "pid": 4, "host": "h", "since": "2020-01-01T00:00:00+00:00"}', r"h, since \d{4,} h \d+ min$"),
        ('{"role": "r", "pid": 4, "host": "h", "since": "then"}', "h, since an unknown time"),
    ],
)
def test_who_holds_it_and_since_when_is_said(paths: RunPaths, text: str, said: str) -> None:
    lock = RunLock(paths, "supervisor")
    paths.holder.write_text(text)
    with pytest.raises(RunInUse) as caught:
        RunLock(paths, "supervisor")
    assert re.search(said, caught.value.message), caught.value.message
    lock.release()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(59, "0 min 59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (90_059, "25 h 0 min")],
)
def test_for_how_long_it_is_held_is_said_in_minutes_or_hours(
    paths: RunPaths, seconds: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = datetime(2030, 1, 1, tzinfo=timezone.utc)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return began + timedelta(seconds=seconds)

    held = RunLock(paths, "supervisor")
    paths.holder.write_text(json.dumps({"since": began.isoformat()}))
    monkeypatch.setattr(lock, "datetime", Clock)
    with pytest.raises(RunInUse) as caught:
        RunLock(paths, "supervisor")
    assert caught.value.message.endswith(f"since {said}")
    held.release()


def test_who_holds_it_can_be_read(paths: RunPaths) -> None:
    lock = RunLock(paths, "supervisor")
    body = json.loads(paths.holder.read_text())
    assert body.keys() == {"pid", "start", "host", "since", "role"}
    lock.release()


def test_a_run_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a directory should be")
    with pytest.raises(RunDirectoryError, match="runs"):
        RunLock(RunPaths(tmp_path / "runs" / "demo"), "supervisor")


def test_another_thread_may_release_it(paths: RunPaths) -> None:
    lock = RunLock(paths, "supervisor")
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    RunLock(paths, "supervisor").release()


def test_the_name_of_a_launch_is_of_that_launch_alone_and_fits_into_a_request(paths: RunPaths) -> None:
    assert launch_of(paths) is None
    lock = RunLock(paths, "supervisor")
    holder = read_holder(paths)
    assert holder is not None
    assert launch_of(paths) == f"{holder['host']}:{os.getpid()}:{holder['since']}"
    paths.holder.write_text(json.dumps({**holder, "host": "h" * 300}))
    assert launch_of(paths) == "h" * 200
    paths.holder.write_text(json.dumps(holder))
    lock.release()
    lock.release()
    assert launch_of(paths) is None


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    paths, private = RunPaths(tmp_path / "run"), tmp_path / "private"
    paths.root.mkdir()
    private.write_text("a secret")
    for link in (paths.lock, paths.holder):
        link.symlink_to(private)
        with pytest.raises(RunDirectoryError, match=link.name):
            RunLock(paths, "test")
        link.unlink()
    assert private.read_text() == "a secret"


def test_a_directory_that_cannot_be_made_is_named_with_its_whole_path() -> None:
    with pytest.raises(RunDirectoryError, match="taking the lock /proc/nobody/run/lock"):
        RunLock(RunPaths(Path("/proc/nobody/run")), role="supervisor")


def moved(root: Path) -> None:
    """Moved with the lock in it, and made again, as ranks do that start."""
    root.rename(root.with_name("moved"))
    root.mkdir()


@pytest.mark.parametrize("lose", [moved, lambda root: (root / "lock").unlink()])
def test_a_lock_that_has_left_its_place_is_taken_anew(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    paths = RunPaths(tmp_path / "run")
    held = RunLock(paths, "supervisor")
    launch = launch_of(paths)
    lose(paths.root)
    assert not held.in_place
    held.keep()
    assert held.in_place
    assert launch_of(paths) == launch
    with pytest.raises(RunInUse):
        RunLock(paths, "another")
    held.release()
    RunLock(paths, "another").release()


def test_a_lock_that_another_launch_has_by_now_is_not_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    held = RunLock(paths, "supervisor")
    moved(paths.root)
    other = RunLock(paths, "another")
    with pytest.raises(RunInUse, match="another with pid"):
        held.keep()
    held.release()
    assert other.in_place
    assert read_holder(paths) is not None
    other.release()


def test_a_directory_that_is_gone_is_not_made_again_for_its_lock(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    held = RunLock(paths, "supervisor")
    paths.root.rename(tmp_path / "moved")
    held.keep()
    assert not paths.root.exists()
    held.release()


def test_a_lock_that_cannot_be_looked_at_for_a_moment_ends_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is away for a moment, while an attempt runs. Who comes then is told in words."""
    held, look = RunLock(paths, "rollback launch"), os.stat

    def refused(found: Any, *more: Any, **how: Any) -> os.stat_result:
        if found == paths.lock:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(found))
        return look(found, *more, **how)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refused)
        held.keep()
        with pytest.raises(RunDirectoryError, match=os.strerror(errno.ESTALE)):
            RunLock(paths, "rollback launch")
        with pytest.raises(RunDirectoryError, match=os.strerror(errno.ESTALE)):
            Claim(paths)
    with pytest.raises(RunInUse):
        RunLock(paths, "rollback launch")
    held.release()


class TestWithoutLocks:
    """A file system that has none, as Lustre where it is mounted without `-o flock`."""

    @pytest.fixture(autouse=True)
    def no_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(fd: int, how: int) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(fcntl, "flock", missing)

    @pytest.mark.filterwarnings("ignore:flock not supported")
    def test_a_file_that_another_host_has_left_is_named_with_what_to_do(self, paths: RunPaths) -> None:
        paths.root.mkdir(parents=True)
        paths.lock.write_text("27\nanother-host\n1\n")
        with pytest.raises(RunInUse) as refused:
            RunLock(paths, "rollback launch")
        assert refused.value.hint is not None
        assert refused.value.hint.endswith(
            f"; the file system has no locks (flock), so this is told by a file: where nobody is there, rm {paths.lock}"
        )

    def test_a_library_that_knows_no_other_way_is_no_traceback(
        self, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")

        monkeypatch.setattr(filelock.FileLock, "acquire", refuse)  # as filelock 3.15 does
        with pytest.raises(RunDirectoryError, match=r"taking the lock .* does not appear to support flock"):
            RunLock(paths, "rollback launch")
