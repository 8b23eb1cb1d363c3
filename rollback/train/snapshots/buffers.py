"""What snapshots are copied into: a slot of the fast tier, or private memory that is then written to the ring.

Both make room ahead of time, in a thread of their own, and say when it is ready. Nothing here is collective; which slot
is next follows from calls that all ranks make alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from rollback.checkpoints import slots
from rollback.checkpoints.manifest import Manifest
from rollback.checkpoints.region import Region
from rollback.checkpoints.slots import SlotPaths
from rollback.errors import RollbackError
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots.capture import pin, unpin


class SnapshotBuffer(Protocol):
    """Place for one snapshot after the other. fault: why there can be none, once that is known."""

    fault: str | None

    def fit(self, size: int) -> None:
        """Make room for snapshots of so many bytes, in the background."""

    def ready(self) -> bool:
        """Whether the next snapshot may be copied at once."""

    def wait(self, seconds: float) -> None:
        """Wait until it is ready or known not to be, at most so long for others who hold it up."""

    def take(self, name: str) -> Region:
        """The memory for a snapshot, which must be ready."""


class Staging:
    """Private memory, kept from snapshot to snapshot."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.fault: str | None = None
        self._thread = thread
        self._region: Region | None = None
        self._job: Future[None] | None = None

    def fit(self, size: int) -> None:
        if self._region is None or self._region.size != size:
            self._job = self._thread.submit(self._make, size)

    def ready(self) -> bool:
        return self._job is not None and self._job.done() and self._succeeded(self._job)

    def wait(self, seconds: float) -> None:
        if self._job is not None:
            self._job.exception()

    def take(self, name: str) -> Region:
        assert self._region is not None
        return self._region

    def _make(self, size: int) -> None:
        if self._region is not None:
            unpin(self._region)
            self._region.close()
            self._region = None
        region = Region(size)
        region.populate()
        pin(region)
        self._region = region

    def _succeeded(self, job: Future[None]) -> bool:
        if (error := job.exception()) is None:
            return True
        if not isinstance(error, OSError | MemoryError):
            raise error
        self.fault = f"there is no memory for a copy: {error}"
        return False


class FastTier:
    """One rank's view of its host's slots.

    count: slots in use; 0: none is written, but those that hold checkpoints are known. leads: whether this rank is the
    one that commits and un-commits on its host. here: the ranks of this host. held: slots that are committed, by
    checkpoint, the same on all ranks. must_stay: asked in the thread of a leading rank whether a checkpoint that is to
    leave is still needed in its slot.
    """

    def __init__(
        self,
        paths: SlotPaths,
        rank: int,
        *,
        leads: bool,
        here: Collection[int],
        held: Mapping[str, int],
        must_stay: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.fault: str | None = None
        self.paths = paths
        self.count = 0
        self._rank = rank
        self._leads = leads
        self._here = frozenset(here)
        self._must_stay = must_stay
        self._holding = dict(held)
        self._size = 0
        self._regions: dict[int, Region] = {}
        self._jobs: dict[int, Future[bool]] = {}
        self._leaving: dict[int, tuple[str, Callable[[bool], None]]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollback-slots")

    @property
    def held(self) -> set[str]:
        """Names of the checkpoints in slots, and of the snapshot that is being copied."""
        return set(self._holding)

    def resize(self, count: int) -> None:
        """Use so many slots from now on. What others hold stays until it is evicted."""
        surplus, self.count = range(count, self.count), count
        for number in surplus:
            if number not in self._holding.values():
                self._tend(number)

    def fit(self, size: int) -> None:
        # Only the next one: to have the pages of all slots there at once would take the memory's whole
        # bandwidth for seconds, just when training begins.
        self._size = size
        free = self._free()
        for number in free:
            self._jobs.pop(number, None)
        if free:
            self._tend(free[0])

    def ready(self) -> bool:
        free = self._free()
        if not free or self.fault is not None:
            return False
        job = self._jobs.get(free[0])
        if job is None:
            self._tend(free[0])
            return False
        if not job.done():
            return False
        error = job.exception()
        if isinstance(error, OSError | RollbackError):
            self.fault = str(error)
            return False
        if error is not None:
            raise error
        if not job.result():  # somebody reads it, or the host's first rank has not got to it yet
            self._tend(free[0])
            return False
        return True

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ready() and self.fault is None and self._free():
            if (job := self._jobs.get(self._free()[0])) is not None:
                job.exception()
            if self.ready() or time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def settle(self) -> None:
        """Wait for all slots."""
        for job in list(self._jobs.values()):
            job.exception()

    def take(self, name: str) -> Region:
        number = self._free()[0]
        self._holding[name] = number
        del self._jobs[number]
        return self._regions[number]

    def place(self, name: str) -> Path | None:
        """The directory of a checkpoint."""
        return self.paths.slot(self._holding[name]) if name in self._holding else None

    def memory(self, name: str) -> Region | None:
        """This rank's shard of a checkpoint where it lies, if this process has it mapped."""
        return self._regions.get(self._holding.get(name, -1))

    def is_there(self, name: str) -> bool:
        """Whether a checkpoint is still in its slot, as far as this rank can tell: manifest, and this rank's shard."""
        return self._has_checkpoint(self._holding[name])

    def require_file(self, name: str) -> None:
        """Raise OSError unless what was written for a snapshot is in the file that has its name."""
        number = self._holding[name]
        slots.require_file(self.paths, number, self._rank, self._regions[number])

    def commit(self, manifest: Manifest) -> None:
        """Make a snapshot a checkpoint, on this host. One rank of each. Raises OSError."""
        slots.commit(self.paths, self._holding[manifest.name], manifest, self._here)

    def let_go(
        self, name: str, then: Callable[[bool], None] | None = None, *, after: Future[None] | None = None
    ) -> None:
        """A checkpoint leaves its slot, as soon as nobody reads it; then `then` is called, in a thread: with whether it
        was there until now.

        after: a thread's work with this rank's file, which must have ended.
        """
        number = self._holding.pop(name)
        if then is not None:
            self._leaving[number] = name, then
        self._tend(number, after)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _has_checkpoint(self, number: int) -> bool:
        try:
            slots.require_committed(self.paths, number, (self._rank,))
        except OSError:
            return False
        return True

    def _free(self) -> list[int]:
        taken = set(self._holding.values())
        return [number for number in range(self.count) if number not in taken]

    def _tend(self, number: int, after: Future[None] | None = None) -> None:
        self._jobs[number] = self._thread.submit(self._make_ready, number, self._size, after)

    def _make_ready(self, number: int, size: int, after: Future[None] | None) -> bool:
        """Whether a slot can be written now. In the thread."""
        if after is not None:
            after.exception()
        name, then = self._leaving.get(number, ("", None))
        there = self._has_checkpoint(number)
        if self._leads:
            if self._must_stay(name) or not slots.uncommit(self.paths, number):
                return False
            slots.remove_strangers(self.paths, number, self._here)
        elif slots.is_committed(self.paths, number):
            return False
        if then is not None:
            del self._leaving[number]
            then(there)
        region = self._regions.get(number)
        if number >= self.count or (region is not None and region.size != size):
            self._regions.pop(number, None)
            if region is not None:
                unpin(region)
                region.close()
                region = None
        if number >= self.count:
            if self._leads:
                slots.discard(self.paths, number)
            return True
        if region is not None:
            slots.require_file(self.paths, number, self._rank, region)
        if region is None and size:
            region = slots.map_shard(self.paths, number, self._rank, size)
            pin(region)
            self._regions[number] = region
        return True


def fast_tier(paths: SlotPaths | None, ranks: Ranks, held: Mapping[str, int]) -> FastTier | None:
    """This rank's view of its host's slots, where there are any."""
    if paths is None:
        return None
    return FastTier(paths, ranks.rank, leads=ranks.first_of_host, here=ranks.on_this_host, held=held)
