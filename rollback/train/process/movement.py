"""Whether a thread's Python code moves, as another thread of the same process can tell.

For the main thread the answer is exact: the interpreter is asked to make a call there (`Py_AddPendingCall`), which it
does as soon as it executes Python code again, and not before. So evaluation, compilation and data loading move; a
collective that does not return, a sleeping C call or a held interpreter lock does not. Looking at frames alone would
often find a training or evaluation loop in the same long call twice in a row and take it for standing still. Other
threads cannot be asked; of them the place in the code is compared.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

_PENDING_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Movement:
    """Watches the thread that makes it. `seen` is called from another one, and never waits."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._asks = threading.current_thread() is threading.main_thread()
        self._place: tuple[int, int] | None = None
        self._answered = [True]
        self._call = _PENDING_CALL(_answer(self._answered))
        # The interpreter may make the call while it shuts down, when nothing else holds it any more.
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
            self._answered[0] = True  # the queue is full: it is asked again the next time
        return True

    def _present_place(self) -> tuple[int, int] | None:
        frame = sys._current_frames().get(self._thread)
        return (id(frame.f_code), frame.f_lasti) if frame is not None else None


def _answer(answered: list[bool]) -> Callable[[object], int]:
    def call(_: object) -> int:
        answered[0] = True
        return 0

    return call
