"""The memory that snapshots are copied into: a slot of the fast tier, or private memory that is then written to the
ring.

Both kinds prepare the memory ahead of time, in a thread, and say when it is ready. Nothing here is collective. All
ranks make the same calls, so they choose the same slot.
"""

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest
from rollback.errors import RollbackError
from rollback.system.region import Region
from rollback.system.threads import Threads
from rollback.train.snapshots.copy_stream import pin


class Staging:
    """Private memory. It is used again for each snapshot."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.fault: str | None = None
        """Why there can be none, once that is known."""
        self._thread = thread
        self._region: Region | None = None
        self._device: torch.device | None = None
        self._job: Future[None] | None = None
        self._succeeded: Future[None] | None = None
        """The job that was last seen to have succeeded: of that one it is known for good."""
        self.next_slot: int | None = None
        """The slot of the next snapshot, the same on all ranks. It changes where an earlier one is released."""

    def fit(self, size: int, device: torch.device | None) -> None:
        """Make room for snapshots of this many bytes, in the background. device: the CUDA device they come from."""
        if self._region is None or (self._region.size, self._device) != (size, device):
            self.fault = None
            self._job = self._thread.submit(self._make, size, device)

    def ready(self) -> bool:
        """Whether the next snapshot can be copied now."""
        job = self._job
        if job is None:
            return False
        if job is not self._succeeded and job.done() and self._is_made(job):
            self._succeeded = job
        return job is self._succeeded

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, or is known to have failed. Wait for a reader of the slot at most this long."""
        if self._job is not None:
            self._job.exception()

    def reserve(self) -> tuple[int | None, Region]:
        """The slot for a snapshot (None: private memory) and its memory. It must be ready."""
        assert self._region is not None
        return None, self._region

    def close(self) -> None:
        """When its thread has ended."""
        if self._region is not None:
            self._region.close()

    def _make(self, size: int, device: torch.device | None) -> None:
        if self._region is not None:
            self._region.close()
            self._region = None
        region = Region(size)
        region.populate()
        pin(region, device)
        self._region, self._device = region, device

    def _is_made(self, job: Future[None]) -> bool:
        if (error := job.exception()) is None:
            return True
        if not isinstance(error, OSError | MemoryError):
            raise error
        self.fault = f"there is no memory for a copy: {error}"
        return False


class FastTier:
    """One rank's view of its host's slots, to be used as `Staging` is. It knows their numbers; the catalogue knows what
    is in them.

    count: slots in use. 0: no slot is written, but the slots that hold checkpoints are known. leads: whether this rank
    is the one of its host that commits slots and takes commits back. here: the ranks of this host. taken: the slots
    that hold checkpoints, the same on all ranks.
    """

    def __init__(
        self,
        paths: SlotPaths,
        rank: int,
        *,
        leads: bool,
        here: Collection[int],
        taken: Collection[int] = (),
    ) -> None:
        self.fault: str | None = None
        self.paths = paths
        self.count = 0
        self._rank = rank
        self._leads = leads
        self._here = frozenset(here)
        self._taken = set(taken)
        self._size = 0
        self._device: torch.device | None = None
        self._regions: dict[int, Region] = {}
        self._jobs: dict[int, Future[bool]] = {}
        self._succeeded: Future[bool] | None = None
        self._leaving: dict[int, Callable[[bool], None]] = {}
        self._thread = Threads(1, "rollback-slots")
        self.next_slot: int | None = None

    def resize(self, count: int) -> None:
        """Use this many slots from now on, also where using them has failed before. Checkpoints in the other slots stay
        until they are evicted."""
        surplus, self.count, self.fault = range(count, self.count), count, None
        self._choose()
        for number in surplus:
            if number not in self._taken:
                self._tend(number)

    def fit(self, size: int, device: torch.device | None) -> None:
        # Only the next one: to have the pages of all slots there at once would take the memory's whole
        # bandwidth for seconds, just when training begins.
        self._size, self._device = size, device
        for number in self._free():
            self._jobs.pop(number, None)
        if self.next_slot is not None:
            self._tend(self.next_slot)

    def ready(self) -> bool:
        number = self.next_slot
        if number is None or self.fault is not None:
            return False
        job = self._jobs.get(number)
        if job is None:
            self._tend(number)
            return False
        if job is self._succeeded:
            return True
        if not job.done():
            return False
        error = job.exception()
        if isinstance(error, OSError | RollbackError):
            self.fault = str(error)
            return False
        if error is not None:
            raise error
        if not job.result():  # somebody reads it, or the host's first rank has not got to it yet
            self._tend(number)
            return False
        self._succeeded = job
        return True

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.ready() and self.fault is None and self.next_slot is not None:
            if (job := self._jobs.get(self.next_slot)) is not None:
                job.exception()
            if self.ready() or time.monotonic() > deadline:
                return
            time.sleep(0.01)

    def await_slots(self) -> None:
        """Wait for all slots."""
        for job in list(self._jobs.values()):
            job.exception()

    def reserve(self) -> tuple[int | None, Region]:
        number = self.next_slot
        assert number is not None
        self._taken.add(number)
        self._choose()
        del self._jobs[number]
        return number, self._regions[number]

    def memory(self, number: int) -> Region | None:
        """This rank's shard in a slot, if this process has the slot mapped."""
        return self._regions.get(number)

    def holds(self, number: int) -> bool:
        """Whether a slot holds a checkpoint that the catalogue knows; the same on all ranks."""
        return number in self._taken

    def has_checkpoint(self, number: int) -> bool:
        """Whether a slot still holds a checkpoint. This rank looks at the manifest and at its own shard."""
        try:
            slots.require_committed(self.paths, number, (self._rank,))
        except OSError:
            return False
        return True

    def require_file(self, number: int) -> None:
        """Raise OSError unless the memory of a slot is still the file of the slot's name."""
        slots.require_file(self.paths, number, self._rank, self._regions[number])

    def commit(self, number: int, manifest: Manifest) -> None:
        """Make a snapshot a checkpoint on this host. One rank of each host calls it. Raises OSError."""
        slots.commit(self.paths, number, manifest, self._here)

    def release(
        self, number: int, then: Callable[[bool], None] | None = None, *, after: Future[None] | None = None
    ) -> None:
        """Remove a checkpoint from its slot as soon as nobody reads it.

        then: called in a thread when that is done, with whether the checkpoint was there until now. after: work of a
        thread with this rank's file; the slot is released when it has ended.
        """
        self._taken.remove(number)
        self._choose()
        if then is not None:
            self._leaving[number] = then
        self._tend(number, after)

    def start_thread(self) -> None:
        """Raises RollbackError where it cannot be made."""
        self._thread.submit(int)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for number in list(self._regions):
            self._regions.pop(number).close()

    def _free(self) -> list[int]:
        return [number for number in range(self.count) if number not in self._taken]

    def _choose(self) -> None:
        """The next slot is another one where slots come into use or leave it, or are taken or released."""
        self.next_slot = next(iter(self._free()), None)

    def _tend(self, number: int, after: Future[None] | None = None) -> None:
        self._jobs[number] = self._thread.submit(self._make_ready, number, self._size, after)

    def _make_ready(self, number: int, size: int, after: Future[None] | None) -> bool:
        """Prepare a slot, and return whether it can be written now. In the thread."""
        if after is not None:
            after.exception()
        there = self.has_checkpoint(number)
        if self._leads:
            if not slots.uncommit(self.paths, number):
                return False
            slots.remove_strangers(self.paths, number, self._here)
        elif slots.is_committed(self.paths, number):
            return False
        if (then := self._leaving.pop(number, None)) is not None:
            then(there)
        in_use, region = number < self.count, self._regions.get(number)
        if region is not None and not (in_use and region.size == size):
            self._regions.pop(number).close()
            region = None
        if not in_use:
            if self._leads:
                slots.discard(self.paths, number)
        elif region is not None:
            slots.require_file(self.paths, number, self._rank, region)
        elif size:
            region = slots.map_shard(self.paths, number, self._rank, size)
            pin(region, self._device)
            self._regions[number] = region
        return True
