"""Whether an exception comes of a process or a thread that the system refused: at the next start there may be one."""

import os
from errno import EAGAIN
from types import TracebackType

_REFUSED = ("can't start new thread", os.strerror(EAGAIN))
"""What Python and native code say of a thread."""
_STARTING = ("subprocess", "multiprocessing.popen_fork", "multiprocessing.util")
"""Modules of Python's own that start processes. Beside them EAGAIN says of a file or a socket that it is not ready."""


class RankNotForked(OSError):
    """The fork server, or its child that was forking the rank, was killed, or the system refused another process."""


def is_of_shortage(error: BaseException | None) -> bool:
    """Also where it was raised because of such an exception, or while that was handled, as torchrun tidies up."""
    while error is not None:
        if isinstance(error, RankNotForked) or (isinstance(error, RuntimeError) and str(error) in _REFUSED):
            return True
        if isinstance(error, BlockingIOError) and _module(error.__traceback__) in _STARTING:
            return True
        error = error.__cause__ or error.__context__
    return False


def _module(trace: TracebackType | None) -> str:
    """Where it was raised."""
    name = ""
    while trace is not None:
        name, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return name
