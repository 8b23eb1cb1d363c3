"""Waiting for what another thread or process does."""

import socket
import time
from collections.abc import Callable

LIMIT = 180.0  # a wait that is longer than this has failed; slow machines with all cores busy take a minute


def wait_for(condition: Callable[[], object], told: Callable[[], str] = str) -> None:
    """told: what is known where it does not happen."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"what the test waits for did not happen\n{told()}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
