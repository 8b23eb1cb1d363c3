"""Small files that are rewritten every second for other hosts to read: the content is news, the rewriting is life.

No clock is compared with another host's. A reader notes when it last saw a file change, by its own clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from rollback.rundir import files
from rollback.rundir.durable import read_small_file, write_file
from rollback.rundir.small_json import parse_model

EVERY = 1.0
# Network file systems may show a file as it was some seconds ago.
SILENT_AFTER = 20.0
_LIMIT = 1 << 20


_Record = TypeVar("_Record", bound=BaseModel)


class Beacon(Generic[_Record]):
    """Shows a record in a file until `put_out`, from a thread: what was said last stays in sight whatever takes time.

    Records have a field `beat`, which counts the writes.

    A file that cannot be written is said once and tried again each second.
    """

    def __init__(self, path: Path, record: _Record, say: Callable[[str], None]) -> None:
        self._path, self._record, self._say = path, record, say
        self._beat = 0
        self._failing = False
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
        """Say something new, at once."""
        with self._guard:
            changed = self._record.model_copy(update=changes)
            if changed == self._record:
                return
            self._record = changed
            self._write()

    def put_out(self, *, remove: bool = True) -> None:
        """Write no more; with `remove`, the file goes too."""
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
            write_file(self._path, shown.model_dump_json().encode(), durable=False)
        except OSError as error:
            if not self._failing:
                self._say(f"writing {self._path} fails ({error}); the other nodes will take this one for lost")
            self._failing = True
        else:
            self._failing = False


class Watchtower(Generic[_Record]):
    """Reads the records that match a pattern in a directory and knows which of them still change."""

    def __init__(
        self, directory: Path, pattern: str, model: type[_Record], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory, self._pattern, self._model, self._clock = directory, pattern, model, clock
        self._seen: dict[str, tuple[bytes, float]] = {}

    def look(self) -> dict[str, _Record]:
        """The readable records by file name, those that have fallen silent left out."""
        found, now = {}, self._clock()
        # Listing the directory makes a network file system ask its server which files there are.
        for path in sorted(self._directory.glob(self._pattern)) if self._directory.is_dir() else []:
            try:
                body = read_small_file(path, _LIMIT)
                record = parse_model(body, self._model)
            except (OSError, ValueError, ValidationError):
                continue  # gone, or being replaced
            before, since = self._seen.get(path.name, (b"", now))
            self._seen[path.name] = (body, now if body != before else since)
            if now - self._seen[path.name][1] < SILENT_AFTER:
                found[path.name] = record
        return found
