"""Signals that ask the supervisor to stop, and how urgently. The handlers only note them; the loop acts."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_INSISTENT = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Catches the stop signals while it is entered. One that was ignored when we were started (nohup) stays ignored.

    received: those that came, in order. The second SIGTERM or SIGINT is insistence: end now. A SIGTERM after a
    SIGUSR1 is not: schedulers send the one as a warning and the other at the end of the time that they warned of.
    others: names of further signals, with commas between them; one that this system does not know is passed over, as
    torchrun does.
    """

    def __init__(self, others: str = "") -> None:
        names = (name.strip() for name in others.split(","))
        self._heeded = {*STOP_SIGNALS, *(signal.Signals[name] for name in names if name in signal.Signals.__members__)}
        self.received: list[signal.Signals] = []
        self.since: float | None = None  # monotonic seconds of the first one
        self._taken = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def insistent(self) -> bool:
        return sum(signum in _INSISTENT for signum in self.received) >= 2

    def take(self) -> list[signal.Signals]:
        """Signals that came since the last call."""
        new = self.received[self._taken :]
        self._taken += len(new)
        return new

    def __enter__(self) -> StopSignals:
        for signum in self._heeded:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP, which nobody can catch
                    self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.since = time.monotonic() if self.since is None else self.since
        self.received.append(signal.Signals(signum))
