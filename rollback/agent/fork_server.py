"""Ranks that are forked from a process which has imported torch already, instead of being started from nothing.

Importing torch and what the first optimizer step pulls in takes seconds, for every rank, at every start. Here it is
done once, and on a relaunch it has been done ahead (`rollback.supervisor.torchrun.standby`). Runs in torchrun's
process:

    torchrun's process ── forks ──> fork server ── forks, twice ──> rank

The fork server is forked when everything is imported and before torchrun begins, so it has one Python thread, no
sockets, and no CUDA context; it does nothing but fork. The rank's intermediate parent ends at once, and torchrun's
process, as the subreaper, becomes the rank's parent: it waits for it and signals it as if it had started it.

A rank begins as `python -u SCRIPT` would: its own session, environment, argv, path, `__main__`, streams and random
states. What an import reads from the environment, it has read before the script could set it: `--no-preload` is for
scripts that rely on that. Modules (-m) and programs are started by torchrun as ever.
"""

import builtins
import contextlib
import ctypes
import errno
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

import rollback
from rollback.agent.shortage import RankNotForked, is_of_shortage
from rollback.instructions import FORK_SERVER

_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36
_STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
_IS_SAFE_PATH = getattr(sys.flags, "safe_path", False)
"""Whether Python was told to look for no module in the script's folder (PYTHONSAFEPATH)."""
# What a rank needs before and in its first step: the last is what torch's optimizers import when they first step.
AHEAD = ("torch", "torch.distributed", "torch._dynamo")


def import_ahead() -> None:
    """Import what ranks will need. One that is missing or broken will be told by the rank that needs it.

    The environment stays as it is: what an import sets there (torch's compiler, a folder for its cache), ranks would
    find set before they have imported anything.
    """
    before = dict(os.environ)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask the driver itself whether there is a GPU breaks forks
    for name in AHEAD:
        with contextlib.suppress(Exception):  # what is broken raises anything
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _ = rollback.Guard  # its module is imported when it is first asked for
    os.environ.clear()
    os.environ.update(before)


def settle_objects() -> None:
    """Before a fork: let no later collection write to, and so copy, the pages that are shared then."""
    gc.collect()
    gc.freeze()


def name_this_process(name: str) -> None:
    """What `ps -o comm` and `top` show; at most 15 characters. Command lines are all alike: that of torchrun."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _fork() -> int:
    """As `os.fork`; the negative errno where the system refuses (`ulimit -u`, a container's limit, no memory)."""
    try:
        return os.fork()
    except OSError as error:
        return -(error.errno or errno.EAGAIN)


def _refused(number: int) -> RankNotForked:
    hint = "raise the limit of processes (ulimit -u, or the container's pids), or make room in memory"
    return RankNotForked(f"forking a rank: {os.strerror(-number)}; {hint}")


class ForkServer:
    """The process that forks ranks. Make it in the main thread, with everything imported, before any thread starts.
    Raises RankNotForked."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settle_objects()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)  # torchrun's handler must not run in the child
        server = _fork()
        is_child = server == 0
        if is_child:
            for number in _STOPS:
                signal.signal(number, signal.SIG_IGN)  # it ends with torchrun's process, whatever is sent to the group
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if is_child:
            ours.close()
            _serve(theirs)
        if server < 0:
            raise _refused(server)
        theirs.close()
        self._socket = ours

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int) -> "ForkedRank":
        """A rank that runs `arguments` (script first). Raises RankNotForked."""
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        folder = os.open(".", os.O_RDONLY)  # the script's arguments may name files relative to it
        sheet = os.memfd_create("rank")  # arguments and environment may be larger than a message can be
        try:
            with open(sheet, "wb", closefd=False) as file:
                file.write(request)
            with contextlib.suppress(ConnectionError):
                socket.send_fds(self._socket, [b"fork"], [stdout, stderr, folder, sheet])
                if answer := int(self._socket.recv(64) or 0):
                    if answer < 0:
                        raise _refused(answer)
                    return ForkedRank(answer)
        finally:
            os.close(folder)
            os.close(sheet)
        # A rank may exist all the same, so it is not started in another way.
        raise RankNotForked("a process that was forking a rank was killed")

    def start_script(self, arguments: Sequence[str]) -> "ForkedRank":
        """Not a rank, but what else has to be there at once. Raises RankNotForked."""
        return self.start(arguments, os.environ, 1, 2)


class ForkedRank:
    """What torchrun wants of a `subprocess.Popen`, for a child that somebody else has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout or 0.0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def start_ranks_from(fork_server: ForkServer) -> None:
    """From now on torchrun starts ranks by it, where they are Python scripts without wrappers around them."""
    handlers: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.subprocess_handler")

    class Handler(handlers.SubprocessHandler):  # type: ignore[misc]
        def _popen(self, args: Sequence[str], env: Mapping[str, str]) -> Any:
            if not _is_plain_script(args):
                return super()._popen(args, env)
            streams = ((self._stdout, 1), (self._stderr, 2))
            stdout, stderr = (stream.fileno() if stream else number for stream, number in streams)
            return fork_server.start(args[2:], env, stdout, stderr)

    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    api.get_subprocess_handler = Handler


def _is_plain_script(command: Sequence[str]) -> bool:
    """Whether torchrun is about to run `python -u SCRIPT ...` with our own interpreter, and SCRIPT is Python source.

    Python also runs folders and archives with a `__main__.py`, and compiled files: those it is left to find its way in.
    """
    if len(command) < 3 or command[0] != sys.executable or command[1] != "-u" or command[2].startswith("-"):
        return False
    script = Path(command[2])
    return script.is_file() and script.suffix != ".pyc" and not zipfile.is_zipfile(script)


def _serve(requests: socket.socket) -> None:
    """The fork server: forks a rank for each request, and ends when the other end is closed."""
    name_this_process(FORK_SERVER)
    while True:
        asked, descriptors = b"", list[int]()
        with contextlib.suppress(ConnectionError):  # torchrun's process was killed, and had not read an answer
            asked, descriptors, _, _ = socket.recv_fds(requests, 64, 4)
        if not asked:
            os._exit(0)
        reader, writer = os.pipe()
        if (between := _fork()) == 0:
            between = os.getpid()
            if (pid := _fork()) != 0:
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:  # whose end a script must not take for torchrun's
                time.sleep(0.001)
            requests.close()
            os.close(reader)
            os.close(writer)
            for number in _STOPS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            *descriptors, sheet = descriptors
            with open(sheet, "rb") as file:
                file.seek(0)
                request = json.load(file)
            _be_rank(request, descriptors)
        if between > 0:
            os.waitpid(between, 0)  # from here on the rank is the child of torchrun's process
        else:
            os.write(writer, str(between).encode())
        os.close(writer)
        with contextlib.suppress(ConnectionError):  # it was killed meanwhile: there will be no other request
            requests.send(os.read(reader, 64))
        for descriptor in [reader, *descriptors]:
            os.close(descriptor)


def _be_rank(request: Mapping[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Become what `python -u SCRIPT ARGUMENTS` would be; leave by SystemExit, so that Python ends as it always does."""
    os.setsid()
    stdout, stderr, folder = descriptors
    os.fchdir(folder)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for descriptor in descriptors:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    name_this_process(f"rank {os.environ.get('RANK', '?')}")
    sys.stdout = sys.__stdout__ = _unbuffered(1, sys.__stdout__)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _unbuffered(2, sys.__stderr__)  # type: ignore[misc]
    if _is_spoiled():
        os.execv(sys.executable, [sys.executable, "-u", *request["arguments"]])
    _as_in_a_new_process()
    if not _IS_SAFE_PATH:
        sys.path.insert(0, "")
    run_script(list(request["arguments"]))


def _unbuffered(descriptor: int, like: Any) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, like.encoding, like.errors, write_through=True)


def _is_spoiled() -> bool:
    """Whether torch would refuse a GPU to this process: one that it was forked from has asked the driver for GPUs. (No
    import of this torch does so under `import_ahead`; one of another torch may.)"""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _as_in_a_new_process() -> None:
    """What a new process draws or reads at its start and a forked one has inherited."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads):
            sys.modules["torch"].set_num_threads(int(threads))


def _compiled(source: bytes, filename: str) -> types.CodeType:
    return compile(source, filename, "exec", dont_inherit=True)


def run_script(
    arguments: list[str],
    read: Callable[[bytes, str], types.CodeType] = _compiled,
    at_end: Callable[[], object] = lambda: None,
) -> NoReturn:
    """Be what `python -u SCRIPT ARGUMENTS` would be from its first line on. read: makes code of the source of the file
    of that name. at_end: called behind the last line, and where the script leaves as if all were well."""
    script = arguments[0]
    if not os.path.isabs(script):  # so Python names it, wherever the script goes then
        script = os.path.join(os.getcwd(), script.removeprefix("./"))
    sys.argv = arguments
    if not _IS_SAFE_PATH:
        sys.path[0] = str(Path(os.path.realpath(script)).parent)
        _make_way_for(sys.path[0])
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=script, __builtins__=builtins, __cached__=None, __annotations__={},
        __loader__=SourceFileLoader("__main__", script),
    )  # fmt: skip
    sys.modules["__main__"] = main
    try:
        with io.open_code(script) as file:
            code = read(file.read(), script)
        exec(code, main.__dict__)
    except SystemExit as left:
        if left.code not in (None, 0):  # also of an empty text the status is 1
            raise
    except BaseException as error:  # noqa: BLE001 - this is where Python's own top level would be
        trimmed = error.with_traceback(_from_script_on(error, script))
        _tell_torchrun(trimmed)
        sys.excepthook(type(trimmed), trimmed, trimmed.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    at_end()
    sys.exit(0)


def _make_way_for(folder: str) -> None:
    """Forget what was imported ahead by the name of a module in the script's folder, where `python -u SCRIPT` looks
    first. Who has imported it keeps it. What Python itself imports before any script stands in front of `rollback`."""
    imported = [name.partition(".")[0] for name in sys.modules]
    begin = imported.index("rollback")
    with contextlib.suppress(OSError):
        beside = {name.partition(".")[0] for name in os.listdir(folder)}
        for name in beside & {*imported[begin:]} - {*imported[:begin], "rollback"}:
            meant = PathFinder.find_spec(name, [folder])
            known = getattr(sys.modules.get(name), "__file__", None)  # None: built in, which no file stands before
            if meant and meant.has_location and known and not os.path.samefile(str(meant.origin), known):
                for forgotten in [one for one in sys.modules if one.partition(".")[0] == name]:
                    del sys.modules[forgotten]


def _from_script_on(error: BaseException, script: str) -> types.TracebackType | None:
    """Without the frames of rollback in front, which the reader of a traceback has not called. Of a script that is no
    Python nothing is left: Python shows no frame either."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename != script:
        first = first.tb_next
    return first if first or isinstance(error, SyntaxError) else error.__traceback__


def _tell_torchrun(error: BaseException) -> None:
    """Leave the error where torchrun looks for it, as its decorator for main functions does, unless the script did."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    told = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        "shortage": is_of_shortage(error),
    }
    try:
        Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")
    except OSError:
        return  # torchrun then knows the exit code only
