"""What tells a launch to stop: signals, and how urgent they are, and requests in the run directory."""

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from rollback.rundir.lock import launch_of
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Inbox, sound_requests

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_INSISTENT = (signal.SIGTERM, signal.SIGINT)
_ECHO = 0.2  # seconds


class StopSignals:
    """Catches the stop signals inside its `with` block, and only notes them: the launch's loop acts. A signal that was
    ignored before (nohup) stays ignored. One that was blocked does not stay blocked: programs that wait for signals
    (`sigwait`, signalfd) block them, and who is started by them inherits that, and would be deaf with all its ranks.

    The second SIGTERM or SIGINT means: end now. A SIGTERM after a SIGUSR1 does not: schedulers send SIGUSR1 as a
    warning and SIGTERM at the end of that time. Nor does one within `_ECHO` of the first: Ctrl-C reaches all that runs
    in a terminal, and a program that started this one may hand it on as well. others: names of further signals, with
    commas between them; unknown names are ignored, as torchrun does.
    """

    def __init__(self, others: str = "") -> None:
        names = (name.strip() for name in others.split(","))
        self._heeded = {*STOP_SIGNALS, *(signal.Signals[name] for name in names if name in signal.Signals.__members__)}
        self.received: list[signal.Signals] = []
        """In the order in which they came."""
        self.since: float | None = None
        """Monotonic seconds of the first signal."""
        self._asked: list[float] = []
        """When each SIGTERM and SIGINT came."""
        self._taken = 0
        self._breaking_off = False
        self._before: dict[signal.Signals, Any] = {}
        self._blocked: set[int] = set()

    @property
    def insistent(self) -> bool:
        return bool(self._asked) and self._asked[-1] - self._asked[0] >= _ECHO

    def take(self) -> list[signal.Signals]:
        """The signals since the last call."""
        new = self.received[self._taken :]
        self._taken += len(new)
        return new

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """A stop signal raises KeyboardInterrupt inside the `with` block, and before it if one has come already: for
        what takes long and looks at no signal, and may be broken off anywhere as a kill would. Main thread only.
        """
        self._breaking_off = True
        try:
            if self.received:
                raise KeyboardInterrupt
            yield
        finally:
            self._breaking_off = False

    @contextlib.contextmanager
    def ignored_from_its_end_on(self) -> Iterator[None]:
        """For the last `with` block of a program: behind it nothing is left to be stopped, and a late signal (a SIGTERM
        at the end of the time of which a SIGUSR1 has warned) would put its own exit code in the place of the job's."""
        try:
            yield
        finally:
            for signum in self._before:
                signal.signal(signum, signal.SIG_IGN)
            self._before.clear()

    def __enter__(self) -> "StopSignals":
        for signum in self._heeded:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                with contextlib.suppress(OSError):  # SIGKILL and SIGSTOP, which nobody can catch
                    self._before[signum] = signal.signal(signum, self._note)
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, self._blocked)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self.received.append(signal.Signals(signum))
        if signum in _INSISTENT:
            self._asked.append(now)
        if self._breaking_off:
            self._breaking_off = False  # once: what is broken off cleans up
            raise KeyboardInterrupt


class StopRequests:
    """Requests to stop this launch, which holds the run directory. The ranks see them, too; the supervisor enforces the
    grace."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._launch = launch_of(paths)
        self._inbox = Inbox(paths, ())

    def take(self) -> list[str]:
        """Who has asked since the last call."""
        names = list(self._inbox.open())
        for name in names:
            self._inbox.note_answer(name)
        return [request.who for _, request in sound_requests(self._paths, names) if request.stops(self._launch)]
