"""Checkpoints on their way out of the run directory's ring, where the ranks evict from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from rollback.checkpoints import ring
from rollback.rundir.paths import RunPaths
from rollback.train.comm.recorder import say_if_it_fails


class RingEvictions:
    """For one thread of rank 0. A pinned checkpoint stays; if it is no longer pinned when another leaves, it leaves
    too."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._leaving: dict[str, Callable[[bool], None]] = {}

    def evict(self, name: str, then: Callable[[bool], None]) -> None:
        """Remove a checkpoint; then `then` is called, with whether it was there until now."""
        self._leaving[name] = then
        for leaving in list(self._leaving):
            say_if_it_fails(f"evicting checkpoint {leaving}", partial(self._evict_unless_pinned, leaving))

    def _evict_unless_pinned(self, name: str) -> None:
        then = self._leaving.pop(name)
        if not os.path.lexists(self._paths.checkpoint(name)):
            then(False)
        elif ring.evict(self._paths, name):
            then(True)
        else:
            self._leaving[name] = then
