"""Being told to stop, and losing the supervisor."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import psutil

from rollback.config import ENV_SUPERVISOR
from rollback.train.record import say

_LOOK_EVERY = 1.0  # seconds; a lost supervisor is to be noticed within 5


class StopRequest:
    """Becomes true when this process gets SIGTERM. That only raises a flag: all ranks stop together, by pulse.

    A handler that the script installed before is called too. Outside the main thread no handler can be installed; the
    signal then keeps its meaning. So it does after `withdraw`.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)

    def withdraw(self) -> None:
        """Nobody looks at the flag any more: what is told to end must end. A handler installed since stays."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if callable(self._before):
            self._before(number, frame)


def end_with_supervisor() -> None:
    """Watch the supervisor, where there is one, from a thread; end this process at once when it is gone.

    A rank that outlived its supervisor would write the run directory beside the ranks of the next attempt. torchrun
    puts ranks into sessions of their own, so neither a hang-up nor a killed parent reaches them by itself.
    """
    described = os.environ.get(ENV_SUPERVISOR, "")
    pid, _, created = described.partition(":")
    if not pid.isdigit():
        return
    parent = os.getppid()

    def watch() -> None:
        while _lives(int(pid), created) and os.getppid() == parent:
            threading.Event().wait(_LOOK_EVERY)
        say(f"the supervisor (pid {pid}) or torchrun is gone; this rank ends. Run the same command again to go on")
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="rollback-lifeline", daemon=True).start()


def _lives(pid: int, created: str) -> bool:
    try:
        process = psutil.Process(pid)
        same = not created or abs(process.create_time() - float(created)) < 1.0
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
