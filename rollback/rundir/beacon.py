"""Small files that are rewritten every second for other hosts: the content is news, each rewrite is a sign of life.

No clock is compared with another host's clock. A reader notes, by its own clock, when it last saw a file change.

Such a file is written in place, over existing bytes, so a full disk stops nobody. It is opened and closed for each
write, since on a network file system only that makes the write visible to others. A reader believes the content only if
the hash after it is right. A host whose own writes fail cannot know whether others can write, so it declares nobody
silent until its writes succeed again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import xxhash
from pydantic import BaseModel

from rollback.system import files
from rollback.system.durable import read_small_file, write_all
from rollback.system.small_json import parse_model

EVERY = 1.0
# Network file systems may show a file as it was some seconds ago.
SILENT_AFTER = 20.0
_LIMIT = 1 << 20
_ROOM = 1 << 14  # bytes that a file has from the start; one that needs more gets more, while the disk has some


_Record = TypeVar("_Record", bound=BaseModel)


class Beacon(Generic[_Record]):
    """Keeps a record visible in a file until `put_out`. Its thread rewrites the file, so the record stays fresh while
    other work takes time.

    Records have a field `beat`, which counts the writes.

    A failing write is reported once and retried each second; `failing` is true until it succeeds.
    """

    def __init__(self, path: Path, record: _Record, say: Callable[[str], None]) -> None:
        self._path, self._record, self._say = path, record, say
        self._beat = 0
        self.failing = False
        self._guard = threading.Lock()
        self._out = threading.Event()
        files.make_directory(path.parent)
        self._write()
        self._thread = threading.Thread(target=self._keep_burning, name="rollback-beacon", daemon=True)
        self._thread.start()

    @property
    def record(self) -> _Record:
        return self._record

    def show(self, **changes: object) -> None:
        """Write a new record at once."""
        with self._guard:
            changed = self._record.model_copy(update=changes)
            if changed == self._record:
                return
            self._record = changed
            self._write()

    def put_out(self, *, remove: bool = True) -> None:
        """Write no more; with `remove`, delete the file too."""
        self._out.set()
        self._thread.join()
        if remove:
            files.unlink(self._path)

    def _keep_burning(self) -> None:
        while not self._out.wait(EVERY):
            with self._guard:
                self._write()

    def _write(self) -> None:
        self._beat += 1
        shown = self._record.model_copy(update={"beat": self._beat})
        try:
            write_in_place(self._path, shown.model_dump_json().encode())
        except OSError as error:
            if not self.failing:
                self._say(f"writing {self._path} fails ({error}); the other nodes may take this one for lost")
            self.failing = True
        else:
            self.failing = False


def write_in_place(path: Path, body: bytes) -> None:
    """Overwrite the beginning of a file with one line and its hash; older bytes after them mean nothing. Raises
    OSError."""
    content = body + b"\n" + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
    fd = files.open_file(path, os.O_WRONLY | os.O_CREAT)
    try:
        if os.fstat(fd).st_size < (room := max(_ROOM, len(content))):
            os.posix_fallocate(fd, 0, room)
        write_all(fd, content)
    finally:
        os.close(fd)


def read_in_place(path: Path) -> bytes:
    """Read what `write_in_place` wrote last. Raises OSError, and ValueError where it is not, or not yet, whole."""
    body, check, _ = read_small_file(path, _LIMIT).split(b"\n", 2)
    if xxhash.xxh3_128_hexdigest(body).encode() != check:
        raise ValueError(f"{path} is being written")
    return body


class Watchtower(Generic[_Record]):
    """Reads the records that match a pattern in a directory, and knows which of them still change.

    blind: whether silence means nothing at present, because this host's own writes fail.
    """

    def __init__(
        self,
        directory: Path,
        pattern: str,
        model: type[_Record],
        clock: Callable[[], float] = time.monotonic,
        blind: Callable[[], bool] = lambda: False,
    ) -> None:
        self._directory, self._pattern, self._model, self._clock = directory, pattern, model, clock
        self._blind = blind
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self) -> dict[str, _Record]:
        """The readable records by file name, without those that have fallen silent."""
        found, now, blind = {}, self._clock(), self._blind()
        # Listing the directory makes a network file system ask its server which files there are.
        for path in sorted(self._directory.glob(self._pattern)) if self._directory.is_dir() else []:
            before, since = self._seen.get(path.name, (b"", now))
            try:
                body = read_in_place(path)
            except OSError:
                continue  # gone
            except ValueError:
                body = before  # it is being written, and nobody is lost because of that
            try:
                record = parse_model(body, self._model)
            except ValueError:
                continue
            self._seen[path.name] = (body, now if blind or body != before else since)
            if now - self._seen[path.name][1] < SILENT_AFTER:
                found[path.name] = record
        return found
