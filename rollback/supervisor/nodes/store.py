"""Records that go from host to host through torch's c10d store, by way of a process that knows torch.

`rollback.agent.meeting` is that process. Anybody who reaches the endpoint may say anything there. So a record counts
only if its name is one that the other side may use, and if it is no larger than a file of the run directory might be;
who reads it checks its content.
"""

import contextlib
import fnmatch
import json
import os
import re
import socket
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import psutil

from rollback.environment import ENV_MEETING
from rollback.errors import RollbackError
from rollback.instructions import MEETING_MODULE, MeetingPoint, program
from rollback.rundir.beacon import LIMIT, write_in_place
from rollback.system import files
from rollback.system.threads import start_thread

EVERY = 5.0
"""Seconds between two signs of life. The work of the store and the leader grows with the hosts, divided by this."""
_LINE_LIMIT = 4 * LIMIT  # a record in a line is a JSON text in a JSON text
_PATIENCE = 10.0
_OF_FOLLOWERS = re.compile(r"(part-)?node-[A-Za-z0-9_.-]{1,200}\.json")
_OF_LEADER = re.compile(r"(orders|wanted)\.json")


class StoreTransport:
    """The transport by the store at an endpoint. It starts at once and needs some seconds; `close` it.

    role: None until the store is reached; `host`: the store is here, so its supervisor leads. gone: why the store
    cannot be reached, or can be no longer; None while it can. mirror: where the records of others are kept as files,
    for whoever reads the run directory.
    """

    every = EVERY
    pace = 0.0

    def __init__(self, point: MeetingPoint) -> None:
        self.role: Literal["host", "guest"] | None = None
        self.gone: str | None = None
        self.point = point
        self.mirror: Path | None = None
        self._read: dict[str, bytes] = {}
        self._shown: dict[str, str] = {}
        self._own = os.urandom(8).hex()  # tells this end from another one of the same host, before or after it
        self._senders: dict[str, str] = {}
        self._past: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Start the process that has this host's end of the store, and the thread that hears what it says."""
        ours, theirs = socket.socketpair()
        with theirs:
            told = json.dumps(asdict(replace(self.point, descriptor=theirs.fileno())))
            quiet = {"TORCH_CPP_LOG_LEVEL": "FATAL", ENV_MEETING: told}
            try:
                self._process = subprocess.Popen(
                    program(MEETING_MODULE), env={**os.environ, **quiet}, pass_fds=[theirs.fileno()],
                    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            except OSError:
                ours.close()
                raise
        ours.settimeout(_PATIENCE)
        self._socket = ours
        thread = threading.Thread(target=self._listen, name="rollback-meeting", daemon=True)
        try:
            start_thread(thread)
        except RollbackError as error:  # no better than no process
            ours.close()
            self._process.kill()
            self._process.wait()
            raise OSError(error.message) from error
        self._thread = thread

    def renew(self) -> None:
        """The store that was here is gone, with all that was in it: make it anew, and show again what is shown. Who
        had come has to come again. Where it cannot be made, it is still gone."""
        self.close()
        with self._lock:
            self._senders.clear()
            self._past.clear()
            self._read.clear()
            self.role = self.gone = None
            try:
                self._begin()
                for name, body in self._shown.items():
                    self._send_line(name, body)
            except OSError as error:  # no process or descriptor is to be had at present
                self.gone = str(error)

    @property
    def processes(self) -> list[psutil.Process]:
        """The process that has this host's end, if it is there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(self._process.pid)]
        return []

    def write(self, name: str, body: bytes) -> None:
        if len(body) > LIMIT:
            raise OSError(f"a record of {len(body)} bytes is too large for the store")
        self._send(name, body.decode())

    def remove(self, name: str) -> None:
        """Take back what was written. Where the store is gone nothing shows any more, and nothing is to be done."""
        with contextlib.suppress(OSError):
            self._send(name, "")

    def read(self, pattern: str) -> dict[str, bytes | None]:
        with self._lock:
            return {name: self._read[name] for name in sorted(self._read) if fnmatch.fnmatchcase(name, pattern)}

    def close(self) -> None:
        self._forget(*self._senders)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._socket.close()

    def _send(self, name: str, body: str) -> None:
        with self._lock:
            if body:
                self._shown[name] = body
            else:
                self._shown.pop(name, None)
            self._send_line(name, body)

    def _send_line(self, name: str, body: str) -> None:
        if self.gone is not None:
            raise OSError(f"the store at {self.place} is gone: {self.gone}")
        self._socket.sendall(json.dumps({"name": name, "body": body, "from": self._own}).encode() + b"\n")

    @property
    def place(self) -> str:
        return f"{self.point.host}:{self.point.port}"

    def _listen(self) -> None:
        lines = bytearray()
        try:
            while data := self._receive():
                *whole, rest = (lines + data).split(b"\n")
                lines = bytearray(rest)
                for line in whole:
                    self._take(bytes(line))
        except OSError:
            pass
        self.gone = self.gone or "the process that had this host's end of it has ended"

    def _forget(self, *names: str) -> None:
        """Remove the files of records that are shown no more."""
        if self.mirror is not None:
            for name in names:
                with contextlib.suppress(OSError):
                    files.unlink(self.mirror / name)

    def _receive(self) -> bytes:
        while True:
            with contextlib.suppress(TimeoutError):
                return self._socket.recv(1 << 16)

    def _take(self, line: bytes) -> None:
        told = json.loads(line)  # of our own process
        if "role" in told:
            self.role = told["role"]
        elif "gone" in told:
            self.gone = str(told["gone"])
        else:
            self._hear(told["line"])

    def _hear(self, line: str) -> None:
        """A line of another host, or of anybody."""
        try:
            told = json.loads(line) if len(line) <= _LINE_LIMIT else {}
            name, body, sender = told["name"], told["body"].encode(), str(told.get("from", ""))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        allowed = _OF_FOLLOWERS if self.role == "host" else _OF_LEADER
        if not isinstance(name, str) or not allowed.fullmatch(name) or len(body) > LIMIT:
            return
        with self._lock:
            if self._is_late(name, sender):
                return
            has_just_come = self._senders.get(name) != sender
            self._senders[name] = sender
            if not body:
                self._read.pop(name, None)
                self._forget(name)
                return
            self._read[name] = body
            if self.mirror is not None:
                with contextlib.suppress(OSError):
                    write_in_place(self.mirror / name, body)
            if self.role == "host" and has_just_come:  # and has heard nothing yet
                with contextlib.suppress(OSError):
                    for shown, content in self._shown.items():
                        self._send_line(shown, content)

    def _is_late(self, name: str, sender: str) -> bool:
        """Whether a line is from before its host came anew. A host that was cut off has one line under way, which may
        arrive when the next launch there has the name. No more than one: the next is sent when the store has answered
        (`StoreGuest.say`). So whoever goes on to speak lives, and two have the same name: both are heard, and the
        leader says so."""
        now = self._senders.get(name)
        if now in (None, sender):
            return False
        if (name, sender) in self._past:
            self._past.remove((name, sender))
            return True
        self._past.add((name, now))
        return False
