"""The output of the ranks: goes into a file for each attempt and rank. The first rank of this node is also shown.

While the script is not known to have a guard, all ranks are shown, as under torchrun.

A thread reads the pipes that torchrun's process makes for its ranks (`rollback.agent.streams`). It waits for output
only. It counts what a full disk loses, and leaves the terminal to the audience.

Where the user's flags decide about the output (`--tee`, `--redirects`, `--log-dir` and others), torchrun handles it.
"""

import contextlib
import fcntl
import os
import selectors
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from rollback.errors import RollbackError
from rollback.instructions import LOGS_SPECS
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.system import files
from rollback.system.durable import write_all
from rollback.system.threads import start_thread

Stream = Literal["out", "err"]

# Flags that decide about the output. `run-path` is one of them: what torchrun then starts cannot write to a pipe.
_OUTPUT_FLAGS = (
    "log-dir", "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
    "logs-specs", "run-path",
)  # fmt: skip
_TORCHRUN = "torchrun"
_LOOK_EVERY = 0.05  # for pipes of new ranks, where nothing is printed
_CHUNK = 1 << 16
_PIPE_SIZE = 1 << 20
_LAST_WORDS = 4096
_TRACEBACK = b"Traceback (most recent call last)"
HELD_FOR = 20.0  # seconds; then the exception of a rank that does not end is shown
_HELD_AT_MOST = 1 << 20
_TOLD_AT_MOST = 400  # characters of an exception that only follows from another rank's failure
# All output is kept. The supervisor reports this size, and each doubling of it.
GROWN = 1 << 30
# The most that is kept before there is a run directory: a script without a guard may print for weeks.
_BEFORE_IT_IS_KEPT = 64 << 20


def user_decides(job: LaunchedJob) -> bool:
    """Whether the user's flags decide about the output."""
    return any(job.flags.get(name) for name in _OUTPUT_FLAGS)


class Audience(Protocol):
    """The person at the terminal. No method waits. All methods may be called from any thread."""

    @property
    def captures(self) -> bool:
        """Whether all output of the job goes through `show`, torchrun's own included."""

    def say(self, text: str) -> None:
        """Show a line of the supervisor, or several."""

    def show(self, stream: Stream, data: bytes) -> None:
        """Show a piece of the job's output."""


@dataclass
class _Source:
    """One stream of one process, and the file that keeps it."""

    fd: int
    name: str
    stream: Stream
    rank: int | None
    """None: torchrun's own stream."""
    last: bytes = b""
    """The end of the stream."""
    lost: int = 0
    """Bytes that could not be kept."""


@dataclass
class AttemptOutput:
    """How to start torchrun: its flags, and the descriptors for its own output."""

    job: LaunchedJob
    stdout: int | None = None
    """None: the supervisor's own."""
    stderr: int | None = None
    """None: the supervisor's own."""


@dataclass
class Output:
    """The output of one launch, over all its attempts.

    Until `keep` is called, the files are made in `private`: a job that its ranks refuse, or that has no guard,
    leaves no trace in the run directory.

    The exception that ends the first rank often only follows from another rank's death. So the supervisor holds
    what that rank writes to stderr, from the traceback on, until `release`: the account of who failed first is
    shown first.
    """

    private: Path
    folder_of: Callable[[int], Path]
    """The folder for the files of an attempt."""
    audience: Audience
    guarded: Callable[[], bool] = lambda: True
    """Whether the script is known to have a guard."""
    is_ending: Callable[[int, int], bool] = lambda attempt, rank: False
    """Whether a rank of an attempt has recorded the exception that ends it. A rank records it before it prints it.
    Asked when a traceback is printed, since a script may print one and go on."""
    _held: bytes = b""
    _held_since: float = 0.0
    _attempt: int = 0
    _kept: bool = False
    _sources: list[_Source] = field(default_factory=list)
    _files: dict[str, int] = field(default_factory=dict)
    _written: int = 0
    _said: int = GROWN
    _complained: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def of_attempt(self, attempt: int, job: LaunchedJob) -> Iterator[AttemptOutput]:
        """Read the output of an attempt inside the `with` block. All processes must be gone at its end."""
        self.release()
        self._attempt, self._sources = attempt, []
        by_user = user_decides(job)
        if by_user and not self.audience.captures:
            yield AttemptOutput(job)
            return
        ends: list[int] = []
        over, watched = threading.Event(), contextlib.ExitStack()
        try:  # one number may be that of two attempts: who leads after a lost leader counts from an older record
            pipes = Path(tempfile.mkdtemp(prefix=f"pipes-{attempt}-", dir=self.private))
            ends.append(self._own_pipe("out"))
            ends.append(self._own_pipe("err"))
            selector = watched.enter_context(selectors.DefaultSelector())
            for source in self._sources:
                selector.register(source.fd, selectors.EVENT_READ, source)
            pump = threading.Thread(target=self._pump, args=(selector, pipes, over), name="rank output", daemon=True)
            start_thread(pump)
        except (OSError, RollbackError) as error:
            watched.close()
            for fd in (*ends, *(source.fd for source in self._sources)):
                os.close(fd)
            self._sources = []
            self._complain(f"making pipes in {self.private}", error)
            yield AttemptOutput(job)
            return
        if not by_user:
            job = replace(job, flags={**job.flags, "logs-specs": LOGS_SPECS, "log-dir": str(pipes)})
        try:
            yield AttemptOutput(job, *ends)
        finally:
            for end in ends:
                os.close(end)
            over.set()
            pump.join()
            self._close()
            for source in self._sources:
                if source.lost and self._kept:
                    name = self._folder() / source.name
                    self.audience.say(f"{source.lost} bytes of output at the end of {name} could not be kept")

    def keep(self) -> None:
        """From now on the files are in the run directory. Existing files are moved there."""
        with self._lock:
            if self._kept:
                return
            self._close()
            self._kept = True
            for attempt in range(1, self._attempt + 1):
                before, folder = self.private / f"logs-{attempt}", self.folder_of(attempt)
                if before.is_dir():
                    with self._counting(f"moving the output of the ranks to {folder}"):
                        files.make_directory(folder)
                        for path in before.iterdir():
                            _append(path, folder / path.name)
                        shutil.rmtree(before)

    @property
    def held_of(self) -> int | None:
        """The rank whose exception is held; None: none is."""
        return self._first_rank() if self._held else None

    def release(self) -> None:
        """Show the held output, if there is any."""
        held, self._held = self._held, b""
        if held:
            self.audience.show("err", held)

    def tell_consequence(self) -> None:
        """Say which exception is held, since another rank's failure is what has been told, and where all of it is.
        Where it could not be kept, show it."""
        rank = self.held_of
        source = next((each for each in self._sources if each.rank == rank and each.stream == "err"), None)
        if rank is not None and self._kept and source is not None and not source.lost:
            lines, self._held = self._held.decode(errors="replace").splitlines(), b""
            told = _exception_in([line.removeprefix(f"[rank{rank}]: ") for line in lines])
            where = self._folder() / source.name
            self.audience.say(f"rank {rank} raised, too: {told[:_TOLD_AT_MOST]} (all of it: {where})")
        self.release()

    def stderr_tail(self, rank: int) -> str | None:
        """The end of a rank's stderr in the last attempt; None: it was shown, or is empty."""
        source = next((s for s in self._sources if s.rank == rank and s.stream == "err"), None)
        if source is None or self._is_shown(source) or not source.last.strip():
            return None
        lines = source.last.decode(errors="replace").splitlines()
        return f"the end of {self._folder() / source.name}:\n" + "\n".join(f"  {line}" for line in lines[-15:])

    def _folder(self) -> Path:
        return self.folder_of(self._attempt) if self._kept else self.private / f"logs-{self._attempt}"

    def _is_shown(self, source: _Source) -> bool:
        return source.rank in (None, self._first_rank()) or not self.guarded()

    def _first_rank(self) -> int | None:
        """The lowest rank of this host: with a guard, the only rank that is shown."""
        return min((source.rank for source in self._sources if source.rank is not None), default=None)

    def _own_pipe(self, stream: Stream) -> int:
        """Make a pipe for torchrun's own output. Returns the end to write to."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        self._sources.append(_Source(reading, f"{_TORCHRUN}.{stream}", stream, None))
        return writing

    def _pump(self, selector: selectors.BaseSelector, pipes: Path, over: threading.Event) -> None:
        """Handle the output until the attempt is over and all pipes are empty. selector: has torchrun's own."""
        with selector:
            while True:
                last_time = over.is_set()  # read before the pipes: everything written before is read below
                for source in self._new_ranks(pipes):
                    selector.register(source.fd, selectors.EVENT_READ, source)
                ready = selector.select(0 if last_time else _LOOK_EVERY)
                for key, _ in ready:
                    if not self._take(key.data):
                        selector.unregister(key.fd)
                if self._held and time.monotonic() - self._held_since > HELD_FOR:
                    self.release()
                if last_time and not ready:
                    break
        for source in self._sources:
            os.close(source.fd)

    def _new_ranks(self, pipes: Path) -> Iterator[_Source]:
        known = {source.name for source in self._sources}
        try:
            names = sorted(os.listdir(pipes))
        except OSError:  # too many open files, or /tmp was emptied: this thread must not end before the ranks do
            return
        for name in names:
            if name in known or not name.endswith((".out", ".err")):
                continue
            try:
                # Also open for writing: the pipe then has no end while ranks come and go.
                fd = os.open(pipes / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:  # as above; it may pass
                return
            with contextlib.suppress(OSError):  # beyond what this user may have
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
            stem, _, stream = name.partition(".")
            source = _Source(fd, name, "out" if stream == "out" else "err", int(stem.removeprefix("rank-")))
            self._sources.append(source)
            yield source

    def _take(self, source: _Source) -> bool:
        """Handle a piece of a stream. False: the stream has ended."""
        try:
            data = os.read(source.fd, _CHUNK)
        except BlockingIOError:
            return True
        if not data:
            return False
        if self._is_shown(source):
            self._show(source, data)
        with self._lock:
            source.last = (source.last + data)[-_LAST_WORDS:]
            self._write(source, data)
        return True

    def _show(self, source: _Source, data: bytes) -> None:
        if source.stream == "err" and source.rank is not None:
            if self._held:
                self._held += data
                data = b""
            elif _TRACEBACK in data and self.is_ending(self._attempt, source.rank):
                begins = data.rfind(b"\n", 0, data.index(_TRACEBACK)) + 1
                data, self._held, self._held_since = data[:begins], data[begins:], time.monotonic()
            if len(self._held) > _HELD_AT_MOST:
                self.release()
        if data:
            self.audience.show(source.stream, data)

    def _write(self, source: _Source, data: bytes) -> None:
        if not self._kept and self._written > _BEFORE_IT_IS_KEPT:
            source.lost += len(data)
            return
        with self._counting(f"writing the output of the ranks to {self._folder()}"):
            source.lost += len(data)
            file = self._file(source.name)
            missing = source.lost - len(data)
            if missing:
                write_all(file, f"\n[rollback: {missing} bytes of output are missing here]\n".encode())
                source.lost = len(data)
            while source.lost:
                source.lost -= os.write(file, data[-source.lost :])
        self._written += len(data)
        if self._written > self._said:
            self._said *= 2
            self.audience.say(
                f"the ranks have printed {self._written >> 20} MiB in this launch, all of which is kept in "
                f"{self._folder().parent}; a script that prints less keeps that smaller"
            )

    def _file(self, name: str) -> int:
        if name not in self._files:
            files.make_directory(self._folder())
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._files[name] = files.open_file(self._folder() / name, flags)
        return self._files[name]

    @contextmanager
    def _counting(self, doing: str) -> Iterator[None]:
        """Report an error of the disk once, and go on."""
        try:
            yield
        except OSError as error:
            self._complain(doing, error)

    def _complain(self, doing: str, error: OSError | RollbackError) -> None:
        if not self._complained:
            why = error.message if isinstance(error, RollbackError) else error.strerror or error
            self.audience.say(f"{doing} fails ({why}); the run goes on, and what is lost is counted")
        self._complained = True

    def _close(self) -> None:
        with self._lock:
            for file in self._files.values():
                with self._counting(f"writing the output of the ranks to {self._folder()}"):  # NFS says so only here
                    os.close(file)
            self._files.clear()


def _exception_in(lines: list[str]) -> str:
    """The exception of the last traceback, which stands behind the lines of its frames."""
    last = max((number for number, line in enumerate(lines) if _TRACEBACK.decode() in line), default=-1)
    behind = [line for line in lines[last + 1 :] if line.strip()]
    return next((line for line in behind if not line[0].isspace()), (behind or lines)[-1])


def _append(source: Path, target: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    with open(source, "rb") as before, os.fdopen(files.open_file(target, flags), "ab") as kept:
        shutil.copyfileobj(before, kept)
