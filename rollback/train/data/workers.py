"""Loader workers do not obey stop signals; their rank does.

A scheduler may signal all processes of a job step, torchrun a rank's whole process group, and a terminal all foreground
processes. The rank then saves and stops. A worker that died of the signal would make the rank raise before the save.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class LeavesStoppingToTheRank:
    """A loader's `worker_init_fn`: makes the worker ignore stop signals, then calls the user's function.

    While the rank lives, the worker ignores the first SIGTERM and obeys the second one. Such workers must be ended by
    `shut_down`: multiprocessing sends one SIGTERM at the rank's exit and then waits for ever.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        for signum in _IGNORED:
            signal.signal(signum, signal.SIG_IGN)
        rank = os.getppid()

        def obey_the_next(number: int, frame: FrameType | None) -> None:
            if os.getppid() != rank:
                os._exit(0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, obey_the_next)
        if self.then is not None:
            self.then(worker)


def shut_down(reading: Iterator[Any] | None) -> None:
    """End the workers of a loader's iterator, if it has any, at once.

    The iterator's own method waits for a few seconds and then sends one SIGTERM, which the workers ignore.
    """
    shut_down_workers = getattr(reading, "_shutdown_workers", None)
    if shut_down_workers is None:
        return
    workers = list(getattr(reading, "_workers", ()))
    # torch raises where a worker crashes, also one that has been told to end: native code may do that at its exit.
    with contextlib.suppress(RuntimeError):
        shut_down_workers()
    for worker in workers:
        if worker.is_alive():
            worker.kill()


def leave_stopping_to_the_rank(loader: Any) -> None:
    """Set this for a loader, if it has workers."""
    has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
    if has_workers and not isinstance(loader.worker_init_fn, LeavesStoppingToTheRank):
        loader.worker_init_fn = LeavesStoppingToTheRank(loader.worker_init_fn)
