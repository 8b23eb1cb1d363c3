"""What a signal means to a rank with a guard, and to its loader workers."""

import array
import fcntl
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
from selection import soak
from torch.utils.data import DataLoader, Dataset
from waiting import wait_for
from warm_server import WarmPopen

from rollback.environment import ENV_SUPERVISOR
from rollback.errors import StateRefused
from rollback.rundir.failures import read_failures
from rollback.rundir.heartbeats import LEAVING, read_all_heartbeats
from rollback.rundir.paths import RunPaths
from rollback.system.processes import name_process
from rollback.train.data.workers import LeavesStoppingToTheRank, leave_stopping_to_the_rank
from rollback.train.process import stopping
from rollback.train.process.stopping import ExitOrder, StopRequest, end_with_supervisor

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
LIMIT = 30.0


@pytest.fixture(autouse=True)
def dispositions() -> Iterator[None]:
    """As at the start of a script, whatever the test does with them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_each_of_them_is_a_stop_until_the_request_is_withdrawn(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    assert not stop.requested
    signal.raise_signal(number)
    assert stop.requested
    stop.withdraw()
    assert signal.getsignal(number) == before


def test_a_second_interrupt_is_an_interrupt() -> None:
    StopRequest()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_while_the_script_waits_for_its_terminal_is_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python writes nothing to a stream of which it is just writing a line: what we would say is not heard then."""
    read, write = os.pipe()
    monkeypatch.setattr(sys, "stderr", os.fdopen(write, "w"))
    stop, main, more = StopRequest(), threading.get_ident(), 1 << 20

    def interrupt_and_read() -> None:
        waiting = array.array("i", [0])
        while waiting[0] < fcntl.fcntl(read, fcntl.F_GETPIPE_SZ):
            fcntl.ioctl(read, termios.FIONREAD, waiting)
        signal.pthread_kill(main, signal.SIGINT)
        while not stop.requested:
            os.sched_yield()
        left = more
        while left:
            left -= len(os.read(read, left))

    reader = threading.Thread(target=interrupt_and_read)
    reader.start()
    sys.stderr.write("x" * more)
    sys.stderr.flush()
    reader.join()
    sys.stderr.close()
    os.close(read)
    assert stop.requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_the_script_uses_itself_is_no_stop(number: signal.Signals) -> None:
    told: list[int] = []
    signal.signal(number, lambda number, frame: told.append(number))
    stop = StopRequest()
    signal.raise_signal(number)
    assert told == [number]
    assert not stop.requested


def test_sigterm_is_a_stop_and_the_script_is_told_too() -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    stop = StopRequest()
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM]
    assert stop.requested
    assert stop.script_was_told


def test_a_hang_up_that_was_ignored_from_the_start_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0")
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    stop = StopRequest()
    signal.raise_signal(signal.SIGHUP)
    assert not stop.requested
    signal.raise_signal(signal.SIGUSR1)  # the supervisor has it ignored, for as long as there is no guard
    assert stop.requested


def test_a_hang_up_is_a_stop_also_where_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where all descriptors are in use: it would be an error in the midst of the script."""
    stop = StopRequest()
    monkeypatch.setattr(os, "devnull", str(tmp_path / "none" / "null"))
    signal.raise_signal(signal.SIGHUP)
    assert stop.requested


def test_an_ignored_signal_of_an_unsupervised_job_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SUPERVISOR, raising=False)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    stop = StopRequest()
    signal.raise_signal(signal.SIGUSR1)
    assert not stop.requested


def test_a_script_without_a_handler_of_its_own_is_told_nothing() -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
    assert stop.requested
    assert not stop.script_was_told


@pytest.mark.parametrize(("supervised", "ends"), [(True, 7), (False, -signal.SIGTERM)])
def test_a_rank_that_leaves_as_it_was_told_is_not_struck_down_by_a_supervisor_that_tells_it_again(
    supervised: bool, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0" if supervised else "")
    child = os.fork()
    if child == 0:
        stop = StopRequest()
        stop.obey()
        stop.withdraw()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == ends


@pytest.mark.parametrize(
    ("supervised", "handler", "ends"),
    [(True, signal.SIG_DFL, -signal.SIGTERM), (False, signal.SIG_DFL, 7), (True, lambda *_: None, 7)],
    ids=["under a supervisor", "without one", "with a handler of its own"],
)
def test_a_rank_that_was_told_to_end_while_it_failed_ends_once_its_guard_is_closed(
    supervised: bool, handler: Any, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0" if supervised else "")
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, handler)
        stop = StopRequest()
        stop.heed()  # nobody has told it yet
        os.kill(os.getpid(), signal.SIGTERM)
        stop.withdraw()
        stop.heed()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == ends


@pytest.mark.parametrize("number", SIGNALS)
def test_what_a_guard_was_told_that_does_not_come_about_takes_its_course(number: signal.Signals) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        stop = StopRequest()
        signal.raise_signal(number)
        try:
            stop.give_up()
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (7 if number == signal.SIGINT else -number)


def test_an_interrupt_hides_no_other_signal_where_no_guard_comes_about() -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop = StopRequest()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        try:
            stop.give_up()
        except KeyboardInterrupt:  # a script may catch that, as at a prompt
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


def test_a_handler_of_the_script_s_is_called_once_where_no_guard_comes_about() -> None:
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    stop = StopRequest()
    signal.raise_signal(signal.SIGTERM)
    stop.give_up()
    assert told == [signal.SIGTERM]
    signal.raise_signal(signal.SIGTERM)
    assert told == [signal.SIGTERM] * 2


TOLD_TO_END = """
import atexit, os, signal, sys, torch
from torch import nn
import rollback
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
atexit.register(print, "exit handler", flush=True)
for x in rollback.Guard(model=model, optimizer=optimizer, loader=[torch.ones(2, 4)] * 4, run=sys.argv[1]):
    os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[2] == "fails":
        raise ValueError("a peer is gone")
    model(x).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("way", "status", "ends"), [("fails", -signal.SIGTERM, ""), ("stops", 0, "exit handler\n")], ids=["fails", "stops"]
)
def test_a_rank_that_fails_is_struck_down_behind_its_record_and_one_that_stops_is_not(
    way: str, status: int, ends: str, tmp_path: Path
) -> None:
    environment = {**os.environ, ENV_SUPERVISOR: name_process(os.getpid())}
    command = [sys.executable, "-c", TOLD_TO_END, str(tmp_path / "run"), way]
    rank = WarmPopen[str](command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    told, _ = rank.communicate(timeout=LIMIT)
    assert (rank.returncode, told) == (status, ends)
    recorded = [record.message for record in read_failures(RunPaths(tmp_path / "run").failures(1)).values()]
    assert recorded == (["a peer is gone"] if way == "fails" else [])
    beats = read_all_heartbeats(RunPaths(tmp_path / "run"))
    assert [beat.doing for beat in beats.values()] == ["ended" if way == "fails" else LEAVING]


def test_what_a_leaving_rank_starts_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pool of processes at its end, as well as by `terminate()`: neither would come back."""
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0")
    child = os.fork()
    if child == 0:
        StopRequest().obey()
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.map(abs, [1])
        started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        started.terminate()
        os._exit(started.wait() == -signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_process_that_was_forked_off_can_still_be_ended(number: signal.Signals) -> None:
    StopRequest()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
        time.sleep(LIMIT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -number


# --- loader workers ---------------------------------------------------------------------------------------------------


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def initialised(worker: int) -> None:
    assert worker in (0, 1)


@pytest.mark.parametrize("context", ["fork", *soak("spawn")])
def test_workers_outlive_the_signals_that_stop_their_rank(context: str) -> None:
    loader: DataLoader[Any] = DataLoader(
        Pids(), batch_size=None, num_workers=2, worker_init_fn=initialised, multiprocessing_context=context
    )
    leave_stopping_to_the_rank(loader)
    leave_stopping_to_the_rank(loader)
    assert isinstance(loader.worker_init_fn, LeavesStoppingToTheRank)
    assert loader.worker_init_fn.then is initialised
    reading = iter(loader)
    workers = {next(reading) for _ in range(10)}
    for pid in workers:
        for number in SIGNALS:
            os.kill(pid, number)
    assert {next(reading) for _ in range(100)} == workers
    ended = [psutil.Process(pid) for pid in workers]
    reading._shutdown_workers()  # type: ignore[attr-defined]
    _, alive = psutil.wait_procs(ended, timeout=LIMIT)
    assert not alive


STUCK = """
import atexit, os, time
from torch.utils.data import DataLoader, _utils
from rollback.train.data.workers import leave_stopping_to_the_rank, shut_down

_utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds for which torch waits for a worker, 5 by default

class Stuck(list):
    def __getitem__(self, index):
        while index:
            time.sleep(0.05)
        return os.getpid()

loader = DataLoader(Stuck(range(100)), batch_size=None, num_workers=1)
leave_stopping_to_the_rank(loader)
reading = iter(loader)
atexit.register(shut_down, reading)
print(next(reading), flush=True)
input()
"""


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has taken it off the list of processes yet: an orphan goes to whichever process takes orphans."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("killed", [False, True])
def test_a_stuck_worker_ends_with_its_rank(killed: bool) -> None:
    """At the rank's exit, and when it is killed and the supervisor then ends what is left of it."""
    rank = WarmPopen[str]([sys.executable, "-c", STUCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    worker = psutil.Process(int(rank.stdout.readline()))
    if killed:
        rank.kill()
        rank.wait()
        worker.terminate()
    else:
        rank.communicate("\n", timeout=LIMIT)
    wait_for(lambda: has_ended(worker))


LAUNCHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
input()
"""
RANK_BELOW = """
import threading
from rollback.train.process.stopping import end_with_supervisor
end_with_supervisor(lambda gone: None)
print("here", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("supervisor_lives", [True, False])
def test_a_rank_that_ends_for_want_of_torchrun_says_whether_the_supervisor_lives(supervisor_lives: bool) -> None:
    """If it does, it goes on by itself, and nobody has to run a command again."""
    supervisor = WarmPopen[str]([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    torchrun = WarmPopen[str](
        [sys.executable, "-c", LAUNCHER, RANK_BELOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, ENV_SUPERVISOR: name_process(supervisor.pid)},
    )  # fmt: skip
    try:
        assert torchrun.stdout is not None
        assert torchrun.stdout.readline() == "here\n"
        gone = torchrun if supervisor_lives else supervisor
        gone.kill()
        gone.wait()
        told = torchrun.stdout.readline()
        assert ("sees to what comes next" in told) == supervisor_lives
        assert ("run the same command again" in told) != supervisor_lives
    finally:
        for process in (supervisor, torchrun):
            process.kill()
            process.communicate()


def test_a_child_that_ends_by_itself_meanwhile_does_not_keep_the_rank_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write the run directory beside the ranks of the next attempt."""

    class Ended:
        def kill(self) -> NoReturn:
            raise psutil.NoSuchProcess(1)

    ended: queue.Queue[int] = queue.Queue()
    monkeypatch.setenv(ENV_SUPERVISOR, "1:0.0")
    monkeypatch.setattr(stopping, "is_running", lambda described: False)
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive: [Ended()])
    monkeypatch.setattr(os, "_exit", ended.put)
    end_with_supervisor(lambda gone: None)
    assert ended.get(timeout=LIMIT) == 1


# --- a rank that was told to leave, and goes on all the same ----------------------------------------------------------


def test_who_was_not_told_to_leave_stays() -> None:
    ExitOrder().require_none()


@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize(("told", "status"), [(SystemExit(75), 75), (StateRefused("not mine", hint="mend it"), 1)])
def test_a_rank_that_does_not_leave_is_ended_again_and_then_by_force_under_a_supervisor(
    told: SystemExit | StateRefused, status: int, supervised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_force(status: int) -> NoReturn:
        raise ProcessLookupError(status)

    monkeypatch.setenv(ENV_SUPERVISOR, "1" if supervised else "")
    monkeypatch.setattr(os, "_exit", by_force)
    exit_order = ExitOrder()
    exit_order.note(told)
    with pytest.raises(type(told)) as again:
        exit_order.require_none()
    assert vars(again.value) == vars(told)
    assert str(again.value) == str(told)
    kind, text = (ProcessLookupError, str(status)) if supervised else (type(told), str(told))
    with pytest.raises(kind, match=text):
        exit_order.require_none()
