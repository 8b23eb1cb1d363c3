"""The memory of the next snapshot: slots of the fast tier or private memory, how much of it, and whether it is ready.

Each rank makes its own ready in the background, and says so with each beat. A snapshot begins once all have said it. If
the memory has changed since a rank said so, what it said is void.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from rollback.checkpoints.format.layout import MOST_SPACE, Layout, header_space_for, lay_out
from rollback.checkpoints.format.packs import place_in_run
from rollback.facts.training import Tier
from rollback.rundir.paths import has_packs
from rollback.system.region import OFFSET, Region
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots.buffers import FastTier, Staging
from rollback.train.snapshots.capture import RankShare

_PAGE = 4096
_SPARE = 1 << 16
_MEMORY_OF_LOSSES = 1 << 15  # the sentinel's state, which is empty in a fresh run, takes a third of it
_HELD_UP = {False: 5.0, True: 20.0}  # seconds for who reads the slot that is wanted; hosts apart have only that


class SnapshotMemory:
    """All ranks make the same calls. fast: the slots, if there are any. thread: makes the private memory.

    outgrown: the state of some rank did not fit into it, so all ranks have to `fit` it anew; the same on all ranks.
    used_by: work of a thread on a snapshot in it; None: it has ended, or there was none. place: of this rank's shard,
    among those of all ranks.
    """

    def __init__(self, ranks: Ranks, thread: ThreadPoolExecutor, fast: FastTier | None) -> None:
        self.outgrown = False
        self.failed = False
        """Whether some rank has said that it can have none for the next snapshot; the same on all ranks."""
        self.used_by: Future[None] | None = None
        self.place = place_in_run(ranks.rank, None)
        self._ranks = ranks
        self._fast = fast
        self._staging = Staging(thread)
        self._buffer = self._choose_buffer()
        self._head = self._size = 0  # bytes of a shard, and of its header
        self._device: torch.device | None = None
        self._all_ready = self._said_ready = False
        self._asked_of: int | None = None  # the slot that they have said it of

    # How much, and where -------------------------------------------------------------------------------------------

    @property
    def fitted(self) -> bool:
        return self._size > 0

    def fit(self, share: RankShare) -> int:
        """Collective: snapshots will be of such a share. Returns the rank's shard size, by which it is decided how many
        slots there are to be. `use_slots` makes room for them."""
        self.outgrown = False
        kinds = share.kinds()
        # What a loader or a scheduler keeps may grow: some room for it, twice as much for the trees.
        wanted = 2 * header_space_for(kinds, share.metadata, _PAGE) + _MEMORY_OF_LOSSES
        self._head = min(wanted, MOST_SPACE) + OFFSET
        self._size = lay_out(kinds, self._head).size + _SPARE
        sizes = self._ranks.from_each(self._size) if has_packs(self._ranks.world_size) else None
        self.place = place_in_run(self._ranks.rank, sizes)
        self._device = next((item.device for item in share.tensors.values() if item.is_cuda), None)
        return self._size

    def layout_of(self, share: RankShare) -> Layout:
        """Raises ValueError where there is no room for this share."""
        return lay_out(share.kinds(), self._head, self._size)

    def use_slots(self, count: int) -> None:
        """Use this many slots from now on, and make the next one ready in the background; 0: private memory, which is
        written to the ring."""
        if self._fast is not None:
            self._fast.resize(count)
        self._buffer = self._choose_buffer()
        self._all_ready = self._said_ready = self.failed = False
        if self.fitted:
            self._buffer.fit(self._size, self._device)

    @property
    def slots(self) -> int:
        return self._fast.count if self._fast is not None else 0

    @property
    def tier(self) -> Tier:
        """The tier of the next snapshot."""
        return "fast" if self.slots else "durable"

    @property
    def has_fast_tier(self) -> bool:
        """Whether the run has a fast tier, from which a drainer copies."""
        return self._fast is not None

    @property
    def fast_tier(self) -> FastTier:
        """The fast tier, for callers that hold a slot of it."""
        assert self._fast is not None  # who knows the number of a slot has it from there
        return self._fast

    def _choose_buffer(self) -> FastTier | Staging:
        return self._fast if self._fast is not None and self._fast.count else self._staging

    # Whether it is ready -------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all ranks have said so; the same on all ranks."""
        same = self._buffer.next_slot == self._asked_of  # else one was released since they were asked
        return self._all_ready and same and not self.outgrown

    def await_ready(self) -> str:
        """Collective: wait for it. If the fast tier is not ready in time, stop using it, and return why; else an empty
        string. Private memory that could not be had is asked for once more."""
        if self.tier == "durable" and self.fault is not None:
            self._buffer.fit(self._size, self._device)
        self._buffer.wait(_HELD_UP[self._ranks.apart])
        left = ""
        if not self._ranks.all_of(self._ready_here()) and self.tier == "fast":
            left = self._ranks.first_fault(self.fault) or "somebody reads the slot that is wanted now"
            self.use_slots(0)
            self._buffer.wait(_HELD_UP[False])
        self._all_ready, self._asked_of = self._ranks.all_of(self._ready_here()), self._buffer.next_slot
        return left

    @property
    def fault(self) -> str | None:
        """Why this rank has none for the next snapshot, for its log."""
        return self._buffer.fault

    def tell_ready(self) -> bool:
        """Whether it is ready on this rank, for the next beat."""
        self._said_ready, self._asked_of = True, self._buffer.next_slot
        return self._ready_here()

    def note_ready(self, ready: int, failed: int) -> None:
        """Note how many ranks have said that it is ready, and that they can have none, by the beat."""
        if self._said_ready:  # else the beat is from before the memory was changed
            self._all_ready, self.failed = ready == self._ranks.world_size, failed > 0

    def reserve(self) -> tuple[int | None, Region]:
        """The slot for a snapshot (None: private memory) and its memory. It must be ready."""
        self._all_ready = self._said_ready = False
        return self._buffer.reserve()

    def _ready_here(self) -> bool:
        """Whether another snapshot may lie in it. What is in flight does not matter here."""
        if self.used_by is not None and self.used_by.done():
            self.used_by = None
        return self.used_by is None and self._buffer.ready()

    # The end -------------------------------------------------------------------------------------------------------

    def await_slots(self) -> None:
        """Wait for all slots."""
        if self._fast is not None:
            self._fast.await_slots()

    def close(self) -> None:
        """When the thread has ended."""
        self._staging.close()
        if self._fast is not None:
            self._fast.close()
