"""A memory cgroup with a limit, so that the kernel's OOM killer strikes one process of a job. Needs root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollback.supervisor.diagnosis.memory import counter_files

# `rollback` in the cgroup whose file of pids is {members!r}; its ranks know it as CGROUP, for eating.py.
IN_CGROUP = """
import os
from pathlib import Path
from rollback import cli

os.environ["CGROUP"] = {members!r}
Path({members!r}).write_text(str(os.getpid()))
cli.main()
"""


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Path]:
    """The file that takes the pids of a new memory cgroup of `limit` bytes; skips where none can be made."""
    membership = Path("/proc/self/cgroup").read_text()
    parents = [path.parent for path in counter_files(membership) if path.is_file()]
    if not parents:
        pytest.skip("this process is in no memory cgroup that it can see")
    made = parents[0] / f"rollback-test-{os.getpid()}"
    v2 = parents[0].joinpath("cgroup.controllers").exists()
    try:
        made.mkdir()
        (made / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
        for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
            if (made / swap).exists():
                (made / swap).write_text("0" if v2 else str(limit))
    except OSError as error:
        if made.is_dir():
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield made / "cgroup.procs"
    finally:
        made.rmdir()
