"""Killing a thread at one particular system call, by strace.

The victim says which thread it is and waits (`wait_for_strace`); strace is attached to that thread, and the victim let
go. strace counts calls from there on, for each kind of call on its own, so a place in time is `(call, n)`.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warm_server import WarmPopen

GO = signal.SIGUSR1
CALLS = "%file,write,pwrite64,writev,fsync,fdatasync,ftruncate,fallocate,close"
"""What changes files or their names, and what stands between such calls."""
READS = "openat,read,pread64,preadv,preadv2,getdents64,fstat,newfstatat,statx"
_ANY_PROCESS = ctypes.c_ulong(-1)
_PR_SET_PTRACER = 0x59616D61

_CHANGE = re.compile(r"(?:mkdir|rename|unlink|link|symlink|p?write|ftruncate|fallocate)\w*\(|open\w*\(.*O_CREAT")
"""A call that leaves another disk behind, as a trace shows it."""

Place = tuple[str, int | str]
"""A call's name and the how-manieth of that name; or, as strace takes it, `2+`: that one and all behind it."""


def hold_back() -> None:
    """The victim, before it has any thread: the signal that lets it go waits until it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [GO])


def wait_for_strace(tell: int, thread: int | None = None) -> None:
    """The victim: write the thread's id (default: this one's) to the file descriptor `tell`, and wait to be let go."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANY_PROCESS, 0, 0, 0)  # or only its ancestors might attach to it
    os.write(tell, f"{os.getpid()} {thread or threading.get_native_id()}\n".encode())
    signal.sigwait([GO])


class Strace:
    """strace, attached to a thread. `at`: the call that is not carried out: the process dies there, or, with another
    `fault`, that error is what the call returns. paths: only calls about these are seen and counted; all, by default.
    """

    def __init__(
        self,
        thread: int,
        log: Path,
        at: Place | None = None,
        fault: str = "signal=KILL",
        calls: str = CALLS,
        paths: Sequence[Path] = (),
    ) -> None:
        inject = ["-e", f"inject={at[0]}:{fault}:when={at[1]}"] if at else []
        only = [word for path in paths for word in ("-P", str(path))]
        command = ["strace", "-p", str(thread), "-o", str(log), "-e", f"trace={calls}", *only, *inject]
        self._log = log
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        said = self._process.stderr.readline()
        assert "attached" in said, said

    def calls(self) -> list[Place]:
        """All calls that were seen, once the thread is gone: each as its name and the how-manieth of that name."""
        return [place for _, place in self._seen()]

    def changes(self) -> list[Place]:
        """Those of them that change files or their names."""
        return [place for line, place in self._seen() if _CHANGE.match(line)]

    def _seen(self) -> list[tuple[str, Place]]:
        self._process.communicate(timeout=60)
        lines = re.findall(r"^(?=\w+\().*", self._log.read_text(), re.MULTILINE)
        seen: Counter[str] = Counter()
        places: list[tuple[str, Place]] = []
        for line in lines:
            name = line.partition("(")[0]
            seen[name] += 1
            places.append((line, (name, seen[name])))
        return places


class Server:
    """A program of this folder that forks victims: a request a line, an answer a line. warm: it has imported torch."""

    def __init__(self, program: str, warm: bool) -> None:
        popen = WarmPopen[str] if warm else subprocess.Popen[str]
        self._process = popen(
            [sys.executable, str(Path(__file__).parent / program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def ask(self, request: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def trace(self, log: Path, kill_at: Place | None, fault: str = "signal=KILL", **what: Any) -> Strace:
        """Attach to the thread that the victim names, and let the victim go. what: to look at, see `Strace`."""
        assert self._process.stdout is not None
        process, thread = map(int, self._process.stdout.readline().split())
        strace = Strace(thread, log, kill_at, fault, **what)
        os.kill(process, GO)
        return strace

    def close(self) -> None:
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:  # a victim that nobody lets go, after a test that failed half-way
            os.killpg(self._process.pid, signal.SIGKILL)
            raise


def why_not() -> str | None:
    """Why strace cannot be used here, or None where it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (`apt-get install strace`)"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else None


def spread(places: Sequence[Place], count: int) -> list[Place]:
    """`count` places, evenly spread, the last one among them; and all that rename: that is how checkpoints appear."""
    step = len(places) / count
    chosen = {places[len(places) - 1 - round(number * step)] for number in range(count)}
    return [place for place in places if place in chosen or place[0].startswith("rename")]
