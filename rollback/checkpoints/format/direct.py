"""Writing large files past the page cache: faster than a buffered write and a sync, and the cache stays the training's.

O_DIRECT takes whole blocks from aligned memory at aligned offsets. What is not (the last bytes; what is left of a write
that the kernel cut short) is written through the cache, and so is everything where a file system refuses O_DIRECT.
"""

import errno
import fcntl
import os
from pathlib import Path

from rollback.checkpoints.format.shard import Written, write_hashed
from rollback.system import files
from rollback.system.durable import write_all
from rollback.system.region import address_of

BLOCK = 4096
_CHUNK = 8 << 20  # a multiple of BLOCK; large enough for the disk, small enough to be hashed before it is cold
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)


def write_direct(path: Path, data: memoryview, start: int | None = None) -> Written:
    """Write a new file from memory and sync it, hashing on the way; `path` must not exist.

    data: best at an address that is a multiple of BLOCK (a `Region`'s view, a mapped file). It must not change
    meanwhile. start: where it goes in a pack, a multiple of BLOCK; a missing pack is made. Raises OSError; a partial
    file is removed, a pack is not. The directory is not synced.
    """
    aligned = data.nbytes > 0 and address_of(data) % BLOCK == 0
    fd = _open(path, direct=aligned, alone=start is None)
    return write_hashed(path, fd, [data], _write, _CHUNK, start=start)


def _open(path: Path, *, direct: bool, alone: bool) -> int:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if alone else 0)
    try:
        return files.open_file(path, flags | os.O_DIRECT if direct else flags)
    except OSError as error:
        if not direct or error.errno not in _REFUSED:
            raise
        if alone:
            files.unlink(path)  # some file systems make the file before they refuse
        return files.open_file(path, flags)


def _write(fd: int, chunk: memoryview) -> None:
    """Write a chunk whole; whether the file is still open for O_DIRECT is the descriptor's to know."""
    whole = len(chunk) - len(chunk) % BLOCK
    done = 0
    while done < whole and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        try:
            done += os.write(fd, chunk[done:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _go_through_cache(fd)
        if done % BLOCK:  # cut short within a block
            _go_through_cache(fd)
    if done < len(chunk):
        _go_through_cache(fd)
        write_all(fd, chunk[done:])


def _go_through_cache(fd: int) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_DIRECT:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
