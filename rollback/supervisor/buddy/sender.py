"""Sends each snapshot of this host to its buddy, beside the training and no faster than needed."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.tiers import Located
from rollback.ring.drainer import lower_priority
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import FAULTS, BuddyRequest, Parcel, connect, in_words, ranks_in, send_shards
from rollback.terminal.quantities import size

_POLL = 0.3
_AGAIN = 5.0  # seconds behind a failure
_TOLD_AFTER = 3  # failures in a row: a host that is being replaced is no fault
_END = 1.0  # seconds that the thread has to end; where a name is looked up it takes longer, and does no harm
_FIRST_INTERVAL = 10.0  # seconds between two snapshots, until it is known
_LEAST_RATE = 20e6  # bytes a second


class SnapshotLeft(OSError):
    """The snapshot's slot is used for another one already."""


class BuddySender:
    """A thread that sends the newest snapshot in this host's slots, whenever it is another one. `close` it.

    A copy is sent evenly over half the time between two snapshots, so that neither the network nor a core is busy with
    it for longer bursts than needed. secret: of the attempt. tell: called with the fault, in words, and with None
    behind each copy that has arrived. say: told what a copy costs, once.
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
        self._paths, self._address, self._seat, self._secret = paths, address, seat, secret
        self._host = address.rpartition(":")[0]
        self._tell, self._say = tell, say
        self._tier: SlotPaths | None = None
        self._seen: dict[int, tuple[int, int] | None] = {}
        self._sent = ""
        self._costs_told = False
        self._failures = 0
        self._newest = -1
        self._newest_at: float | None = None
        self._interval = _FIRST_INTERVAL
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollback-buddy-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, also in the middle of a copy: the buddy keeps the one before."""
        self._ended.set()
        self._thread.join(_END)

    def _run(self) -> None:
        lower_priority()
        while not self._ended.wait(_POLL):
            try:
                if (place := self._unsent()) is not None:
                    self._send(place)
                    self._sent, self._failures = place.name, 0
                    self._tell(None)
            except FAULTS as error:
                self._seen = {}  # look again
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._ended.is_set():
            return
        self._failures += 1
        if self._failures >= _TOLD_AFTER:
            self._tell(f"sending them to {self._host}: {in_words(error)}")
        if not isinstance(error, SnapshotLeft):
            self._ended.wait(_AGAIN)

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

        with connect(self._address, self._secret, self._ended.is_set) as connection:
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
