"""`subprocess` for commands that begin with this Python, without its imports: `WarmPopen` and `run_warm`.

Where a test starts a command, its process is forked from a server that has imported torch once, for all processes of
pytest, and so is all that it starts (see `warm`). The server is a program of its own, since autograd does not survive a
fork and pytest's processes train. It ends with the last process that it works for. For commands whose environment names
further modules (`ENV_MODULES`) there is a server that has imported these as well.

    test ── asks ──> server ── forks ──> attendant ── forks ──> the command

The attendant waits for the command and writes down how it ended, since a test cannot wait for what is not its child.
"""

import fcntl
import functools
import gc
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, AnyStr, NoReturn

_NUMBER = struct.Struct("q")
ENV_MODULES = "TESTS_MODULES"
"""Modules to be imported besides torch, separated by blanks."""


class WarmPopen(subprocess.Popen[AnyStr]):
    """`subprocess.Popen` for `[sys.executable, ...]`. It knows no `preexec_fn`."""

    def _execute_child(
        self, args: Sequence[str | bytes | os.PathLike[str]], executable: Any, preexec_fn: Any, close_fds: bool,
        pass_fds: Sequence[int], cwd: Any, env: Any, startupinfo: Any, creationflags: int, shell: bool, p2cread: int,
        p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int, *more: Any,
    ) -> None:  # fmt: skip
        assert args[0] == sys.executable, args
        assert preexec_fn is None
        environment = dict(os.environ if env is None else env)
        order = {
            "arguments": [os.fsdecode(argument) for argument in args[1:]],
            "environment": environment,
            "folder": os.fspath(cwd or os.getcwd()),
            "new_session": more[5],
            "passed": [*pass_fds],
        }
        status, theirs = os.pipe()
        sheet = os.memfd_create("order")  # arguments and environment may be larger than a message can be
        try:
            with open(sheet, "wb", closefd=False) as file:
                file.write(json.dumps(order).encode())
            streams: list[int] = [
                own if number == -1 else number for own, number in enumerate((p2cread, c2pwrite, errwrite))
            ]
            socket.send_fds(_server(environment.get(ENV_MODULES, "")), [b"start"], [*streams, theirs, sheet, *pass_fds])
        finally:
            os.close(theirs)
            os.close(sheet)
        self._status = status
        self.pid = _read_number(status)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not self._has_ended():
            return 0, 0
        ended = _read_number(self._status)
        os.close(self._status)
        return self.pid, ended

    def _has_ended(self) -> bool:
        poll = select.poll()  # see `_ready`
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(0))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                if self.returncode is None and (found := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(found[1])  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run_warm(
    command: Sequence[str], *, timeout: float = 120.0, check: bool = False, capture_output: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` is, in text."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPopen(command, **{**more, "text": True}) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def run_torch_alone(command: Sequence[str], *, timeout: float, **more: Any) -> subprocess.CompletedProcess[str]:
    """As `run_warm`, for a job in which nothing of ours runs: once more where it stands still.

    A rank may do so as its group goes, behind all that it had to do: DDP's last reference to the group is dropped under
    the interpreter's lock, the group waits for a thread of gloo, and that for the lock.
    """
    try:
        return run_warm(command, timeout=timeout / 4, **more)
    except subprocess.TimeoutExpired:
        return run_warm(command, timeout=timeout, **more)


@functools.cache
def _server(modules: str) -> socket.socket:
    """A connection with the server that has imported `modules`. Whoever is the first to ask for it starts it."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _alone(modules):
        try:
            server.connect(_address(modules))
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(_address(modules))
                listener.listen()
                server.connect(_address(modules))
                subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno())], pass_fds=[listener.fileno()],
                    start_new_session=True, stdin=subprocess.DEVNULL,
                    env={**os.environ, ENV_MODULES: modules, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},  # see import_ahead
                )  # fmt: skip
    return server


def _address(modules: str) -> str:
    return f"\0{_file(modules)}"  # which no file has: it ends with the server


@contextmanager
def _alone(modules: str) -> Iterator[None]:
    """Nobody else starts, ends or calls this server meanwhile."""
    with open(_file(modules), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _file(modules: str) -> Path:
    """One for all processes of this session of pytest."""
    register = os.environ.get("TESTS_REGISTER") or tempfile.gettempdir()
    return Path(register, f"server-{hashlib.sha256(f'{__file__} {modules}'.encode()).hexdigest()[:16]}")


def _read_number(descriptor: int) -> int:
    """What an attendant has written. One that was killed has written nothing: its command counts as killed."""
    found = os.read(descriptor, _NUMBER.size)
    return int(_NUMBER.unpack(found)[0]) if found else int(signal.SIGKILL)


def _serve(listener: socket.socket) -> NoReturn:
    from warm import warm_up_here

    modules = os.environ[ENV_MODULES]
    warm_up_here()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how an attendant ended
    clients: list[socket.socket] = []
    while clients or _is_wanted(listener, modules):
        for ready in _ready([listener, *clients]):
            if ready is listener:
                clients.append(listener.accept()[0])
            elif not _answer(ready, [listener, *clients]):
                clients.remove(ready)
                ready.close()
    os._exit(0)


def _ready(sockets: Sequence[socket.socket], timeout: float | None = None) -> list[socket.socket]:
    """Those that somebody calls, or that have ended."""
    poll = select.poll()  # a select() knows the first 1,024 descriptors only, and pytest's processes have many
    of_number = {each.fileno(): each for each in sockets}
    for number in of_number:
        poll.register(number, select.POLLIN)
    return [of_number[number] for number, _ in poll.poll(timeout)]


def _is_wanted(listener: socket.socket, modules: str) -> bool:
    """Whether somebody has just called. Else nobody can any more."""
    try:
        with _alone(modules):
            called = bool(_ready([listener], 0))
            if not called:
                listener.close()
    except FileNotFoundError:  # its folder went with the session
        return False
    return called


def _answer(client: socket.socket, mine: list[socket.socket]) -> bool:
    """Do what this client asks for; False when it has ended."""
    try:
        asked, descriptors, _, _ = socket.recv_fds(client, 16, 8)
    except ConnectionError:
        return False
    if asked and os.fork() == 0:
        for each in mine:
            each.close()
        _attend(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return bool(asked)


def _attend(stdin: int, stdout: int, stderr: int, status: int, sheet: int, *passed: int) -> NoReturn:
    from warm import become

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(sheet, "rb") as file:
        file.seek(0)
        order = json.load(file)
    if (command := os.fork()) == 0:
        ended = 1
        try:
            os.dup2(stdin, 0)
            above = max(order["passed"], default=2) + 1  # where none is in the way of the numbers that are asked for
            out, err, *given = (fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in (stdout, stderr, *passed))
            for each, number in zip(given, order["passed"], strict=True):
                os.dup2(each, number)
            ended = become(
                order["arguments"], order["environment"], order["folder"], order["new_session"], out, err,
                order["passed"],
            )  # fmt: skip
        finally:
            os._exit(ended)
    for descriptor in (stdin, stdout, stderr, *passed):
        os.close(descriptor)
    os.write(status, _NUMBER.pack(command))
    _, how = os.waitpid(command, 0)
    os.write(status, _NUMBER.pack(how))
    os._exit(0)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
