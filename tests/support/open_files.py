"""The files that a process has open, and how many more it may."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path


def open_below(folder: Path) -> int:
    """How many descriptors of this process are of files there: other threads open and close theirs elsewhere meanwhile.
    A file that is removed by now counts too."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += Path(os.readlink(f"/proc/self/fd/{name}")).is_relative_to(folder)
    return found


@contextlib.contextmanager
def no_descriptor_free() -> Iterator[None]:
    """This process can open nothing. What it has open stays so."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
