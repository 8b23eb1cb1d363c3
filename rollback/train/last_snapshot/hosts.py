"""The other hosts of a job, as a rank reaches them when its own job is broken: by torchrun's store.

It is the store at which the ranks met when they started, in torchrun's process on the host of rank 0, which waits for
ranks that are busy with a last snapshot. No rank sees the death of one on another host. So the first rank of each host
has a thread that waits in the store for its host's *bell*: one connection for each host, and no traffic until somebody
rings. What the hosts say to each other then is in `exchange`.

| key         | H: a host's first rank                                              |
|-------------|---------------------------------------------------------------------|
| `bell/H`    | rings the ranks of a host; whoever waits for it takes it away       |
| `here/H`    | its ranks have heard of it, or another host speaks for it           |
| `refusal/H` | why a rank of it, the last one that told, has nothing to offer      |
| `stopped`   | why a rank leaves no marks any more; the bell of rank 0's host tells |
"""

import contextlib
import copy
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed
from pydantic import BaseModel

from rollback.checkpoints.fast_tier import end_marks
from rollback.system.threads import start_thread
from rollback.train.last_snapshot.agreement import FIRST
from rollback.train.last_snapshot.proof import StoreGone

_REACH = 5.0  # seconds to reach the store's host
_LOOK = 1.0  # after which it is looked whether there is still somebody to connect to
_CONNECT = 15.0  # to connect: for a name server that does not answer, torch waits five and more on either side
_FOR_EVER = timedelta(days=1000)
_ASKED = 2000  # how often all hosts together may ask the store, in a second
_POLL = 0.01
YES = b"1"
"""What is told where it matters only that it is."""
_BY_ANOTHER = b"2"
_OVER = b"."
_MOMENT = 2.0
_PIECE = 4 << 20  # bytes; torch's store ends the connection of who tells more than twice as many at once
_IN_PIECES = b"\0"


class HostStore:
    """A connection to torchrun's store. One thread uses it at a time. Raises StoreGone, as all methods do."""

    def __init__(self, place: tuple[str, int], keys: str) -> None:
        self._keys, self._words = keys, f"the store at {place[0]}:{place[1]}, by which the hosts agree"
        try:
            self._store = _connection(place)
        except (OSError, RuntimeError) as error:
            raise self._gone(error) from error

    def set(self, told: Mapping[str, bytes]) -> None:
        with self._reaching():
            self._store.multi_set([f"{self._keys}/{name}" for name in told], [*told.values()])

    def set_once(self, name: str, told: bytes) -> None:
        """What was told by that name first stays, whoever tells what behind it. It may be long, unlike what `set`
        tells: its pieces are there before anybody learns of them."""
        key = f"{self._keys}/{name}"
        with self._reaching():
            if len(told) > _PIECE:
                pieces = {f"{key}/{uuid.uuid4()}": told[at : at + _PIECE] for at in range(0, len(told), _PIECE)}
                for place, piece in pieces.items():
                    self._store.set(place, piece)
                told = _IN_PIECES + "\n".join(pieces).encode()
            self._store.compare_set(key, "", told)

    def get(self, name: str) -> bytes | None:
        """What was told by that name; None: nothing yet, or it was taken back."""
        with self._reaching():
            key = f"{self._keys}/{name}"
            told: bytes = self._store.get(key) if self._store.check([key]) else b""
            if told.startswith(_IN_PIECES):
                told = b"".join(map(self._store.get, told.removeprefix(_IN_PIECES).decode().split("\n")))
            return told or None

    def await_once(self, name: str) -> bytes:
        """Wait for ever until something is told by that name, and forget it."""
        with self._reaching():
            key = f"{self._keys}/{name}"
            self._store.wait([key], _FOR_EVER)
            told: bytes = self._store.get(key)
            self._store.delete_key(key)
            return told

    def take_back(self, name: str) -> None:
        """What was told by that name holds no more. The key stays: who has just found it would wait for its value."""
        self.set({name: b""})

    def of_round(self, number: int) -> "HostStore":
        """What is told in one round of an agreement, by the same connection."""
        told = copy.copy(self)
        told._keys = f"{self._keys}/{number}"
        return told

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistError and its kind
            raise self._gone(error) from error

    def _gone(self, error: Exception) -> StoreGone:
        return StoreGone(f"{self._words}, cannot be reached: {str(error).splitlines()[0]}")


def _connection(place: tuple[str, int]) -> Any:
    """Of torch's own client. It tries for half a minute, also where nobody listens any more: in the moment in which
    the host of the store is lost, whoever asks would keep its host out of the next attempt for so long. So it is looked
    again and again whether somebody listens. Raises OSError, RuntimeError."""
    distributed: Any = torch.distributed
    connected: Future[Any] = Future()

    def connect() -> None:
        try:
            timeout = timedelta(seconds=_CONNECT)
            connected.set_result(distributed.TCPStore(*place, timeout=timeout, wait_for_workers=False))
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            connected.set_exception(error)

    socket.create_connection(place, _REACH).close()  # torch's own complaint is forty lines
    threading.Thread(target=connect, name="rollback-connect", daemon=True).start()
    while connected not in futures.wait([connected], _LOOK).done:
        socket.create_connection(place, _REACH).close()
    return connected.result()


def place_of_store() -> tuple[str, int] | None:
    """Where torchrun's store is; None: the ranks have none that outlives them."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


class HostsOfJob(BaseModel, frozen=True):
    """What a rank of this host knows of the others, also for who speaks here when no rank is left (`host_proxy`)."""

    place: tuple[str, int]
    """Where the store is."""
    keys: str
    """What its keys begin with, which no other guard of this attempt uses."""
    hosts: tuple[int, ...]
    """The first rank of each, in their order."""
    own: int
    """That of this one."""
    ranks: tuple[int, ...]
    """Of this host."""
    attempt: int


class Hosts:
    """All hosts of the job, from a rank of one of them. Any thread may call."""

    def __init__(self, job: HostsOfJob) -> None:
        self.job, self.hosts, self.own = job, job.hosts, job.own
        self.pace = max(_POLL, len(job.hosts) / _ASKED)
        self._bell: threading.Thread | None = None

    def connect(self) -> HostStore:
        return HostStore(self.job.place, self.job.keys)

    # The bell --------------------------------------------------------------------------------------------------------

    def wait_for_bell(self, rung: Callable[[], None], stopped: Callable[[str], None]) -> None:
        """The first rank of each host: have a thread wait. rung: a rank of another host is about to end. stopped: a
        rank of another host leaves no marks any more; on rank 0. Raises StoreGone, and RollbackError where no thread
        can be made."""
        store = self.connect()
        self._bell = threading.Thread(
            target=self._wait, args=(store, rung, stopped), name="rollback-hosts", daemon=True
        )
        start_thread(self._bell)

    def _wait(self, store: HostStore, rung: Callable[[], None], stopped: Callable[[str], None]) -> None:
        with contextlib.suppress(StoreGone):  # then the attempt is over
            while (why := store.await_once(f"bell/{self.own}")) == end_marks.STOPPED:
                stopped((store.get("stopped") or b"").decode())
            if why != _OVER:
                store.set({f"here/{self.own}": YES})
                rung()

    def ring(self) -> None:
        """Have the ranks of all other hosts keep what they hold. Raises StoreGone."""
        bells = {f"bell/{host}": end_marks.RANK_ENDS_ELSEWHERE for host in self.hosts if host != self.own}
        self.connect().set({f"here/{self.own}": YES, f"bell/{self.own}": _OVER, **bells})

    def speak_for(self) -> None:
        """This host seems lost, and a rank of another one speaks for it. Its bell is left to it. Raises StoreGone."""
        self.connect().set({f"here/{self.own}": _BY_ANOTHER})

    def answers(self, host: int) -> bool:
        """Whether somebody there has heard of it. Raises StoreGone."""
        return self.connect().get(f"here/{host}") == YES

    def tell_stopped(self, why: str) -> None:
        """Raises StoreGone."""
        self.connect().set({"stopped": why.encode(), f"bell/{FIRST}": end_marks.STOPPED})

    def close(self) -> None:
        """End the thread."""
        if self._bell is not None and self._bell.is_alive():
            with contextlib.suppress(StoreGone):
                self.connect().set({f"bell/{self.own}": _OVER})
            self._bell.join(_MOMENT)

    def refuse(self, why: str) -> None:
        """Tell why this rank has nothing to offer."""
        with contextlib.suppress(StoreGone):
            self.connect().set({f"refusal/{self.own}": why.encode()})
