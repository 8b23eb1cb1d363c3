"""Tells the buddy of this host's end marks, so that not even its loss loses a step."""

import threading
import time
from collections.abc import Callable

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.checkpoints.fast_tier.mark_copies import MarkPiece, NewsOfMarks
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.wire import (
    FAULTS,
    MARKS_EVERY,
    BuddyConnection,
    BuddyRequest,
    MarksHere,
    connect,
    in_words,
)

_POLL = 0.005  # seconds between two looks: what a mark may be behind
_RATE = 20e6  # bytes a second, at most
_BEGIN = 0.3
_AGAIN = 1.0  # seconds behind a failure
_TOLD_AFTER = 10  # failures in a row
_END = 1.0
_ALIVE = MarkPiece(0, 0, b"")


class MarkSender:
    """A thread that sends what is new in the end marks of this host's ranks, as soon as it is there. `close` it.

    It reads memory, and takes no part in a step. Where ranks leave marks faster than can be sent, some are left out.
    secret: of the attempt. say: told, once, why nothing arrives.
    """

    def __init__(self, paths: RunPaths, address: str, seat: int, secret: str, say: Callable[[str], None]) -> None:
        self._paths, self._address, self._seat, self._secret, self._say = paths, address, seat, secret, say
        self._failures = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollback-mark-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_END)

    def _run(self) -> None:
        while not self._ended.wait(_BEGIN):
            try:
                if (tier := tiers.fast_tier_of(self._paths)) is not None:
                    self._send(tier.root.name, end_marks.marks_of(tier))
            except FAULTS as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == _TOLD_AFTER and not self._ended.is_set():
            where = self._address.rpartition(":")[0]
            self._say(f"the end marks of this host are in no other host's memory: telling {where}: {in_words(error)}")
        self._ended.wait(_AGAIN)

    def _send(self, run: str, marks: EndMarkPaths) -> None:
        """As long as these marks are those of the attempt, if there are any. Raises FAULTS."""
        if not marks.hosts.exists():
            return
        hosts, ranks = marks.hosts.read_text(), end_marks.ranks_of(marks)
        with connect(self._address, self._secret, self._ended.is_set) as connection, NewsOfMarks(marks, ranks) as news:
            connection.say(BuddyRequest(run=run, seat=self._seat, marks=MarksHere(ranks=tuple(ranks), hosts=hosts)))
            connection.answer()
            while marks.hosts.exists() and marks.hosts.read_text() == hosts:
                self._send_for_a_while(connection, news)
                self._failures = 0

    def _send_for_a_while(self, connection: BuddyConnection, news: NewsOfMarks) -> None:
        """Say at the end that this host lives."""
        until = time.monotonic() + MARKS_EVERY
        while time.monotonic() < until:
            pieces = news.new()
            for piece in pieces:
                connection.send_mark(piece)
            if self._ended.wait(max(_POLL, sum(len(piece.data) for piece in pieces) / _RATE)):
                connection.require_wanted()
        connection.send_mark(_ALIVE)
