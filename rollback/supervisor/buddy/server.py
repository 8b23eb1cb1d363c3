"""A buddy: keeps a copy of another host's part of the newest snapshot in this host's memory, and gives it back."""

import hmac
import socketserver
import threading
from typing import Any

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies
from rollback.checkpoints.fast_tier.sizing import free_memory
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.errors import RollbackError
from rollback.ring.drainer import lower_priority
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import (
    TIMEOUT,
    Answer,
    BuddyRequest,
    hear,
    parcel_of,
    receive_files,
    say,
    send_files,
)
from rollback.system import files


class BuddyServer(socketserver.ThreadingTCPServer):
    """Listens on a free port of this host from the beginning, and answers in threads of its own. `close` it.

    secret: of the launch that leads; empty: nobody is answered yet.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(("", 0), _Conversation)
        self.paths, self.secret = paths, ""
        self.arriving = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.1,), name="rollback-buddy", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone, or says what nobody understands: it learns that from its connection."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Conversation(socketserver.StreamRequestHandler):
    server: BuddyServer
    timeout = TIMEOUT

    def handle(self) -> None:
        lower_priority()
        request = hear(self.rfile, BuddyRequest)
        if not self.server.secret or not hmac.compare_digest(request.secret.encode(), self.server.secret.encode()):
            return
        try:
            say(self.connection, self._answer(request))
        except (OSError, RollbackError) as error:
            fault = error.message if isinstance(error, RollbackError) else str(error)
            say(self.connection, Answer(fault=fault))

    def _answer(self, request: BuddyRequest) -> Answer:
        tier, identity = tiers.fast_tier_of(self.server.paths), read_identity(self.server.paths)
        if tier is None or identity is None or identity.run_id != request.run:
            return Answer(fault="this host has no memory of that run yet")
        if request.wants == "keep":
            return self._keep(tier, request)
        copy = buddy_copies.newest(tier, request.seat)
        if copy is None:
            return Answer()
        found = Answer(seq=copy.manifest.seq, step=copy.manifest.step)
        if request.wants == "look":
            return found
        body = (copy.directory / MANIFEST).read_bytes()
        parcel = parcel_of(copy.slot, copy.shards, body)
        say(
            self.connection,
            found.model_copy(update={"parcel": parcel, "identity": identity.model_dump(mode="json")}),
        )
        send_files(self.connection, parcel, copy.shards, body)
        return found

    def _keep(self, tier: SlotPaths, request: BuddyRequest) -> Answer:
        parcel = request.parcel
        if parcel is None:
            return Answer(fault="nothing is to be kept")
        if not self.server.arriving.acquire(blocking=False):
            return Answer(fault="another copy is arriving here")
        try:
            if parcel.bytes > (room := free_memory(tier.root) // 2):
                return Answer(fault=f"its host has no room for {parcel.bytes} bytes (half of what is free is {room})")
            directory = buddy_copies.prepare(tier, request.seat, parcel.slot)
            try:
                say(self.connection, Answer())
                manifest, body = receive_files(self.rfile, parcel, directory)
            except (OSError, RollbackError):
                files.remove_directory(directory)
                raise
            buddy_copies.keep(tier, directory, body)
            return Answer(seq=manifest.seq, step=manifest.step)
        finally:
            self.server.arriving.release()
