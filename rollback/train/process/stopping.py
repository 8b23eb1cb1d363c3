"""Being told to stop, and losing the supervisor."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import psutil

from rollback.config import ENV_SUPERVISOR
from rollback.system.processes import is_running
from rollback.train.comm.recorder import say

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY = 1.0  # seconds; a lost supervisor is to be noticed within 5


class StopRequest:
    """Becomes true when this process is told to stop by a signal. That only raises a flag: all ranks stop together, by
    pulse. The signals mean again what they meant before after `withdraw`.

    | signal           | is taken as a stop                                                                      |
    |------------------|-----------------------------------------------------------------------------------------|
    | SIGTERM          | always; a handler that the script installed before is called too                        |
    | SIGINT           | where nobody handles it, but not at a prompt; the second one is a KeyboardInterrupt     |
    | SIGHUP           | where nobody handles it; one that was ignored when we were started (nohup) stays ignored |
    | SIGUSR1, SIGUSR2 | where nobody handles them, also under a supervisor, which has had them ignored till now |

    A script's own handlers of the others mean something else. Outside the main thread no handler can be installed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _STOP_SIGNALS:
            before = signal.getsignal(number)
            if number == signal.SIGTERM or _is_free(number, before):
                self._before[number] = before
                signal.signal(number, self._note)

    def withdraw(self) -> None:
        """Nobody looks at the flag any more: what is told to end must end. A handler installed since stays."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                self._give_back(number)

    def _give_back(self, number: int) -> None:
        if signal.getsignal(number) == self._note:
            signal.signal(number, self._before[number] or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that was forked off the rank: it has no part in this
            self._give_back(number)
            os.kill(os.getpid(), number)
            return
        self.requested = True
        if number == signal.SIGTERM and callable(self._before[number]):
            self._before[number](number, frame)
        elif number == signal.SIGINT:
            self._give_back(number)
            say("stopping at the end of this step; interrupt again to end at once")
        elif number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """It is gone: what the script still prints there would raise before it has saved."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._terminals:
            os.dup2(nowhere, fd)
        os.close(nowhere)


def _is_free(number: int, before: Any) -> bool:
    """Whether nobody has said what a signal means. (None: a handler of somebody's C code.)"""
    if number == signal.SIGINT:
        return before is signal.default_int_handler and not hasattr(sys, "ps1")
    by_supervisor = before is signal.SIG_IGN and number != signal.SIGHUP and bool(os.environ.get(ENV_SUPERVISOR))
    return before is signal.SIG_DFL or by_supervisor


def end_with_supervisor() -> None:
    """Watch the supervisor, where there is one, from a thread; end this process at once when it is gone.

    A rank that outlived its supervisor would write the run directory beside the ranks of the next attempt. torchrun
    puts ranks into sessions of their own, so neither a hang-up nor a killed parent reaches them by itself.
    """
    described = os.environ.get(ENV_SUPERVISOR, "")
    pid = described.partition(":")[0]
    if not pid.isdigit():
        return
    parent = os.getppid()

    def watch() -> None:
        while is_running(described) and os.getppid() == parent:
            threading.Event().wait(_LOOK_EVERY)
        say(f"the supervisor (pid {pid}) or torchrun is gone; this rank ends. Run the same command again to go on")
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="rollback-lifeline", daemon=True).start()
