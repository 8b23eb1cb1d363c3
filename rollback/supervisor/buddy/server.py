"""A buddy: keeps a copy of another host's part of the newest snapshot in this host's memory, and gives it back."""

import hmac
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from rollback.checkpoints import tiers
from rollback.checkpoints.fast_tier import buddy_copies
from rollback.checkpoints.fast_tier.mark_copies import LiveMarkCopies
from rollback.checkpoints.fast_tier.sizing import free_memory
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.errors import RollbackError
from rollback.rundir import seal
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.supervisor.buddy.wire import (
    FAULTS,
    MARKS_SILENCE,
    SECRET,
    Answer,
    BuddyConnection,
    BuddyRefused,
    BuddyRequest,
    MarksHere,
    Parcel,
    in_words,
    ranks_in,
    receive_manifest,
    receive_shards,
    send_shards,
)
from rollback.system.threads import lower_priority, start_thread
from rollback.terminal.quantities import size

_STRANGERS = 5.0  # seconds in which who calls says the secret
_PAUSE = 0.1  # seconds
_CONNECTIONS = 32  # at a time: no stranger takes more descriptors and threads than that


class BuddyServer(socketserver.ThreadingTCPServer):
    """Listens on a free port of this host from the beginning, and answers in threads of its own. `close` it.

    secret: of the attempt; empty: nobody is answered. Raises OSError where there is no port to be had, RollbackError
    where there is no thread.
    """

    daemon_threads = True
    request_queue_size = 64

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(("", 0), _Conversation)
        self.paths, self.secret = paths, ""
        self.arriving, self.following = threading.Lock(), threading.Lock()
        self.connections = threading.Semaphore(_CONNECTIONS)
        try:
            start_thread(threading.Thread(target=self.serve_forever, args=(0.1,), name="rollback-buddy", daemon=True))
        except RollbackError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        """By either kind of address: which one others reach this host by is for the endpoint to say."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # no descriptor is to be had: who calls waits, and would be asked for again at once
            time.sleep(_PAUSE)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.connections.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no further thread can be started now
            self.connections.release()
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked has gone, or says what nobody understands: it learns that from its connection."""

    def rest(self) -> None:
        """Answer nobody, and give up what arrives: when this returns, nothing here touches this host's memory."""
        self.secret = ""
        with self.arriving, self.following:
            pass

    def close(self) -> None:
        self.rest()
        self.shutdown()
        self.server_close()


class _Conversation(socketserver.BaseRequestHandler):
    server: BuddyServer

    def handle(self) -> None:
        lower_priority()
        until = time.monotonic() + _STRANGERS
        connection = BuddyConnection(self.request, lambda: time.monotonic() > until)
        told, secret = connection.receive(SECRET), self.server.secret
        if not secret or not hmac.compare_digest(told, secret.encode()):
            return
        connection.given_up = lambda: self.server.secret != secret
        try:
            self._answer(connection, connection.hear(BuddyRequest))
        except FAULTS as error:
            connection.say(Answer(fault=in_words(error)))

    def finish(self) -> None:
        self.server.connections.release()

    def _answer(self, connection: BuddyConnection, request: BuddyRequest) -> None:
        tier, identity = tiers.fast_tier_of(self.server.paths), read_identity(self.server.paths)
        if tier is None or identity is None or identity.run_id != request.run:
            raise BuddyRefused("its host has no memory of that run yet")
        if request.keep is not None:
            with _one_at_a_time(self.server.arriving, connection):
                self._keep(connection, tier, request.seat, request.keep)
        elif request.marks is not None:
            with _one_at_a_time(self.server.following, connection):
                self._follow(connection, tier, request.seat, request.marks)
        else:
            self._give(connection, tier, request, identity.model_dump_json().encode())

    def _follow(self, connection: BuddyConnection, tier: SlotPaths, seat: int, here: MarksHere) -> None:
        if seal.present() is not None:
            raise BuddyRefused("end marks have no seal, and this run has one")
        with closing(LiveMarkCopies(tier, seat, here.ranks, here.hosts.encode())) as marks:
            connection.say(Answer())
            connection.silence = MARKS_SILENCE
            while True:
                clock, piece = connection.receive_mark()
                marks.hear(clock)
                if piece.data:
                    marks.put(piece)

    def _keep(self, connection: BuddyConnection, tier: SlotPaths, seat: int, parcel: Parcel) -> None:
        manifest, body = receive_manifest(connection, parcel)
        there = {(copy.slot, copy.manifest.content) for copy in buddy_copies.copies_of(tier, seat)}
        if (parcel.slot, manifest.content) not in there:
            if (count := parcel.bytes(manifest)) > free_memory(tier.root) // 2:
                raise BuddyRefused(f"its host has no room: half of what is free there is less than {size(count)}")
            with buddy_copies.arriving(tier, "copy") as directory:
                connection.say(Answer())
                receive_shards(connection, parcel, manifest, directory)
                buddy_copies.keep(tier, directory, seat, parcel.slot, manifest.name, body)
        connection.say(Answer(whole=True))

    def _give(self, connection: BuddyConnection, tier: SlotPaths, request: BuddyRequest, identity: bytes) -> None:
        copies = {copy.manifest.name: copy for copy in buddy_copies.copies_of(tier, request.seat)}
        name = next((name for name in request.give if name in copies), None)
        if name is None:
            connection.say(Answer())
            return
        copy, body = copies[name], (copies[name].directory / MANIFEST).read_bytes()
        parcel = Parcel(
            slot=copy.slot, ranks=ranks_in(copy.directory, copy.manifest), manifest=len(body), identity=len(identity)
        )
        connection.say(Answer(parcel=parcel))
        connection.send(body)
        connection.send(identity)
        send_shards(connection, parcel, copy.manifest, copy.directory)


@contextmanager
def _one_at_a_time(lock: threading.Lock, connection: BuddyConnection) -> Iterator[None]:
    if not lock.acquire(blocking=False):
        raise BuddyRefused("another copy is arriving there")
    try:
        connection.require_wanted()  # `rest` has not waited for it, if that came before
        yield
    finally:
        lock.release()
