"""Writes the failure record of a rank when an exception, or an exit in the loop's body, ends it
(`rollback.rundir.failures`)."""

import builtins
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timezone
from functools import cache, partial, wraps
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from rollback.environment import host_name
from rollback.errors import RollbackError
from rollback.facts.training import Window
from rollback.rundir import failures
from rollback.rundir.failures import FailureRecord
from rollback.rundir.heartbeats import READING
from rollback.train.comm.recorder import say
from rollback.train.data.cursor import Cursor
from rollback.train.process.heartbeat import HeartbeatWriter

_OURS = Path(__file__).parents[2]
_LIBRARIES = [_OURS, *(Path(module.__file__).parent for module in (torch, threading) if module.__file__)]
"""Frames in these folders do not distinguish errors. The last folder is Python's own library."""
_EXIT_FUNCTIONS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
_present: "dict[int, FailureRecorder]" = {}
"""That of a process's newest guard. Processes that the script forks inherit the functions, and tell nobody."""

_EMPTY_PASS = (
    "the loop over the guard had no batch in epoch {epoch}: all that was left of it is skipped, or was trained on by "
    "an earlier attempt. So {so} (docs/guard.md, Epochs)"
)
_BEHIND_THE_LOOP = (
    "code behind that loop must not need what only the loop's body sets: set it before the loop, or have "
    "guard.epochs(n, rehearse=...) give the body a batch that does not count"
)
_TAKEN_BY_NEXT = (
    "what takes its batches by `next` must go on to the epoch that the run stands in: "
    "`batches = (batch for _ in guard.epochs(n) for batch in guard)`"
)
_OF_EMPTY = NameError, StopIteration, LookupError, ZeroDivisionError
"""What a script raises that counts on a batch: of a variable, a key or an item that the body makes, of a mean."""


class FailureRecorder:
    """Records every exception that nobody catches, before the earlier hook prints it; and, when the guard is closed, an
    exit with an error in the loop's body, such as `if not math.isfinite(loss): sys.exit(1)`.

    What is raised behind a closed guard counts as well, until the process makes another one: that one's recorder takes
    the place of this one for good once the guard is made (`replace_earlier`), and gives it back if that cannot be made
    (`give_back`). heartbeat: of the same guard.
    """

    def __init__(self, path: Path, rank: int, attempt: int, heartbeat: HeartbeatWriter, cursor: Cursor) -> None:
        self._path, self._rank, self._attempt = path, rank, attempt
        self._heartbeat, self._activity = heartbeat, heartbeat.activity
        self._cursor = cursor
        self._pid = os.getpid()
        self.before_the_end: Callable[[str], object] = lambda reason: None
        """Called behind the record, with what happened."""
        self._exit: FailureRecord | None = None
        _watch_exits()
        self._earlier = _present.get(self._pid)
        self._install_hook()

    def _install_hook(self) -> None:
        self._before = sys.excepthook
        self._hook = sys.excepthook = partial(_on_error, weakref.ref(self), sys.excepthook)
        _present[self._pid] = self

    def _remove_hook(self) -> None:
        _present.pop(self._pid, None)
        if sys.excepthook is self._hook:  # else another one calls it
            sys.excepthook = self._before

    def replace_earlier(self) -> None:
        """The guard is made: what happens in this process is no longer of the run of the guard before it, which has no
        recorder and no heartbeat any more."""
        if (earlier := self._earlier) is not None:
            self._remove_hook()
            earlier._remove_hook()
            earlier._heartbeat.stop()
            self._earlier = None
            self._install_hook()

    def give_back(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """The guard cannot be made, because of this error: the script may catch it. Record it, unless it is for the
        reader, and nothing from now on."""
        if isinstance(error, Exception) and not isinstance(error, RollbackError) and trace is not None:
            self._write(self._account(error.with_traceback(_whole(trace.tb_frame.f_back, trace))))
            error.with_traceback(trace)  # on its way to the script it gets the rest by itself
        self._remove_hook()
        if self._earlier is not None:
            _present[self._pid] = self._earlier

    def note_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Nobody has caught this."""
        self._activity.script_failed = True
        try:
            if isinstance(error, Exception):
                self._write(self._account(error))
        finally:
            self._before(kind, error, trace)
            self.before_the_end(f"rank {self._rank} raised {kind.__name__}")
            if (remark := self._remark(error)) is not None:
                say(remark)

    def note_exit(self, error: SystemExit) -> None:
        """The script is about to leave. It may still catch this: with the next batch it counts for nothing."""
        activity = self._activity.now
        in_body = activity.in_hand and activity.doing == "training" and self._activity.loop() is not None
        self._exit = self._account(error) if in_body else None

    def record_exit(self) -> None:
        """The guard is closed: record the exit in the loop's body that this comes of, if it does."""
        activity, left = self._activity.now, self._exit
        if self._activity.script_failed or left is None or (left.step, left.batch, left.doing) != (
            activity.step, activity.batch, activity.doing
        ):  # fmt: skip
            return
        self._activity.script_failed = True
        self._write(left)
        self.before_the_end(f"rank {self._rank} left by {left.error}: {left.message}")

    def _write(self, record: FailureRecord) -> None:
        try:
            failures.write_failure(self._path, record)
        except OSError as failure:
            say(f"the error could not be recorded in {self._path} ({failure})")

    def _remark(self, error: BaseException) -> str | None:
        """What a user should know of an error that comes of how the guard loops; None: nothing."""
        if (epoch := self._empty_epoch(error)) is None:
            return None
        by_next = isinstance(error, StopIteration)
        return _EMPTY_PASS.format(epoch=epoch, so=_TAKEN_BY_NEXT if by_next else _BEHIND_THE_LOOP)

    def _empty_epoch(self, error: BaseException) -> int | None:
        """The epoch without a batch of which an error comes. Not where its first one is being read: that may fail."""
        activity = self._activity
        return activity.empty_pass if isinstance(error, _OF_EMPTY) and not activity.now.in_hand else None

    def _account(self, error: Exception | SystemExit) -> FailureRecord:
        activity, name, message = self._activity.now, failures.qualified_name(type(error)), failures.text_of(error)
        frames = failures.frames_of(error, _LIBRARIES)
        said = message if (remark := self._remark(error)) is None else f"{message} ({remark})"
        now = time.time()
        reading = activity.doing == READING
        in_hand = activity.in_hand and not self._activity.evaluates()
        samples = self._cursor.indices(reading=reading) if in_hand else None
        unreadable = self._cursor.unreadable(samples) if samples and reading else []
        return FailureRecord(
            rank=self._rank, pid=self._pid, host=host_name(), attempt=self._attempt,
            at=datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="milliseconds"), seconds=now,
            step=activity.step, batch=activity.batch, doing=activity.doing,
            whole_step=Window(first=activity.first, last=activity.last),
            error=name, message=said, traceback=failures.formatted(error), frames=frames,
            fingerprint=failures.fingerprint(name, message, frames), samples=list(samples or ()), unreadable=unreadable,
            in_hand=in_hand, empty_epoch=self._empty_epoch(error), ours=failures.raised_in(error, _OURS),
        )  # fmt: skip


def _on_error(
    recorder: "weakref.ref[FailureRecorder]",
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """The hook for exceptions, which keeps no recorder alive: each thread remembers the hook of its beginning."""
    present = _present.get(os.getpid())
    (present.note_error if present is not None and present is recorder() else before)(kind, error, trace)


@cache
def _watch_exits() -> None:
    """From now on the present recorder is told before this process's main thread leaves by `sys.exit`, `exit` or `quit`
    with an error. The exception has the traceback that it would have.

    At the end of the process nothing tells: Python calls no hook for a SystemExit, and exit handlers do not learn the
    status. So these functions are watched from within. They know more, too: whether the loop is still there, which it
    is not behind a `break`. What is raised is left as it is. A bare `raise SystemExit(1)` and `os._exit(1)` are not
    seen.
    """
    for module, name in _EXIT_FUNCTIONS:
        if (original := getattr(module, name, None)) is not None:  # `python -S` has no `exit` and no `quit`
            setattr(module, name, _watched(original))


def _watched(original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def watched(*given: Any, **named: Any) -> object:
        recorder = _present.get(os.getpid())
        code, *_ = (*given, *named.values(), None)  # exit(code=1) is said, too
        is_error = not (code is None or (isinstance(code, int) and code == 0))
        if is_error and recorder is not None and threading.current_thread() is threading.main_thread():
            recorder.note_exit(SystemExit(code).with_traceback(_whole(sys._getframe(1))))
        return original(*given, **named)

    return watched


def _whole(frame: FrameType | None, trace: TracebackType | None = None) -> TracebackType | None:
    """The traceback at the script's own top level of what is raised in this frame, or has come there with `trace`."""
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    return trace
