"""Starting a thread where the system may refuse it (`ulimit -u`, a container's limit of processes)."""

import threading

from rollback.errors import RollbackError


def start_thread(thread: threading.Thread) -> None:
    """Raises RollbackError where none can be made; Python's own error is a RuntimeError like any other. The thread may
    be started later."""
    try:
        thread.start()
    except RuntimeError as error:
        raise RollbackError(
            f"starting a thread ({thread.name}): {error}",
            hint="raise the limit of processes, of which each thread is one: ulimit -u, or the container's (pids)",
        ) from error
