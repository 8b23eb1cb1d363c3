"""Sees the script leave by `sys.exit`, `exit` or `quit` with an error.

At the end of the process nothing tells: Python calls no hook for a SystemExit, and exit handlers do not learn the
status. So these functions are watched from within. They know more, too: whether the loop is still there, which it is
not behind a `break`. What is raised is left as it is. A bare `raise SystemExit(1)` and `os._exit(1)` are not seen.
"""

import builtins
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

_PLACES = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))
_listeners: dict[int, Callable[[SystemExit], object]] = {}
"""By process: who is told. Processes that the script forks inherit the functions, and tell nobody."""


def watch_exits(listener: Callable[[SystemExit], object]) -> None:
    """From now on `listener` is told before this process's main thread leaves with an error, in place of an earlier
    one. The exception has the traceback that it would have."""
    if not _listeners:
        for module, name in _PLACES:
            if (original := getattr(module, name, None)) is not None:  # `python -S` has no `exit` and no `quit`
                setattr(module, name, _watched(original))
    _listeners.clear()
    _listeners[os.getpid()] = listener


def _watched(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def watched(*given: Any, **named: Any) -> object:
        listener, (code, *_) = _listeners.get(os.getpid()), (*given, *named.values(), None)  # exit(code=1) is said, too
        is_error = not (code is None or (isinstance(code, int) and code == 0))
        if is_error and listener is not None and threading.current_thread() is threading.main_thread():
            listener(SystemExit(code).with_traceback(_calls_so_far()))
        return original(*given, **named)

    return watched


def _calls_so_far() -> TracebackType | None:
    """The traceback that an exception of the caller's caller would have at the script's own top level."""
    frame, trace = sys._getframe(2), None
    while frame is not None:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back  # type: ignore[assignment]
    return trace
