"""Committed checkpoints where they lie: in slots of this host, whose numbers the catalogue has, or in the run
directory's ring."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from rollback.checkpoints import ring
from rollback.facts.training import Tier
from rollback.rundir.paths import MANIFEST, RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say_if_it_fails
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.restore import CheckpointPlace


class StoredCheckpoints:
    """slot: where a checkpoint lies in the fast tier; None for those in the ring, which rank 0 sees to.

    thread: in which checkpoints leave the ring, one after the other.
    """

    def __init__(self, paths: RunPaths, ranks: Ranks, fast: FastTier | None, thread: Executor) -> None:
        self._paths = paths
        self._ranks = ranks
        self._fast = fast
        self._thread = thread
        self._leaving: dict[str, Callable[[bool], None]] = {}  # touched by the thread alone

    def places(self, name: str, slot: int | None) -> list[CheckpointPlace]:
        """Where a checkpoint may be found, best first."""
        found = [CheckpointPlace(self._paths.checkpoint(name))]
        if self._fast is not None and slot is not None:
            memory = self._fast.memory(slot)
            place = CheckpointPlace(self._fast.paths.slot(slot), in_slot=True, memory=memory.view if memory else None)
            found.insert(0, place)
        return found

    def misses(self, name: str, slot: int | None) -> bool:
        """Whether a checkpoint that was committed is not there any more, as far as this rank can tell. No collective.

        Looks at its manifest, and in a slot at this rank's shard.
        """
        if self._fast is not None and slot is not None:
            return not self._fast.has_checkpoint(slot)
        return self._ranks.first and not os.path.lexists(self._paths.checkpoint(name) / MANIFEST)

    def evict(self, name: str, slot: int | None, then: Callable[[Tier, bool], None]) -> None:
        """A checkpoint leaves: its slot at once on all ranks, the ring by rank 0's thread. `then` is called afterwards,
        with the tier and whether it was there until now.

        A pinned one stays in the ring; if it is no longer pinned when another leaves, it leaves too.
        """
        if self._fast is not None and slot is not None:
            self._fast.release(slot, partial(then, "fast"))
        elif self._ranks.first:
            self._thread.submit(self._evict_from_ring, name, partial(then, "durable"))

    def release_slot(self, slot: int | None) -> None:
        """What is in a slot is not needed there: the slot may be used again. All ranks alike. None: it is in none."""
        if self._fast is not None and slot is not None:
            self._fast.release(slot)

    def quarantine(self, name: str) -> None:
        """Put a checkpoint that cannot be believed out of reach: rank 0 moves it where it can be seen."""
        if self._ranks.first and os.path.lexists(self._paths.checkpoint(name)):
            say_if_it_fails(f"moving checkpoint {name} to quarantine", lambda: ring.quarantine(self._paths, name))

    def _evict_from_ring(self, name: str, then: Callable[[bool], None]) -> None:
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
