"""Writing files so that a crash or power loss leaves either the old content or the new, never a mixture."""

import os
from pathlib import Path
from typing import BinaryIO

from rollback.system import files

_BLOCK = 1 << 16


def sync_directory(directory: Path) -> None:
    """Make renames and creations in `directory` survive a power loss."""
    with files.directory(directory) as place:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written: a single call may write less than all bytes."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def temporary_of(path: Path) -> Path:
    """Where `write_file` writes first. One writer a file: what a crash has left of it is overwritten."""
    return path.with_name(f".{path.name}.tmp")


def write_file(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by rename. With `durable`, content and name survive a power loss once this returns."""
    temporary = temporary_of(path)
    fd = files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        files.rename(temporary, path)
    except BaseException:
        files.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def append_lines(fd: int, lines: bytes, end: int) -> None:
    """Append lines to a file opened with O_RDWR and O_APPEND, where this writer has left its end: on disk when this
    returns, or not there at all.

    What a disk refuses is truncated away, or by the next call where the disk refuses that too, so that the next line
    does not continue a torn one, and the same lines can be written again, with others behind them. A network file
    system says only when they are synced that it has no room, and has lost them then. Raises OSError, also where
    another process has written since.
    """
    _take_back(fd, lines, end)  # what the disk did not let go when it refused them
    if (found := os.lseek(fd, 0, os.SEEK_END)) != end:
        raise OSError(f"another process has written to it: it has {found} bytes, and {end} when this one wrote last")
    try:
        write_all(fd, lines)
        os.fsync(fd)
    except BaseException:
        _take_back(fd, lines, end)
        raise


def _take_back(fd: int, lines: bytes, end: int) -> None:
    """Truncate away what is there of these lines."""
    there = os.pread(fd, len(lines) + 1, end)
    if there and lines.startswith(there):  # else they are another's, who has the lock by now
        os.ftruncate(fd, end)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, under the rules of `rollback.system.files`.

    Raises OSError where it cannot be opened, ValueError where it may not be trusted.
    """
    try:
        return os.fdopen(files.open_file(path, os.O_RDONLY), "rb")
    except files.NotAFileOfOurs as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def read_tail(path: Path, size: int) -> bytes:
    """The last bytes of a file, at most `size`. Raises as `open_regular`."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - size))
        return file.read(size)


def end_of_lines(file: BinaryIO) -> int:
    """Where the last whole line ends: what follows is torn, or being written."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def read_small_file(path: Path, limit: int) -> bytes:
    """Content of a regular file of at most `limit` bytes. Raises as `open_regular`, and ValueError if it is larger."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes; at most {limit} are believed")
        return file.read(size)  # to ask for more takes memory for as much as is asked for
