"""Signs of life: a small file for each rank that says who it is and where it stands."""

from __future__ import annotations

import os
import socket
import time

import psutil

from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Heartbeat, write_heartbeat
from rollback.train.record import say

_EVERY_SECONDS = 0.5


class SignsOfLife:
    """Writes this rank's heartbeat, at most twice a second unless told `now`."""

    def __init__(self, paths: RunPaths, rank: int, attempt: int) -> None:
        self._path = paths.heartbeat(rank)
        self._attempt = attempt
        self._pid, self._host = os.getpid(), socket.gethostname()
        self._created = psutil.Process().create_time()
        self._shown = -_EVERY_SECONDS
        self._failing = False

    def show(self, doing: str, step: int, batch: int, *, now: bool = False) -> None:
        clock = time.monotonic()
        if clock - self._shown < _EVERY_SECONDS and not now:
            return
        self._shown = clock
        beat = Heartbeat(
            pid=self._pid, host=self._host, attempt=self._attempt, step=step, batch=batch, doing=doing, monotonic=clock,
            created=self._created,
        )  # fmt: skip
        try:
            write_heartbeat(self._path, beat)
        except OSError as error:
            if not self._failing:
                say(f"writing the heartbeat {self._path} fails ({error}); training goes on")
            self._failing = True
        else:
            self._failing = False
