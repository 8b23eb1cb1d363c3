"""Processes forked from one that has imported torch already, where `rollback launch` and torchrun start a Python.

Nine tenths of an attempt of a toy job are imports. `WarmPython` stands in for `subprocess.Popen` and does everything
else as the real thing: the supervisor, torchrun and each rank are processes of their own, with the sessions, the
environments and the signals that they would have. As a program, `python warm.py [-u] -m MODULE | -c CODE | SCRIPT ...`
is what Python would be, and all that it starts is forked. A test gets such a process from `warm_server`.

What a fork does otherwise than an exec is put right here: handlers and open files (among them the lock of the run
directory) are not passed on, and `psutil.Process.environ`, which reads what a process was exec'ed with, is answered
from a register that every fork enters itself into.
"""

import atexit
import contextlib
import importlib.util
import io
import itertools
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from warm_server import ENV_MODULES

from rollback.agent.fork_server import import_ahead
from rollback.agent.overrides import name_methods_quickly
from rollback.supervisor.nodes import store
from rollback.supervisor.torchrun import host, processes, standby
from rollback.system.processes import start_of
from rollback.train.advice.carried_tensors import _needed_in

_OF_COMMANDS = (
    "rollback.cli", "rollback.supervisor.supervise", "rollback.agent.streams", "rollback.live.panel_screen",
    "rollback.trackers.tensorboard", "rollback.trackers.wandb", "rollback.inspect.audit.text",
    "rollback.inspect.status.text", "rollback.inspect.why.text", "rollback.control.asking",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "encodings.idna",
)  # fmt: skip
_OF_SCRIPTS = [name for name in ("boto3",) if importlib.util.find_spec(name) is not None]
"""Two thirds of what it takes to import Accelerate, which is watched itself when a script does."""
_READ = ("toy.py", "trainer_job.py", "probed.py")
"""The loops of toy jobs. Every process that trains in one reads its source: two thirds of the time of ten steps."""
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGALRM)
_LOOKED_UP = 10  # seconds in which a name of this host is, however busy it is
ENV_REGISTER = "TESTS_REGISTER"
_register = Path(os.environ.get(ENV_REGISTER) or tempfile.gettempdir())


def warm_up(register: Path) -> None:
    """Import what attempts and commands import. `register`: a folder for the environments of those that are forked,
    which outlives them: a supervisor looks for what a killed one has left."""
    global _register  # noqa: PLW0603 - what is called at a fork can be handed nothing
    _register = register
    name_methods_quickly()  # the more modules there are, the dearer: 0.7 s of each torchrun
    import_ahead()  # no more: an optimizer's step asks a GPU whether it is recording, and ends its use in forks
    for module in (*_OF_COMMANDS, *_OF_SCRIPTS, *os.environ.get(ENV_MODULES, "").split()):
        importlib.import_module(module)
    for name in _READ:
        _needed_in(str(Path(__file__).with_name(name)))


def warm_up_here() -> None:
    """The same, for whatever is forked from this process."""
    warm_up(_register)
    _start_warm_from_here()
    _enter_register()


def come_to_a_host(register: Path) -> None:
    """It counts its own pids, and has a name that an import may have read before this process had it."""
    global _register  # noqa: PLW0603 - as above
    _register = register
    _enter_register()
    for module in (host, processes):
        vars(module)["THIS_HOST"] = socket.gethostname()


def environment_of(process: psutil.Process) -> dict[str, str]:
    """Environment of a process that was started warm (its ROLLBACK_ variables) or not. Raises psutil.Error."""
    try:
        lines = _entry(process).read_text().splitlines()
    except FileNotFoundError:
        return _environ(process)
    return dict(line.split("=", 1) for line in lines)


_environ = psutil.Process.environ


_mask = threading.local()


def _hold_signals() -> None:
    """A handler of the process that forks must not run in the middle of what follows."""
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _enter_register_unsignalled() -> None:
    _enter_register()
    with contextlib.suppress(Exception):  # what a handler raises here the interpreter drops, too, but shows it
        _release_signals()


def _enter_register() -> None:
    lines = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("ROLLBACK_")]
    _entry(psutil.Process()).write_text("\n".join(lines))


def _entry(process: psutil.Process) -> Path:
    """A pid is used again."""
    return _register / f"warm-{process.pid}-{(start_of(process.pid) or 'gone').partition('@')[0]}"


def _fork_with_names() -> int:
    """As `os.fork`. Where another thread was looking up a name at that moment, the lock of the C library's resolver
    stays taken in the child for ever: such a child ends at once, and there is another fork."""
    while True:
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reading)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
            signal.alarm(_LOOKED_UP)
            socket.getaddrinfo("localhost", None)
            signal.alarm(0)
            os.write(writing, b"!")
            os.close(writing)
            return 0
        os.close(writing)
        has_names = bool(os.read(reading, 1))
        os.close(reading)
        if has_names:
            return pid
        os.waitpid(pid, 0)


class WarmPython:
    """What is used of `subprocess.Popen`, for commands that begin with this Python."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_new_session: bool = False,
        stdout: Any = None,
        stderr: Any = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.args, self.returncode = args, None
        assert args[0] == sys.executable, args
        sys.stdout.flush()
        sys.stderr.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # none of our handlers is to run in the child
        self.pid = _fork_with_names()
        if self.pid == 0:
            status = 1
            try:
                status = become(args[1:], env, cwd, start_new_session, stdout, stderr, pass_fds)
            finally:
                os._exit(status)  # whatever was raised: what lies above in the stack is the parent's, to be ended by it
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    returncode: int | None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has collected it: `subprocess` takes that for 0, too
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + timeout if timeout is not None else float("inf")
        while (status := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def become(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    new_session: bool,
    stdout: Any,
    stderr: Any,
    pass_fds: Sequence[int] = (),
) -> int:
    """In the child: be the Python that was asked for, until it ends; its exit status."""
    atexit._clear()  # what the parent is to do at its end
    threading._threading_atexits.clear()  # type: ignore[attr-defined]
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    for stream, own in ((stdout, 1), (stderr, 2)):
        if stream is subprocess.STDOUT:
            os.dup2(1, own)
        elif stream is subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDWR), own)
        elif stream is not None:
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), own)
    kept = [2, *sorted(pass_fds), 1 << 16]
    for below, above in itertools.pairwise(kept):
        os.closerange(below + 1, above)
    _start_warm_from_here()
    if new_session:
        os.setsid()
    if cwd is not None:
        os.chdir(cwd)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    _enter_register()
    return run(list(arguments))


def run(arguments: list[str]) -> int:
    """Be the Python that was given these; its exit status."""
    return _exit_status(lambda: _run_python(arguments))


def _start_warm_from_here() -> None:
    """Also what this process starts, the supervisor torchrun and its spare, and torchrun the ranks, is forked."""
    if psutil.Process.environ is _environ:
        os.register_at_fork(
            before=_hold_signals, after_in_parent=_release_signals, after_in_child=_enter_register_unsignalled
        )
        psutil.Process.environ = environment_of  # type: ignore[method-assign, assignment]
    vars(host)["start"] = _start
    for module in (standby, store):
        vars(module)["subprocess"] = SimpleNamespace(Popen=WarmPython, DEVNULL=subprocess.DEVNULL)
    vars(subprocess_handler)["Popen"] = WarmPython


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    stdout: int | None = None,
    stderr: int | None = None,
) -> WarmPython:
    return WarmPython(command, env=environment, start_new_session=True, stdout=stdout, stderr=stderr)


def _run_python(arguments: list[str]) -> None:
    if arguments[0] == "-u":
        arguments.pop(0)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _exit_status(program: Callable[[], None]) -> int:
    status = _status_of(program)
    for end in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:  # what the interpreter does at its end, and os._exit does not
            end()
        except BaseException:  # noqa: BLE001 - as it would
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _status_of(program: Callable[[], None]) -> int:
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - the child must not run on in its parent's loop
        sys.excepthook(type(error), error, error.__traceback__)  # as the interpreter would
        return 1
    return 0


if __name__ == "__main__":
    warm_up_here()
    os._exit(run(sys.argv[1:]))
