"""A process that takes memory until the kernel kills it, and no other one."""

import contextlib
import os
from pathlib import Path
from typing import NoReturn


def eat() -> NoReturn:
    """All memory of the cgroup whose file of pids is CGROUP, as the only process that is left in it.

    Of two that are in it the kernel may kill both, since the memory of the first one comes back late.
    """
    members = Path(os.environ["CGROUP"])
    outside = members.parent.parent / members.name
    for pid in members.read_text().split():
        if int(pid) != os.getpid():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                outside.write_text(pid)
    eaten = []
    while True:
        eaten.append(bytearray(b"x") * (16 << 20))
