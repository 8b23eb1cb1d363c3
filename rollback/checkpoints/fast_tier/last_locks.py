"""Who is at the last snapshot just now: two locks beside the end marks (`end_marks`).

`busy` is held, shared, by all ranks that have a part in it; `lock` by the one that writes it. The kernel lets go of
both when their process dies.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths
from rollback.system import files


@contextlib.contextmanager
def alone(paths: EndMarkPaths, deadline: float) -> Iterator[None]:
    """Be the only process of the host that makes the last snapshot. The kernel lets go of it when the process dies.

    deadline: monotonic seconds. Raises TimeoutError, OSError.
    """
    fd = os.open(paths.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError("another rank was at it for too long") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def busy(paths: EndMarkPaths) -> Iterator[None]:
    """Let `is_busy` say so in the block. Raises OSError."""
    fd = os.open(paths.busy, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def is_busy(paths: EndMarkPaths) -> bool:
    """Whether any rank has a part in a last snapshot just now."""
    with contextlib.suppress(OSError):
        return files.is_locked(paths.busy, fcntl.LOCK_EX)
    return False
