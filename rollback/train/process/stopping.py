"""Stop signals of a rank, the loss of its supervisor, and that it leaves once it is told to."""

import atexit
import contextlib
import copy
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil

from rollback.environment import ENV_SUPERVISOR
from rollback.errors import RollbackError
from rollback.system.processes import is_running
from rollback.system.threads import start_thread
from rollback.train.comm.recorder import say
from rollback.train.run import supervised

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_EVERY = 1.0  # seconds; a lost supervisor is to be noticed within 5


class StopRequest:
    """The stop signals that this rank has got. All ranks stop together, by the pulse. `withdraw` restores the old
    handlers.

    | signal           | is a stop signal                                                                        |
    |------------------|-----------------------------------------------------------------------------------------|
    | SIGTERM          | always; a handler that the script installed before is called too                        |
    | SIGINT           | where nobody handles it, but not at a prompt; the second one is a KeyboardInterrupt     |
    | SIGHUP           | where nobody handles it; if it was ignored at the start (nohup), it stays ignored        |
    | SIGUSR1, SIGUSR2 | where nobody handles them; also under a supervisor, where they were ignored until now   |

    A script's own handlers of these signals stay. Outside the main thread no handler can be installed.
    """

    def __init__(self) -> None:
        self._got: set[int] = set()
        self._leaving = False
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

    @property
    def requested(self) -> bool:
        return bool(self._got)

    @property
    def script_was_told(self) -> bool:
        """Whether a handler of the script's has been called for one of them."""
        return signal.SIGTERM in self._got and callable(self._before[signal.SIGTERM])

    def give_up(self) -> None:
        """No guard comes about: what this rank has been told meanwhile takes the course that it takes without one."""
        self.withdraw()
        for number in sorted(self._got, reverse=True):  # SIGINT, which may raise, behind SIGTERM
            if number == signal.SIGINT or not callable(self._before[number]):  # else that handler has been called
                signal.raise_signal(number)

    def withdraw(self) -> None:
        """Restore the old handlers, since nobody asks any more. A handler that was installed later stays."""
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if not (self._leaving and number == signal.SIGTERM):
                    self._give_back(number)

    def obey(self) -> None:
        """This rank leaves, since the ranks have stopped together. A supervisor tells each of them to stop that still
        lives, and may find this one on its way out: that must not strike it down there."""
        if supervised() and signal.getsignal(signal.SIGTERM) == self._note:
            self._leaving = True  # who hangs on its way out is killed when the grace is over
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # the interpreter puts the default in place

    def heed(self) -> None:
        """The script has failed, and its guard is closed: if this rank has got SIGTERM meanwhile, which torchrun sends
        to all when one has failed, it ends as it would without a guard. The next attempt waits for it, and the larger
        the state, the longer an interpreter takes to be taken down. One that was told to stop, and fails before it
        has, ends so too: whose signal it was is not known."""
        if signal.SIGTERM in self._got and supervised() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)

    def _give_back(self, number: int) -> None:
        if signal.getsignal(number) == self._note:
            signal.signal(number, self._before[number] or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a process that the rank has forked
            self._give_back(number)
            os.kill(os.getpid(), number)
            return
        if self._leaving and number == signal.SIGTERM:
            return
        self._got.add(number)
        if number == signal.SIGTERM and callable(self._before[number]):
            self._before[number](number, frame)
        elif number == signal.SIGINT:
            self._give_back(number)
            say("stopping at the end of this step; interrupt again to end at once")
        elif number == signal.SIGHUP:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """The terminal is gone: a print of the script would raise before the save. So would this, in the midst of the
        script, where no descriptor is free."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in self._terminals:
                os.dup2(nowhere, fd)
            os.close(nowhere)


def _is_free(number: int, before: Any) -> bool:
    """Whether nobody handles a signal. before: its handler; None: a handler in C code."""
    if number == signal.SIGINT:
        return before is signal.default_int_handler and not hasattr(sys, "ps1")
    by_supervisor = before is signal.SIG_IGN and number != signal.SIGHUP and supervised()
    return before is signal.SIG_DFL or by_supervisor


def end_with_supervisor(before: Callable[[str], object]) -> None:
    """Watch the supervisor, if there is one, from a thread. End this process at once when the supervisor is gone.
    before: called first, with what happened. Raises RollbackError where no thread can be made.

    Such a rank would write the run directory at the same time as the ranks of the next attempt. torchrun puts ranks
    into sessions of their own, so neither a hang-up nor the death of a parent ends them.
    """
    described = os.environ.get(ENV_SUPERVISOR, "")
    pid = described.partition(":")[0]
    if not pid.isdigit():
        return
    parent = os.getppid()

    def watch() -> None:
        while is_running(described) and os.getppid() == parent:
            threading.Event().wait(_LOOK_EVERY)
        if is_running(described):  # it may have ended torchrun itself, as where another host is lost
            gone, then = "torchrun is gone", f"the supervisor (pid {pid}) sees to what comes next"
        else:
            gone, then = f"the supervisor (pid {pid}) is gone", "run the same command again to go on"
        try:
            before(gone)
            say(f"{gone}; this rank ends: {then}")
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it may end by itself just now
                    child.kill()
        finally:
            os._exit(1)

    start_thread(threading.Thread(target=watch, name="rollback-lifeline", daemon=True))


def at_exit(act: Callable[[], object]) -> None:
    """Call it when the interpreter ends, while threads still work.

    Functions of `atexit` run later, when executors accept no work any more. The S3 client (asyncio) needs one to look
    up hosts.
    """
    register: Any = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(act)


class ExitOrder:
    """Whether one guard's rank has been told to leave, and goes on all the same.

    A script's `except` around `next(batches)`, meant for the end of an epoch or for a sample that cannot be read,
    catches the SystemExit by which a guard ends its rank, and the error of a return that failed. It would go on with a
    guard that is closed, or with a state that is half put back: past a stop, past a return that was given up, or for
    ever at the batch that cannot be read.
    """

    def __init__(self) -> None:
        self._told: SystemExit | RollbackError | None = None
        self._again = False

    def require_none(self) -> None:
        """End the rank again, if it was told to leave; the second time by force, if there is a supervisor."""
        if self._told is None:
            return
        if self._again and supervised():
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # the script may have closed it
                    stream.flush()
            code = getattr(self._told, "code", None)
            os._exit(code if isinstance(code, int) else 1)
        self._again = True
        raise copy.copy(self._told)

    def note(self, told: SystemExit | RollbackError) -> None:
        """The rank is told to leave: its guard is closed, or about to be, or cannot go on."""
        self._told = copy.copy(told)  # without the frames that it has passed through
