"""Memory that is kept: page-aligned, mapped once, its pages there before they are needed.

The first touch of a page costs several times what copying into it costs, so what a snapshot is copied into is made
ready long before, and used again and again.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_WRITE = 23
_PAGE = 4096
_BEHIND = 1024
_PIECE = 1 << 19
_STRIDE = 64 << 20  # pages that are asked for at once: a thread that is told to end does not wait for more


OFFSET = 64
"""Where in its page torch's allocator begins a large tensor, and where `copy` likes what it is copied to to begin."""


def copy(target: int, source: int, size: int) -> None:
    """Copy bytes from one address to another. Other threads of Python run meanwhile.

    glibc's copy past the caches takes three times as long where the target lies a little further in its page than the
    source in its own, since each read then seems to wait for a write. Pieces that go through the caches do not.
    """
    if not 0 < (target - source) % _PAGE < _BEHIND:
        ctypes.memmove(target, source, size)
        return
    for start in range(0, size, _PIECE):
        ctypes.memmove(target + start, source + start, min(_PIECE, size - start))


def address_of(memory: memoryview) -> int:
    """Where the bytes of a contiguous view begin; any address for an empty one."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data) if memory.nbytes else 0


class Region:
    """`size` bytes of memory: a file's, shared (`fd`, which may be closed afterwards), or private.

    file: which file it is; None for private memory. A map outlives its file's name: see `slots.require_file`.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = size
        self.file: tuple[int, int] | None = None
        if fd is None:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
            status = os.fstat(fd)
            self.file = status.st_dev, status.st_ino
        self.before_close: Callable[[], None] | None = None
        """Gives back what was done to the memory for whoever else knows it."""
        self.view = memoryview(self._map)[:size]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def populate(self) -> None:
        """Have all pages there. Waits without holding up other threads of Python. Raises OSError (ENOMEM)."""
        for start in range(0, self.size, _STRIDE):
            length = min(_STRIDE, self.size - start)
            if _LIBC.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
                continue
            number = ctypes.get_errno()
            if number != errno.EINVAL:  # a kernel before 5.14: the first snapshot touches them
                raise OSError(number, os.strerror(number))
            return

    def close(self) -> None:
        """Give the memory back. Nobody may use it any more."""
        if self.before_close is not None:
            self.before_close()
        self.view.release()
        try:
            self._map.close()
        except BufferError:  # a view that somebody still holds keeps the map; the kernel frees it with the last one
            return
