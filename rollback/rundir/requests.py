"""Requests: an operator's orders by `rollback rewind`, `skip` and `stop`, one small file for each.

The command is the only writer of its file, and writes it once. The ranks read it and answer in their journal, which
shows whether a request is open. Nobody rewrites or deletes a request, so the record stays complete.

The files come from outside. Their number and size are bounded. A file that is not a request is refused like any other
request, by name.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError, model_validator

from rollback.errors import RunDirectoryError, reporting
from rollback.facts.training import RequestKind, Window
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import sync_directory, write_all
from rollback.system.small_json import fault_of, read_model

_NAME = re.compile(r"(\d{6,9})-[0-9a-f]{8}")
_LIMIT = 1 << 14
_FILES = 10_000  # looked at in the directory
_LOOK_EVERY = 0.25  # seconds
# A directory's time stamp is as coarse as the kernel's tick, on some file systems a second: two files that come in one
# tick leave the same stamp. So what has just changed is looked at again.
_SETTLED_AFTER = 2.0


class Request(BaseModel, frozen=True, extra="forbid"):
    order: RequestKind
    to: int | None = Field(None, ge=0, lt=1 << 53)
    """The step to go back to (rewind)."""
    checkpoint: str | None = Field(None, max_length=40)
    """The checkpoint that whoever asked was told of (rewind)."""
    skip: Window | None = None
    """The batches to skip (skip; may go with a rewind)."""
    samples: tuple[Annotated[int, Field(ge=0, lt=1 << 53)], ...] = Field((), max_length=1000)
    """Data set indices to leave out from now on (quarantine), or no longer (release)."""
    who: str = Field(min_length=1, max_length=200)
    why: str = Field("", max_length=2000)
    at: str = Field(max_length=40)
    launch: str | None = Field(None, max_length=200)
    """For a stop: the launch that is to stop, as in its holder.json. A late stop must not end the next launch."""

    @model_validator(mode="after")
    def _says_what_its_order_needs(self) -> "Request":
        skips = self.skip is not None
        needs = {"rewind": (True, skips, False), "skip": (False, True, False), "stop": (False, False, False)}
        if (self.to is not None, skips, bool(self.samples)) != needs.get(self.order, (False, False, True)):
            raise ValueError(f"a request to {self.order} does not have these fields")
        if self.skip is not None and self.skip.last >= 1 << 53:
            raise ValueError("there is no such batch")
        if not f"{self.who}{self.why}{self.at}{self.launch or ''}{self.checkpoint or ''}".isprintable():
            # They go to people's terminals.
            raise ValueError("who or why has characters that cannot be printed, as a line break")
        return self

    def stops(self, launch: str | None) -> bool:
        """Whether it is to stop this launch."""
        return self.order == "stop" and self.launch in (None, launch)

    def in_words(self) -> str:
        return order_in_words(self.order, self.to, self.skip, self.samples)


def order_in_words(order: RequestKind, to: int | None, skip: Window | None, samples: Iterable[int]) -> str:
    """What is asked for. The others: fields of a request."""
    skipped = f"skip {skip.in_words()}" if skip else ""
    named = [*map(str, samples)]
    of_data = f"sample{'s' * (len(named) > 1)} {', '.join(named)}"
    match order:
        case "rewind":
            return f"rewind to step {to}" + (f" and {skipped}" if skip else "")
        case "skip":
            return skipped
        case "quarantine":
            return f"leave out {of_data}"
        case "release":
            return f"take {of_data} in again"
        case _:
            return "stop"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def submit(paths: RunPaths, request: Request) -> str:
    """Write a request and return its name. Durable on return; no other request is ever overwritten.

    Raises RunDirectoryError where the run directory cannot be written, or has more files than are looked at.
    """
    temporary = paths.requests / f".{uuid.uuid4().hex}"
    hint = "check the permissions and free space of the run directory"
    with reporting(RunDirectoryError, f"writing a request into {paths.requests}", hint):
        try:
            files.make_directory(paths.requests)
            sync_directory(paths.root)
            _require_one_more_is_seen(paths.requests)
            fd = files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(fd, request.model_dump_json().encode())
                os.fsync(fd)
            finally:
                os.close(fd)
            number = max((int(name.partition("-")[0]) for name in names(paths)), default=-1) + 1
            name = f"{number:06d}-{uuid.uuid4().hex[:8]}"
            with files.directory(paths.requests) as folder:  # unlike a rename a link replaces nothing
                os.link(temporary.name, paths.request(name).name, src_dir_fd=folder, dst_dir_fd=folder)
            sync_directory(paths.requests)
        finally:
            with contextlib.suppress(OSError):
                files.unlink(temporary)
    return name


def _require_one_more_is_seen(directory: Path) -> None:
    with os.scandir(directory) as entries:
        count = sum(1 for _ in islice(entries, _FILES))
    if count == _FILES:
        raise RunDirectoryError(
            f"{directory} has {count} files or more, and no further one would be seen by the ranks",
            hint="move the older ones elsewhere: the journal has what was answered. To stop the run, send SIGTERM to "
            "`rollback launch`",
        )


def names(paths: RunPaths) -> list[str]:
    """Names of all requests, oldest first; none where the directory is missing. Raises OSError."""
    try:
        with os.scandir(paths.requests) as entries:
            found = [entry.name[:-5] for entry in islice(entries, _FILES) if entry.name.endswith(".json")]
    except FileNotFoundError:
        return []
    return sorted((name for name in found if _NAME.fullmatch(name)), key=lambda name: (int(name[:-9]), name))


def read_request(paths: RunPaths, name: str) -> Request:
    """Read a request. Raises OSError where it cannot be read; ValueError, in words for people, where it is not a
    request."""
    try:
        return read_model(paths.request(name), Request, _LIMIT)
    except ValidationError as error:
        raise ValueError(f"it is not a request ({fault_of(error)})") from error


def sound_requests(paths: RunPaths, names: Iterable[str]) -> Iterator[tuple[str, Request]]:
    """Those of the named requests that can be read, with their names. What is no request is the ranks' to refuse."""
    for name in names:
        try:
            request = read_request(paths, name)
        except (OSError, ValueError):
            continue
        yield name, request


class Inbox:
    """Watches for requests without an answer. A look costs a `stat`, at most four times a second."""

    def __init__(self, paths: RunPaths, answered: Collection[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._directory: Path = paths.requests
        self._answered = set(answered)
        self._clock = clock
        self._looked = -_LOOK_EVERY
        self._stamp: int | None = None
        self._changed = -_SETTLED_AFTER
        self._open: list[str] = []

    def open(self, *, now: bool = False) -> list[str]:
        """Names of requests without an answer, oldest first. `now`: look, however short ago the last look was.

        Where the directory cannot be read there are none: nobody can submit one.
        """
        clock = self._clock()
        if now or clock - self._looked >= _LOOK_EVERY:
            self._looked = clock
            try:
                self._look(clock)
            except OSError:
                self._stamp, self._open = None, []
        return self._open

    def note_answer(self, name: str) -> None:
        self._answered.add(name)
        self._open = [other for other in self._open if other != name]

    def _look(self, clock: float) -> None:
        try:
            stamp = os.stat(self._directory).st_mtime_ns
        except FileNotFoundError:
            self._stamp, self._open = None, []
            return
        if stamp != self._stamp:
            self._stamp, self._changed = stamp, clock
        if clock - self._changed < _SETTLED_AFTER:
            self._open = [name for name in names(self._paths) if name not in self._answered]


def handed_in(paths: RunPaths, answered: Collection[str]) -> list[tuple[str, Request]]:
    """The requests without an answer, by name, oldest first."""
    return list(sound_requests(paths, Inbox(paths, answered).open(now=True)))
