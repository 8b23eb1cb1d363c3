"""What torchrun's process does for a last snapshot: it waits for ranks that make one, and where none is left that could
speak for this host, it has another process do it. See `checkpoints.fast_tier.end_marks`.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollback.environment import ENV_ATTEMPT, ENV_RUN
from rollback.instructions import HOST_PROXY, path_of
from rollback.system import files

Starter = Callable[[Sequence[str]], Any]
"""Starts Python with these arguments, and returns something with `wait(timeout)` and `pid`."""


def wait_for_last_snapshot(limit: float, start: Starter) -> None:
    """Wait while this host's part in a last snapshot is made, at most so many seconds. A rank has failed.

    start: for a script.
    """
    noticed = time.monotonic()
    deadline = noticed + limit
    try:
        last = Path(json.loads(Path(os.environ[ENV_RUN], "fast-tier.json").read_text())["directory"], "last")
        while files.is_locked(last / "busy", fcntl.LOCK_EX) and time.monotonic() < deadline:
            time.sleep(0.01)
        if _is_left_alone(last):
            start([path_of(HOST_PROXY), str(last), str(noticed), str(limit)]).wait(
                max(0.0, deadline - time.monotonic())
            )
    except Exception:  # noqa: BLE001 - whatever it is, the ranks have to be ended
        return


def _is_left_alone(last: Path) -> bool:
    """Whether other hosts wait to hear from this one, and no rank of it lives that could tell them anything."""
    hosts = last / "hosts.json"
    if not hosts.exists() or json.loads(hosts.read_text())["attempt"] != int(os.environ[ENV_ATTEMPT]):
        return False
    from rollback.checkpoints.fast_tier import end_marks, last_snapshot_result  # every start waits for our imports

    paths = end_marks.EndMarkPaths(last)
    ranks = end_marks.ranks_of(paths)
    left = all(end_marks.has_left(paths, rank) for rank in ranks)
    return not (
        left or last_snapshot_result.read_results(paths) or any(end_marks.is_heard(paths, rank) for rank in ranks)
    )


def start_anew(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A `Starter` where nothing forks ranks."""
    return subprocess.Popen([sys.executable, *arguments])
