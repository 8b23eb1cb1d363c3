"""Sends each snapshot of this host to its buddy, beside the training and no faster than needed."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollback.checkpoints import tiers
from rollback.checkpoints.tiers import Located
from rollback.errors import RollbackError
from rollback.ring.drainer import lower_priority
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import BuddyRequest, answer, connect, parcel_of, say, send_files
from rollback.terminal.quantities import size

_POLL = 0.3
_AGAIN = 5.0  # seconds behind a failure
_FIRST_INTERVAL = 10.0  # seconds between two snapshots, until it is known
_LEAST_RATE = 20e6  # bytes a second


class SnapshotLeft(Exception):
    """The snapshot's slot is used for another one already."""


class BuddySender:
    """A thread that sends the newest snapshot in this host's slots, whenever there is a newer one. `close` it.

    A copy is sent evenly over half the time between two snapshots, so that neither the network nor a core is busy with
    it for longer bursts than needed. secret: of the launch that leads. tell: called with the fault, in words, and with
    None behind each copy that has arrived. say: told what a copy costs, once.
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
        self._tell, self._say = tell, say
        self._newest = self._sent = -1
        self._seen_at: float | None = None
        self._interval = _FIRST_INTERVAL
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollback-buddy-sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, also in the middle of a copy: the buddy keeps the one before."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        lower_priority()
        while not self._ended.wait(_POLL):
            place = max(tiers.in_slots(self._paths), key=lambda place: place.manifest.seq, default=None)
            if place is None or place.manifest.seq <= self._sent:
                continue
            self._note_interval(place.manifest.seq)
            try:
                self._send(place)
                self._tell(None)
            except SnapshotLeft:
                continue
            except (OSError, RollbackError) as error:
                if not self._ended.is_set() and not tiers.has_left(place):
                    self._tell(error.message if isinstance(error, RollbackError) else str(error))
                    self._ended.wait(_AGAIN)

    def _note_interval(self, seq: int) -> None:
        if seq == self._newest:
            return
        now = time.monotonic()
        if self._seen_at is not None:
            self._interval = (now - self._seen_at) / max(1, seq - self._newest)
        self._newest, self._seen_at = seq, now

    def _send(self, place: Located) -> None:
        shards = [path for shard in place.manifest.shards if (path := place.directory / shard.file).exists()]
        manifest = Path(place.directory, MANIFEST).read_bytes()
        assert place.slot is not None
        parcel, identity = parcel_of(place.slot, shards, manifest), read_identity(self._paths)
        run = identity.run_id if identity is not None else ""
        request = BuddyRequest(secret=self._secret, run=run, seat=self._seat, wants="keep", parcel=parcel)
        began, rate, sent = time.monotonic(), max(_LEAST_RATE, 2 * parcel.bytes / max(self._interval, _POLL)), 0

        def behind_a_piece(count: int) -> None:
            nonlocal sent
            sent += count
            if tiers.has_left(place) or self._ended.wait(max(0.0, began + sent / rate - time.monotonic())):
                raise SnapshotLeft

        with connect(self._address) as connection, connection.makefile("rb") as stream:
            say(connection, request)
            answer(stream)
            send_files(connection, parcel, shards, manifest, behind_a_piece)
            answer(stream)
        if self._sent < 0:
            self._say(
                f"{size(parcel.bytes)} of each snapshot go to the memory of {self._address.rpartition(':')[0]} too: up "
                f"to twice as much there, and up to {size(rate)} a second of the network"
            )
        self._sent = place.manifest.seq
