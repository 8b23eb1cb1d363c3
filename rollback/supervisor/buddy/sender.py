"""Sends to the buddy of this host, beside the training and no faster than needed: each snapshot, and what is new in the
end marks, so that not even the loss of this host loses a step."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import end_marks, slots
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.checkpoints.fast_tier.mark_copies import MarkPiece, NewsOfMarks
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.tiers import Located
from rollback.errors import RollbackError
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import (
    FAULTS,
    MARKS_EVERY,
    BuddyConnection,
    BuddyRequest,
    MarksHere,
    Parcel,
    connect,
    in_words,
    ranks_in,
    send_shards,
)
from rollback.system.threads import lower_priority, start_thread
from rollback.terminal.quantities import size

_END = 1.0  # seconds that a thread has to end; where a name is looked up it takes longer, and does no harm
# Of snapshots:
_POLL = 0.3
_SNAPSHOTS_AGAIN = 5.0  # seconds behind a failure
_TOLD_AFTER = 3  # failures in a row: a host that is being replaced is no fault
_FIRST_INTERVAL = 10.0  # seconds between two snapshots, until it is known
_LEAST_RATE = 20e6  # bytes a second
# Of marks:
_BEGIN = 0.3
_MARKS_POLL = 0.005  # seconds between two looks: what a mark may be behind
_MARKS_AGAIN = 1.0
_MARKS_TOLD_AFTER = 10
_MOST_RATE = 20e6
_ALIVE = MarkPiece(0, 0, b"")


class ToBuddy(ABC):
    """A thread that sends to the buddy at `address` while an attempt runs. `close` it. Where there is none to be had,
    that is told, and costs the copy.

    secret: of the attempt. say: takes a line for people.
    """

    def __init__(self, paths: RunPaths, address: str, seat: int, secret: str, say: Callable[[str], None]) -> None:
        self._paths, self._address, self._seat, self._secret, self._say = paths, address, seat, secret, say
        self._host = address.rpartition(":")[0]
        self._failures = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"rollback-{type(self).__name__}", daemon=True)
        try:
            start_thread(self._thread)
        except RollbackError as error:
            self._tell_why(error.message)

    def close(self) -> None:
        """End the thread, also in the middle of a copy: the buddy keeps the one before."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_END)

    def _connect(self) -> AbstractContextManager[BuddyConnection]:
        return connect(self._address, self._secret, self._ended.is_set)

    @abstractmethod
    def _tell_why(self, fault: str) -> None:
        """Tell people why nothing arrives."""

    @abstractmethod
    def _run(self) -> None:
        """What the thread does, until it is ended."""


class SnapshotLeft(OSError):
    """The snapshot's slot is used for another one already."""


class BuddySender(ToBuddy):
    """Sends the newest snapshot in this host's slots, whenever it is another one.

    A copy is sent evenly over half the time between two snapshots, so that neither the network nor a core is busy with
    it for longer bursts than needed. tell: called with the fault, in words, and with None behind each copy that has
    arrived. say: told what a copy costs, once.
    """

    def __init__(
        self,
        paths: RunPaths,
        address: str,
        seat: int,
        secret: str,
        tell: Callable[[str | None], None],
        say: Callable[[str], None],
    ) -> None:
        self._tell = tell
        self._tier: SlotPaths | None = None
        self._seen: dict[int, tuple[int, int] | None] = {}
        self._sent = ""
        self._costs_told = False
        self._newest = -1
        self._newest_at: float | None = None
        self._interval = _FIRST_INTERVAL
        super().__init__(paths, address, seat, secret, say)

    def _run(self) -> None:
        lower_priority()
        while not self._ended.wait(_POLL):
            try:
                if (place := self._unsent()) is not None:
                    self._send(place)
                    self._sent, self._failures = place.name, 0
                    self._tell(None)
            except FAULTS as error:
                self._seen, self._sent = {}, ""  # look again; what has arrived of it may be in the old one's place
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._ended.is_set():
            return
        self._failures += 1
        if self._failures >= _TOLD_AFTER:
            self._tell_why(f"sending them to {self._host}: {in_words(error)}")
        if not isinstance(error, SnapshotLeft):
            self._ended.wait(_SNAPSHOTS_AGAIN)

    def _tell_why(self, fault: str) -> None:
        self._tell(fault)

    def _unsent(self) -> Located | None:
        """The newest snapshot, unless it was sent last. Manifests are read where one has changed: of thousands of ranks
        that takes long. Raises OSError."""
        self._tier = self._tier or tiers.fast_tier_of(self._paths)
        if self._tier is None:
            return None
        seen = {number: slots.commit_of(self._tier, number) for number in self._tier.numbers()}
        if seen == self._seen:
            return None
        self._seen = seen
        place = max(tiers.in_slots(self._paths), key=lambda place: place.manifest.seq, default=None)
        if place is None or place.name == self._sent:
            return None
        self._note_interval(place.manifest.seq)
        return place

    def _note_interval(self, seq: int) -> None:
        if seq <= self._newest:
            return
        now = time.monotonic()
        if self._newest_at is not None:
            self._interval = (now - self._newest_at) / (seq - self._newest)
        self._newest, self._newest_at = seq, now

    def _send(self, place: Located) -> None:
        assert self._tier is not None
        assert place.slot is not None
        tier, number, manifest = self._tier, place.slot, place.manifest
        commit = slots.commit_of(tier, number)
        body = Path(place.directory, MANIFEST).read_bytes()
        parcel = Parcel(slot=number, ranks=ranks_in(place.directory, manifest), manifest=len(body))
        count = parcel.bytes(manifest)
        began, rate, sent = time.monotonic(), max(_LEAST_RATE, 2 * count / max(self._interval, _POLL)), 0

        def behind_a_piece(moved: int) -> None:
            nonlocal sent
            sent += moved
            if slots.commit_of(tier, number) != commit:
                raise SnapshotLeft("each leaves its slot before it has arrived (a faster network, or fewer snapshots)")
            self._ended.wait(max(0.0, began + sent / rate - time.monotonic()))

        with self._connect() as connection:
            connection.say(BuddyRequest(run=tier.root.name, seat=self._seat, keep=parcel))
            connection.send(body)
            if connection.answer().whole:
                return
            send_shards(connection, parcel, manifest, place.directory, behind_a_piece)
            connection.answer()
        if not self._costs_told:
            self._costs_told = True
            self._say(
                f"{size(count)} of each snapshot go to the memory of {self._host} too: up to twice as much "
                f"there, and up to {size(rate)} a second of the network"
            )


class MarkSender(ToBuddy):
    """Sends what is new in the end marks of this host's ranks, as soon as it is there.

    It reads memory, and takes no part in a step. Where ranks leave marks faster than can be sent, some are left out.
    say: told, once, why nothing arrives.
    """

    def _run(self) -> None:
        while not self._ended.wait(_BEGIN):
            try:
                if (tier := tiers.fast_tier_of(self._paths)) is not None:
                    self._send(tier.root.name, end_marks.marks_of(tier))
            except FAULTS as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == _MARKS_TOLD_AFTER and not self._ended.is_set():
            self._tell_why(f"telling {self._host}: {in_words(error)}")
        self._ended.wait(_MARKS_AGAIN)

    def _tell_why(self, fault: str) -> None:
        self._say(f"the end marks of this host are in no other host's memory: {fault}")

    def _send(self, run: str, marks: EndMarkPaths) -> None:
        """As long as these marks are those of the attempt, if there are any. Raises FAULTS."""
        if not marks.hosts.exists():
            return
        hosts, ranks = marks.hosts.read_text(), end_marks.ranks_of(marks)
        with self._connect() as connection, closing(NewsOfMarks(marks, ranks)) as news:
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
            if self._ended.wait(max(_MARKS_POLL, sum(len(piece.data) for piece in pieces) / _MOST_RATE)):
                connection.require_wanted()
        connection.send_mark(_ALIVE)
