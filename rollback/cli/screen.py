"""Our two streams while a job runs: what the job prints and what the supervisor says; nobody waits for them.

A terminal may be held with Ctrl-S, a pipe may have a slow reader, a pty may be gone. A thread of its own writes, so
that none of these reaches the thread that empties the ranks' pipes, and through them the ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType

from rollback.cli.terminal import line_for
from rollback.rundir.durable import write_all
from rollback.supervisor.output import Stream

_ROOM = 16 << 20  # bytes that wait to be written; beyond, output is not shown, and that is said
_LAST_CHANCE = 10.0  # seconds that the end of the output is given, where its reader is slow


class Screen:
    """The audience of a launch where there is no panel: bytes as they come. To be entered while the job runs.

    out, err: descriptors to write to. Not `sys.stdout`: a thread that is stuck in it would keep Python from exiting.
    """

    captures = False

    def __init__(self, out: int = 1, err: int = 2) -> None:
        self._descriptors: dict[Stream, int] = {"out": out, "err": err}
        self._waiting: deque[tuple[Stream, bytes]] = deque()
        self._size = 0
        self._missed = 0
        self._over = False
        self._changed = threading.Condition()
        self._gone: set[Stream] = set()
        self._thread = threading.Thread(target=self._write_all, name="screen", daemon=True)

    def say(self, text: str) -> None:
        self._put("err", line_for(text).encode())

    def show(self, stream: Stream, data: bytes) -> None:
        self._put(stream, data)

    def __enter__(self) -> Screen:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join(_LAST_CHANCE)

    def _put(self, stream: Stream, data: bytes) -> None:
        with self._changed:
            if self._size + len(data) > _ROOM:
                self._missed += len(data)
                return
            if self._missed:
                notice = f"{self._missed} bytes of output were not shown, since nobody read them; the logs have them"
                self._waiting.append(("err", line_for(notice).encode()))
                self._missed = 0
            self._waiting.append((stream, data))
            self._size += len(data)
            self._changed.notify()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._over)
                if not self._waiting:
                    return
                stream, data = self._waiting.popleft()
                self._size = max(0, self._size - len(data))
            self._write(stream, data)

    def _write(self, stream: Stream, data: bytes) -> None:
        if stream in self._gone:
            return
        try:
            write_all(self._descriptors[stream], data)
        except OSError:
            self._gone.add(stream)  # closed, full, or never there: a run does not end for want of an audience
