"""Writing files so that a crash or power loss leaves the old content or the new, never a mixture."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

__all__ = ["append_line", "open_regular", "read_small_file", "sync_directory", "write_all", "write_file"]


def sync_directory(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written: a single call may write less than it was given."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by rename. With `durable`, content and name survive a power loss once this returns."""
    temporary = path.with_name(f".{path.name}.tmp")  # one writer a file: what a crash left of it is overwritten
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)


def append_line(fd: int, line: bytes) -> None:
    """Append one line to a file opened with O_APPEND, whole or not at all.

    A failed append (disk full) is cut off again, so that the next one does not continue a torn line.
    """
    end = os.lseek(fd, 0, os.SEEK_END)
    try:
        write_all(fd, line)
    except OSError:
        os.ftruncate(fd, end)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Links, pipes and devices are refused unread, and nothing is waited for.

    Raises OSError where it cannot be opened, ValueError where it is not such a file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a regular file")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_small_file(path: Path, limit: int, start: int = 0) -> bytes:
    """Content of a regular file of at most `limit` bytes, from byte `start` on.

    Raises as `open_regular`, and ValueError if the file is larger, or ends before `start`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes; at most {limit} are believed")
        if size < start:
            raise ValueError(f"{path} has {size} bytes, and had at least {start}")
        file.seek(start)
        return file.read(limit + 1)
