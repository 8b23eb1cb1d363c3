"""Heartbeats: twice a second each rank writes its identity, its position, and whether it moves.

It writes to two places: the supervisor's board in memory, by which the supervisor judges hangs
(`rollback.supervisor.diagnosis.hang`), and a small file in the run directory, for people and for the next start. Each
place has a thread, so that a busy rank differs from a rank that waits for ever (`Movement`), and so that a slow disk
delays the file only.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollback.environment import ENV_HEARTBEATS, STACKS_SIGNAL, host_name
from rollback.rundir.heartbeat_board import HeartbeatCell
from rollback.rundir.heartbeats import LEAVING, Heartbeat, UnrecordedEnd, write_heartbeat
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.processes import start_of
from rollback.system.threads import start_thread
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
from rollback.train.introspection import frame_of
from rollback.train.process.activity import Activity, RankActivity

_EVERY_SECONDS = 0.5
_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FILES = 16  # that all ranks with a board replace in a second, in a directory that they may share


class HeartbeatWriter:
    """Writes this rank's heartbeats from `start` until `stop`, while the process lives; and its stacks on a signal.

    step, batch: where the attempt begins.
    """

    def __init__(self, paths: RunPaths, ranks: Ranks, attempt: int, step: int, batch: int) -> None:
        self._path = paths.heartbeat(ranks.rank)
        self._ranks = ranks
        self._attempt = attempt
        self._pid, self._host = os.getpid(), host_name()
        self._start = start_of(self._pid) or ""
        self._movement = Movement()
        self._moved = time.monotonic()
        self._failing = self._ended = self._leaving = False
        self._unrecorded: UnrecordedEnd | None = None
        self._cell = _cell_on_board(ranks.rank)
        self._file_every = seconds_between_files(ranks.world_size) if self._cell else _EVERY_SECONDS
        self._cell_lock, self._file_lock = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        self.activity = RankActivity(step, batch)
        """What is set there is written within half a second."""
        self._write()
        _dump_stacks_on_signal(paths.rank_stacks(attempt, ranks.rank))
        if not faulthandler.is_enabled():
            faulthandler.enable(file=2, all_threads=False)  # then a crash in native code shows its place on stderr

    def start(self) -> None:
        """Raises RollbackError where no thread can be made: who shows no sign of life is taken for hung, and ended."""
        atexit.register(self._leave)
        for act, name in (self._watch, "rollback-life"), (self._keep_file, "rollback-heartbeat"):
            start_thread(threading.Thread(target=act, name=name, daemon=True))

    def show(self, doing: str, step: int, batch: int) -> None:
        """Set what this rank is doing, with no batch in hand. It is written on return."""
        self.activity.now = Activity(doing, step, batch, first=batch, last=batch)
        self._moved = time.monotonic()
        self._write()

    def turn_to(self, doing: str) -> None:
        """Set what this rank is doing, at the same position."""
        self.show(doing, self.activity.now.step, self.activity.now.batch)

    def end(self, *, in_hand: bool, unrecorded: UnrecordedEnd | None = None) -> None:
        """The guard is closed. in_hand: because of an exception, perhaps, so that a failure record can still name the
        batch in hand. unrecorded: what the journal could not take."""
        now = self.activity.now
        self.activity.now = now._replace(in_hand=now.in_hand and in_hand)
        self._unrecorded, self._ended, self._moved = unrecorded, True, time.monotonic()
        self._write()

    def stop(self) -> None:
        """Write no more from now on: this process is at another run, or at none."""
        self._over.set()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """The interpreter ends. The thread still writes heartbeats while other exit handlers run, and stops when no
        Python code can run. A process that exists longer is stuck."""
        if os.getpid() == self._pid:
            self._leaving = self._ended and not self.activity.script_failed
            self._write()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            if self._movement.seen():
                self._moved = time.monotonic()
            self._write_on_board()

    def _keep_file(self) -> None:
        while not self._over.wait(self._file_every):
            self._write_file()

    def _write(self) -> None:
        self._write_on_board()
        self._write_file()

    def _beat(self) -> Heartbeat:
        now = self.activity.now
        doing = LEAVING if self._leaving else "ended" if self._ended else now.doing
        # No call into torch: a thread that returns from C++ into an ending interpreter aborts the process.
        begun = None if self._ended else self._ranks.collectives_begun()
        return Heartbeat.model_construct(
            pid=self._pid, host=self._host, attempt=self._attempt, step=now.step, batch=now.batch,
            doing=doing, monotonic=self._moved, start=self._start, looked=time.monotonic(), collectives=begun,
            unrecorded_end=self._unrecorded,
        )  # fmt: skip

    def _write_on_board(self) -> None:
        if self._cell is not None:
            with self._cell_lock, contextlib.suppress(OSError, ValueError):  # then the file counts
                self._cell.write(self._beat())

    def _write_file(self) -> None:
        with self._file_lock:
            try:
                write_heartbeat(self._path, self._beat())
            except OSError as error:
                if not self._failing and not self._ended:
                    say(f"writing the heartbeat {self._path} fails ({error}); training goes on")
                self._failing = True
            else:
                self._failing = False


def seconds_between_files(ranks: int) -> float:
    """How often a rank with a board replaces its heartbeat's file while it does the same thing."""
    return max(_EVERY_SECONDS, ranks / _FILES)


def _cell_on_board(rank: int) -> HeartbeatCell | None:
    """This rank's cell on the supervisor's board; None: it has none, or cannot be opened."""
    path, place = os.environ.get(ENV_HEARTBEATS, ""), os.environ.get("LOCAL_RANK", "0")
    try:
        return HeartbeatCell(path, rank, int(place)) if path else None
    except (OSError, ValueError):
        return None


def _dump_stacks_on_signal(path: Path) -> None:
    """On STACKS_SIGNAL, append the Python stacks of all threads to a file. This works in C, also while the interpreter
    lock is held. Forked loader workers inherit it. A script that uses the signal later replaces it."""
    try:
        files.make_directory(path.parent)
        file = os.fdopen(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)  # stays open
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    except (OSError, ValueError) as error:
        say(f"stacks cannot be written to {path} ({error}); training goes on, a hang will be told without them")


class Movement:
    """Whether the Python code of the thread that makes it moves, seen from another thread, which calls `seen`.

    For the main thread the answer is exact: `Py_AddPendingCall` makes the interpreter call a function there as soon as
    it executes Python code again, and not before. So evaluation, compilation and data loading move; a collective that
    does not return, a sleeping C call or a held interpreter lock do not. Comparing frames alone would often find a loop
    in the same long call twice, and call it motionless. For other threads only the position in the code can be
    compared.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._asks = threading.current_thread() is threading.main_thread()
        self._place: tuple[int, int] | None = None
        self._answered = [True]
        self._call = _PENDING_CALL(_answer(self._answered))
        # The interpreter may make the call while it shuts down, when nothing else refers to it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._call))

    def seen(self) -> bool:
        """Whether the thread has executed Python code since the last call."""
        if not self._asks:
            before, self._place = self._place, self._present_place()
            return before != self._place
        if not self._answered[0]:
            return False
        self._answered[0] = False
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
            self._answered[0] = True  # the queue is full: try again at the next call
        return True

    def _present_place(self) -> tuple[int, int] | None:
        frame = frame_of(self._thread)
        return (id(frame.f_code), frame.f_lasti) if frame is not None else None


def _answer(answered: list[bool]) -> Callable[[object], int]:
    def call(_: object) -> int:
        answered[0] = True
        return 0

    return call
