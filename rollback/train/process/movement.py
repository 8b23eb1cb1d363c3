"""Whether a thread's Python code moves, seen from another thread of the same process.

For the main thread the answer is exact: `Py_AddPendingCall` makes the interpreter call a function there as soon as it
executes Python code again, and not before. So evaluation, compilation and data loading move; a collective that does not
return, a sleeping C call or a held interpreter lock do not. Comparing frames alone would often find a loop in the same
long call twice, and call it motionless. For other threads only the position in the code can be compared.
"""

import ctypes
import threading
from collections.abc import Callable

from rollback.system.frames import frame_of

_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Movement:
    """Watches the thread that makes it. Another thread calls `seen`, which does not wait."""

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
