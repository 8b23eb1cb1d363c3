"""Our two streams while a job runs: what the job prints and what the supervisor says; nobody waits for them.

A terminal may be held with Ctrl-S, a pipe may have a slow reader, a pty may be gone. A thread of its own writes, so
that none of these reaches the thread that empties the ranks' pipes, and through them the ranks.
"""

import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from rollback.supervisor.torchrun.output import Stream
from rollback.system.threads import start_thread

_ROOM = 16 << 20  # bytes that wait to be written; beyond, output is not shown, and that is said
_AT_ONCE = 1 << 16
_LAST_CHANCE = 10.0  # seconds that the end of the output is given, where its reader is slow


class Screen:
    """The audience of a launch where there is no panel: bytes as they come. To be entered while the job runs.

    line_for: how a line of ours is written. out: the descriptor of the ranks' output. Not `sys.stdout`: a thread that
    is stuck in it would keep Python from exiting.
    """

    captures = False
    _every: float | None = None  # seconds between two calls of `_tick`

    def __init__(self, line_for: Callable[[str], str], out: int = 1) -> None:
        self._line_for = line_for
        self._descriptors: dict[Stream, int] = {"out": out, "err": 2}
        self._waiting: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self._missed = 0
        self._over = False
        self._changed = threading.Condition()
        self._gone: set[Stream] = set()
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)

    def say(self, text: str) -> None:
        self._put("err", self._line_for(text).encode())

    def show(self, stream: Stream, data: bytes) -> None:
        self._put(stream, data)

    def __enter__(self) -> "Screen":
        start_thread(self._thread)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(_LAST_CHANCE)
        if self._thread.is_alive() and not _takes_more(2):
            # Who said a last word would wait for as long as nobody reads, and no signal would end that.
            sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")

    def _put(self, stream: Stream, data: bytes) -> None:
        with self._changed:
            if self._size + len(data) > _ROOM:
                self._missed += len(data)
                return
            if self._missed:
                notice = f"{self._missed} bytes of output were not shown, since nobody read them; the logs have them"
                self._waiting.append(("err", self._line_for(notice).encode()))
                self._missed = 0
            self._waiting.append((stream, data))
            self._size += len(data)
            self._changed.notify()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            with self._changed:
                pause = None if self._every is None else max(0.0, due - time.monotonic())
                self._changed.wait_for(lambda: self._waiting or self._over, pause)
                over = self._over and not self._waiting
                stream, data = self._take()
            if data:
                self._write(stream, data)
            if over:
                self._last()
                return
            if self._every is not None and time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + self._every

    def _take(self) -> tuple[Stream, bytes]:
        """What waits longest, together with what follows it in the same stream."""
        if not self._waiting:
            return "out", b""
        stream, pieces, size = self._waiting[0][0], [], 0
        while self._waiting and self._waiting[0][0] == stream and size < _AT_ONCE:
            pieces.append(self._waiting.popleft()[1])
            size += len(pieces[-1])
        self._size = max(0, self._size - size)
        return stream, b"".join(pieces)

    def _write(self, stream: Stream, data: bytes) -> None:
        if stream in self._gone:
            return
        descriptor, left = self._descriptors[stream], memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(descriptor, left) :]
                except BlockingIOError:  # a program that shares our terminal has made it so, for all that have it open
                    _takes_more(descriptor, None)
        except OSError:
            self._gone.add(stream)  # closed, full, or never there: a run does not end for want of an audience

    def _tick(self) -> None:
        """Called by the screen's thread every `_every` seconds."""

    def _last(self) -> None:
        """Called by the screen's thread when everything is written."""


def _takes_more(descriptor: int, within: int | None = 0) -> bool:
    """Whether a few words written there would not be waited for. within: milliseconds to wait for that; None: any."""
    stream = select.poll()
    stream.register(descriptor, select.POLLOUT)
    return bool(stream.poll(within))
