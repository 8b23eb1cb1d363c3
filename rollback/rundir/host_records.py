"""Small records that a process keeps visible for other hosts: the content is news, each rewrite is a sign of life.

No clock is compared with another host's clock. A reader notes, by its own clock, when it last saw a record change. A
host whose own writes fail cannot know whether others can write, so it declares nobody silent until its writes succeed
again.

How records get to other hosts is the affair of a `Transport`. `SharedDirectory` is the one by files: a file is written
in place, over existing bytes, so a full disk stops nobody. It is opened and closed for each write, since on a network
file system only that makes the write visible to others. A reader believes the content only if the hash after it is
right.
"""

import contextlib
import errno
import fnmatch
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import xxhash
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from rollback.facts.fact import escape_surrogates
from rollback.system import files
from rollback.system.durable import read_small_file, write_all
from rollback.system.small_json import parse_model
from rollback.system.threads import start_thread

# Network file systems may show a file as it was some seconds ago.
SILENT_AFTER = 20.0
LIMIT = 1 << 20
"""Bytes of a record, at most."""
_SIGNS, _READS = 200, 256
"""Signs of life of all hosts in a second, and files that the leader reads, and as many that the followers do."""
_POLL = 0.1  # seconds between two looks of a supervisor, of any number of hosts
_SELDOM = 8.0  # seconds at most: two of them are less than SILENT_AFTER
_ROOM = 1 << 14  # bytes that a file has from the start; one that needs more gets more, while the disk has some


_Record = TypeVar("_Record", bound=BaseModel)


class Transport(Protocol):
    """Carries records between hosts. A record has a name, and one writer at a time."""

    @property
    def every(self) -> float:
        """Seconds between two signs of life."""
        ...

    @property
    def pace(self) -> float:
        """Seconds for which what was read is not read again."""
        ...

    def write(self, name: str, body: bytes) -> None:
        """Show a record to the other hosts. Raises OSError."""
        ...

    def remove(self, name: str) -> None:
        """Show it no more. Raises OSError."""
        ...

    def read(self, pattern: str) -> dict[str, bytes | None]:
        """The records whose names match a pattern, as they were last seen; None: one is being written, or cannot be
        read at present."""
        ...


class SharedDirectory:
    """The transport by files in a directory that all hosts share.

    hosts: how many take part. However many they are, all together visit some hundred files a second: a host shows signs
    of life less often where there are many, and what is read again within `pace` seconds is what was read before. News
    are written at once.
    """

    def __init__(self, directory: Path, hosts: int = 1) -> None:
        self._directory = directory
        self.every = min(_SELDOM, max(1.0, hosts / _SIGNS))
        self.pace = min(_SELDOM, max(0.0, hosts / _READS - _POLL))
        self._last: dict[str, tuple[float, dict[str, bytes | None]]] = {}

    def write(self, name: str, body: bytes) -> None:
        try:
            write_in_place(self._directory / name, body)
        except FileNotFoundError:
            files.make_directory(self._directory)
            write_in_place(self._directory / name, body)

    def remove(self, name: str) -> None:
        files.unlink(self._directory / name)

    def read(self, pattern: str) -> dict[str, bytes | None]:
        now = time.monotonic()
        if pattern not in self._last or now - self._last[pattern][0] >= self.pace:
            self._last[pattern] = now, self._read(pattern)
        return self._last[pattern][1]

    def _read(self, pattern: str) -> dict[str, bytes | None]:
        found: dict[str, bytes | None] = {}
        for name in self._names(pattern):
            try:
                found[name] = read_in_place(self._directory / name)
            except FileNotFoundError:
                continue  # gone
            except (OSError, ValueError):  # of a disk that fails for a moment nobody is gone
                found[name] = None
        return found

    def _names(self, pattern: str) -> list[str]:
        if "*" not in pattern:
            return [pattern]
        try:
            # Listing the directory makes a network file system ask its server which files there are.
            return sorted(fnmatch.filter(os.listdir(self._directory), pattern))
        except FileNotFoundError:
            return []
        except OSError:
            return [*self._last[pattern][1]] if pattern in self._last else []


class RecordPublisher(Generic[_Record]):
    """Keeps a record visible until `stop`. Its thread rewrites the record, so it stays fresh while other work takes
    time.

    Records have a field `beat`, which counts the writes.

    A failing write is reported once and retried at the next beat; `failing` is true until it succeeds. Raises
    RollbackError where no thread can be made.
    """

    def __init__(self, transport: Transport, name: str, record: _Record, say: Callable[[str], None]) -> None:
        self._transport, self._name, self.record, self._say = transport, name, record, say
        self._beat = 0
        self.failing = False
        self._guard = threading.Lock()
        self._out = threading.Event()
        self._thread = threading.Thread(target=self._keep_visible, name="rollback-publisher", daemon=True)
        with self._guard:  # the thread comes first: where there is none, nothing is shown that would grow stale
            start_thread(self._thread)
            self._write()

    def show(self, **changes: object) -> None:
        """Write a new record at once."""
        with self._guard:
            changed = self.record.model_copy(update=changes)
            if changed == self.record:
                return
            self.record = changed
            self._write()

    def stop(self, *, remove: bool = True) -> None:
        """Write no more; with `remove`, show the record no more either. Where the disk refuses, it falls silent."""
        self._out.set()
        self._thread.join()
        if remove:
            with contextlib.suppress(OSError):
                self._transport.remove(self._name)

    def _keep_visible(self) -> None:
        while not self._out.wait(self._transport.every):
            with self._guard:
                self._write()

    def _write(self) -> None:
        self._beat += 1
        shown = self.record.model_copy(update={"beat": self._beat})
        try:
            body = shown.model_dump_json()
        except PydanticSerializationError:  # a directory whose name is no UTF-8, which Python reads as surrogates
            body = json.dumps(escape_surrogates(shown.model_dump(mode="json")))
        try:
            self._transport.write(self._name, body.encode())
        except OSError as error:
            if not self.failing:
                self._say(f"writing {self._name} fails ({error}); the other nodes may take this one for lost")
            self.failing = True
        else:
            self.failing = False


def write_in_place(path: Path, body: bytes) -> None:
    """Overwrite the beginning of a file with one line and its hash; older bytes after them mean nothing. Raises
    OSError."""
    content = body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
    if len(content) > LIMIT:
        raise OSError(errno.EFBIG, f"a record of {len(body)} bytes, with its hash at most {LIMIT} are read", str(path))
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT)  # to make room, some C libraries read what is there
    try:
        if os.fstat(fd).st_size < (room := max(_ROOM, len(content))):
            os.posix_fallocate(fd, 0, room)
        write_all(fd, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # a descriptor's error names no file
    finally:
        os.close(fd)


def read_in_place(path: Path) -> bytes:
    """Read what `write_in_place` wrote last. Raises OSError, and ValueError where it is not, or not yet, whole."""
    body, check, _ = read_small_file(path, LIMIT).split(b"\n", 2)
    if xxhash.xxh3_128_hexdigest(body).encode() != check:
        raise ValueError(f"{path} is being written")
    return body


class RecordWatcher(Generic[_Record]):
    """Reads the records whose names match a pattern, and knows which of them still change.

    writes_fail: whether silence means nothing at present, because this host's own writes fail.
    """

    def __init__(
        self,
        transport: Transport,
        pattern: str,
        model: type[_Record],
        clock: Callable[[], float] = time.monotonic,
        writes_fail: Callable[[], bool] = lambda: False,
    ) -> None:
        self._transport, self._pattern, self._model, self._clock = transport, pattern, model, clock
        self._writes_fail = writes_fail
        self._seen: dict[str, tuple[bytes, float, _Record]] = {}

    def look(self) -> dict[str, _Record]:
        """The readable records by name, without those that have fallen silent."""
        found, now, writes_fail = {}, self._clock(), self._writes_fail()
        for name, content in self._transport.read(self._pattern).items():
            body, since, record = self._of(name, content, now)
            if record is None:
                continue
            since = now if writes_fail else since
            self._seen[name] = body, since, record
            if now - since < SILENT_AFTER:
                found[name] = record
        return found

    def _of(self, name: str, body: bytes | None, now: float) -> tuple[bytes, float, _Record | None]:
        """The record, its content, and since when it has it. A content that is read again is not parsed again."""
        before = self._seen.get(name)
        if before is not None and body in (None, before[0]):  # None: it cannot be read now; nobody is lost by that
            return before
        try:
            return body or b"", now, parse_model(body or b"", self._model)
        except ValueError:
            return b"", now, None
