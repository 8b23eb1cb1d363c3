"""A process beside a supervisor that holds its end of torch's c10d store, through which the hosts of a job meet.

The supervisor does not import torch, so this process does. It understands nothing of what it carries: lines from the
supervisor go to the other hosts, and lines of the other hosts to the supervisor. The host of the endpoint has the store
in this process; its supervisor leads. What the leader says goes to all others; what they say goes to the leader.

| key | is |
|---|---|
| `.../down` | the number of the leader's last line |
| `.../down/N` | its line N; the last 64 are there |
| `.../up` | the lines of the others that the leader has not taken yet |

A follower waits for the next line in the store, and the leader takes all new lines at once, so nobody polls the store
over the network: what there is to do grows with the lines that are said. The process ends with its supervisor.
"""

import importlib
import json
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rollback.agent.entry import end_with
from rollback.agent.fork_server import name_this_process
from rollback.environment import ENV_MEETING
from rollback.instructions import MeetingPoint

_KEPT = 64  # lines of the leader
_POLL = 0.1
_CONNECT = timedelta(seconds=10)
_MUTE = 20.0  # seconds after which what listens there is no store: torch itself would wait for its answer for ever
_LINE = timedelta(seconds=10)  # after which a follower asks whether it has missed one
_EMPTY = b"\n"


class Channel:
    """The lines to and from the supervisor: one JSON object each."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("rb")
        self._writing = threading.Lock()

    def tell(self, **what: object) -> None:
        try:
            with self._writing:
                self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            os._exit(0)  # the supervisor is gone

    def lines(self) -> Any:
        """The supervisor's lines, without their ends."""
        return (line.rstrip(b"\n") for line in self._lines)


class MeetingEnd(ABC):
    """This host's end: of the host that has the store, or of another one. One thread says, one listens."""

    def __init__(self, store: Any, keys: str, channel: Channel) -> None:
        self._store, self._keys, self._channel = store, keys, channel

    def key(self, name: str) -> str:
        return f"{self._keys}/{name}"

    @abstractmethod
    def say(self, line: bytes) -> None:
        """Carry a line of the supervisor to the other hosts."""

    def say_all(self) -> None:
        for line in self._channel.lines():
            self.say(line)

    @abstractmethod
    def listen(self) -> None:
        """Carry lines of the other hosts to the supervisor, for ever."""

    def hear(self, lines: bytes) -> None:
        """Pass lines of other hosts on to the supervisor. Text that is none is told as what it is."""
        for line in lines.split(b"\n"):
            if line:
                self._channel.tell(line=line.decode("utf-8", "replace"))


class StoreHost(MeetingEnd):
    def __init__(self, store: Any, keys: str, channel: Channel) -> None:
        super().__init__(store, keys, channel)
        self._said = 0
        store.set(self.key("up"), _EMPTY.decode())
        store.set(self.key("down"), "0")

    def say(self, line: bytes) -> None:
        self._said += 1
        self._store.set(self.key(f"down/{self._said}"), line.decode())
        self._store.set(self.key("down"), str(self._said))
        if self._said > _KEPT:
            self._store.delete_key(self.key(f"down/{self._said - _KEPT}"))

    def listen(self) -> None:
        while True:
            waiting = self._store.get(self.key("up"))
            while waiting != _EMPTY:
                try:
                    found = self._store.compare_set(self.key("up"), waiting.decode(), _EMPTY.decode())
                except UnicodeDecodeError:  # no supervisor said that
                    found = waiting = _EMPTY
                    self._store.set(self.key("up"), _EMPTY.decode())
                if found == _EMPTY:
                    self.hear(waiting)
                waiting = found
            time.sleep(_POLL)


class StoreGuest(MeetingEnd):
    """other: a second connection, for what this host says; the first one mostly waits."""

    def __init__(self, store: Any, other: Any, keys: str, channel: Channel) -> None:
        super().__init__(store, keys, channel)
        self._other = other

    def say(self, line: bytes) -> None:
        """The store says nothing to an append, so it is asked something behind it: of a host that is cut off, one line
        is then under way, and not all that it has said since."""
        self._other.append(self.key("up"), line.decode() + "\n")
        self._other.check([self.key("up")])

    def listen(self) -> None:
        missing: Any = importlib.import_module("torch.distributed").DistStoreError
        heard: int | None = None
        while True:
            try:
                if heard is None:
                    heard = int(self._store.get(self.key("down")))
                line = self._store.get(self.key(f"down/{heard + 1}"))
            except missing:  # nothing was said for a while, or what was said has left the store already
                if heard is not None and (newest := int(self._store.get(self.key("down")))) > heard:
                    heard = newest - 1
                continue
            heard += 1
            self.hear(line)


def meet(point: MeetingPoint, channel: Channel) -> MeetingEnd:
    """The store at the endpoint: had by this process, or another's. Raises what torch raises."""
    distributed: Any = importlib.import_module("torch.distributed")
    utils: Any = importlib.import_module("torch.distributed.elastic.rendezvous.utils")
    is_host = utils._matches_machine_hostname(point.host) if point.is_host is None else point.is_host
    if is_host:
        try:
            return StoreHost(_store(distributed, point, channel, has_it=True), point.keys, channel)
        except (ValueError, RuntimeError):
            if point.is_host:
                raise
            # Another process of this host has it: as for torchrun, this one is a guest then.
    first = _store(distributed, point, channel, has_it=False)
    return StoreGuest(first, _store(distributed, point, channel, has_it=False), point.keys, channel)


def _store(distributed: Any, point: MeetingPoint, channel: Channel, *, has_it: bool) -> Any:
    through = threading.Event()

    def watch() -> None:
        if not through.wait(_MUTE):
            channel.tell(
                gone="what listens there does not answer as torch's store does; ss -ltnp there shows what it is"
            )
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        store = distributed.TCPStore(
            point.host, point.port, is_master=has_it, timeout=_CONNECT, wait_for_workers=False, multi_tenant=False
        )
    finally:
        through.set()
    store.set_timeout(_LINE)
    return store


def main() -> None:
    end_with(os.getppid())
    point = MeetingPoint(**json.loads(os.environ.pop(ENV_MEETING)))
    channel = Channel(point.descriptor)
    name_this_process("meeting")

    def carry(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - torch's own are of many kinds; the supervisor is told
            channel.tell(gone=str(error).splitlines()[0] if str(error) else type(error).__name__)
        os._exit(0)

    def take_part() -> None:
        end = meet(point, channel)
        channel.tell(role="host" if isinstance(end, StoreHost) else "guest")
        threading.Thread(target=carry, args=(end.say_all,), daemon=True).start()
        end.listen()

    carry(take_part)
