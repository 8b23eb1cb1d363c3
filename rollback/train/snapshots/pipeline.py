"""From a snapshot to a checkpoint: captured at the end of a step, written by a thread, committed by the pulse.

`in_flight` has the table of stages. No rank decides by what it alone knows: `advance` takes reduced beats only.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial

import torch
from torch import Tensor

from rollback.checkpoints import ring
from rollback.checkpoints.format.direct import write_direct
from rollback.checkpoints.format.hashing import hash_of
from rollback.checkpoints.format.layout import header_space_for, lay_out
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.format.packs import Place, place_in_run
from rollback.checkpoints.format.shard import Written
from rollback.errors import RollbackError
from rollback.facts.training import Tier
from rollback.rundir.paths import CheckpointName, RunPaths, has_packs
from rollback.system.region import OFFSET, Region
from rollback.train.comm.beat import Beat, Signs
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say_if_it_fails
from rollback.train.snapshots import drift
from rollback.train.snapshots.buffers import FastTier, SnapshotBuffer, Staging
from rollback.train.snapshots.capture import Capture, share_of
from rollback.train.snapshots.frozen import FrozenWeights, NoLongerFrozen
from rollback.train.snapshots.in_flight import (
    Landing,
    Letter,
    Letters,
    SnapshotEvent,
    SnapshotInFlight,
    SnapshotStage,
)
from rollback.train.snapshots.tier_choice import CaptureMode
from rollback.train.state.state import Image

_PAGE = 4096
_SPARE = 1 << 16
_MEMORY_OF_LOSSES = 1 << 15  # the sentinel's state, which is empty in a fresh run, takes a third of it
_HELD_UP = {False: 5.0, True: 20.0}  # seconds for who reads the slot that is wanted; hosts apart have only that


class Snapshots:
    """At most one snapshot is in flight. Methods marked *collective* must be called by all ranks in the same step.

    fast: the slots, if there are any; else ranks write to the run directory's ring. mode: see `tier_choice`.
    thread: the only one that writes and removes files. stalled: seconds for which the last snapshot blocked the loop.
    outgrown: the state of some rank did not fit into the last snapshot's buffer, so all ranks have to call
    `fit_buffers`; the same on all ranks. next_seq: the number of the next checkpoint.
    """

    def __init__(
        self,
        paths: RunPaths, ranks: Ranks, next_seq: int, attempt: int,
        fast: FastTier | None = None, mode: CaptureMode = "at_once",
    ) -> None:  # fmt: skip
        self.mode: CaptureMode = mode
        self.stalled = 0.0
        self.outgrown = False
        self._paths = paths
        self._ranks = ranks
        self.next_seq = next_seq
        self._attempt = attempt
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollback-snapshot")
        self._fast = fast
        self._frozen = FrozenWeights(paths)
        self._staging = Staging(self.thread)
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollback-copier")
        self._head = self._size = 0  # bytes of a shard, and of its header
        self._place = place_in_run(ranks.rank, None)
        self._device: torch.device | None = None
        self._all_ready = self._said_ready = False
        self._asked_of: int | None = None  # the slot that they have said it of
        self._flight: SnapshotInFlight | None = None
        self._job: Future[None] | None = None

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def ready(self) -> bool:
        """Whether all ranks have said that the next snapshot can begin; the same on all ranks."""
        same = self._buffer.next_slot == self._asked_of  # else one was released since they were asked
        return self._all_ready and same and not self.in_flight and not self.outgrown

    # Buffers -------------------------------------------------------------------------------------------------------

    def fit_buffers(self, image: Image) -> int:
        """Collective: make room for snapshots of this image, in the background. Returns the rank's shard size."""
        self.outgrown = False
        drift.require_alike(image.shared_tensors, self._ranks)
        self._frozen.agree(image, self._ranks)
        share = share_of(image, self._ranks, self._frozen.digests)
        kinds = share.kinds()
        # What a loader or a scheduler keeps may grow: some room for it, twice as much for the trees.
        self._head = 2 * header_space_for(kinds, share.metadata, _PAGE) + _MEMORY_OF_LOSSES + OFFSET
        self._size = lay_out(kinds, self._head).size + _SPARE
        sizes = self._ranks.from_each(self._size) if has_packs(self._ranks.world_size) else None
        self._place = place_in_run(self._ranks.rank, sizes)
        self._device = next((item.device for item in share.tensors.values() if item.is_cuda), None)
        self._prepare_buffer()
        return self._size

    def use_slots(self, count: int) -> None:
        """Write into this many slots from now on; 0: to the ring. All ranks call it alike."""
        if self._fast is not None:
            self._fast.resize(count)
        self._prepare_buffer()

    @property
    def slots(self) -> int:
        return self._fast.count if self._fast is not None else 0

    @property
    def tier(self) -> Tier:
        """The tier of the next snapshot."""
        return "fast" if self.slots else "durable"

    @property
    def left_out(self) -> str:
        """The weights that snapshots leave out because they are stored once, in words."""
        return self._frozen.in_words()

    @property
    def drained(self) -> bool:
        """Whether the run has a fast tier, from which a drainer copies."""
        return self._fast is not None

    def await_ready(self, image: Image) -> str:
        """Collective: wait until the next snapshot can begin. If the fast tier is not ready in time, stop using it, and
        return why; else an empty string."""
        if not self._size:
            self.fit_buffers(image)
        self._buffer.wait(_HELD_UP[self._ranks.apart])
        left = ""
        if not self._ranks.all_of(self._can_begin()) and self.tier == "fast":
            left = next(filter(None, self._ranks.from_each(self.fault)), "somebody reads the slot that is wanted now")
            self.use_slots(0)
            self._buffer.wait(_HELD_UP[False])
        self._all_ready, self._asked_of = self._ranks.all_of(self._can_begin()), self._buffer.next_slot
        return left

    @property
    def fault(self) -> str | None:
        """Why this rank cannot write the next snapshot, for its log."""
        return self._buffer.fault

    def _prepare_buffer(self) -> None:
        self._all_ready = self._said_ready = False
        if self._size:
            self._buffer.fit(self._size, self._device)

    def _can_begin(self) -> bool:
        """Whether this rank is ready to begin another snapshot. What is in flight does not matter here."""
        return (self._job is None or self._job.done()) and self._buffer.ready()

    @property
    def _buffer(self) -> SnapshotBuffer:
        return self._fast if self._fast is not None and self._fast.count else self._staging

    # The flight ----------------------------------------------------------------------------------------------------

    def start_snapshot(
        self, image: Image, *, step: int, batch: int, epoch: int, timeline: int, over: bool = False
    ) -> SnapshotInFlight:
        """Collective, when `ready`: copy this rank's part of the image, or begin to copy it. Never waits for a disk.

        over: whether the snapshot is behind the last batch of the epoch.
        """
        if self._flight is not None:
            raise RuntimeError("a snapshot is in flight already")
        began = time.perf_counter()
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        manifest = Manifest(
            name=CheckpointName.of(seq, step), seq=seq, step=step, batch=batch, epoch=epoch, over=over,
            timeline=timeline, attempt=self._attempt, created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self._ranks.world_size, shards=(), frozen=self._frozen.record,
        )  # fmt: skip
        slot, region = self._buffer.reserve()
        flight = self._flight = SnapshotInFlight(manifest, slot, time.monotonic())
        self._all_ready = self._said_ready = False
        try:
            self._frozen.require_frozen(image)
            share = share_of(image, self._ranks, self._frozen.digests)
            capture = Capture(share, lay_out(share.kinds(), self._head, self._size), region, self.mode)
            capture.start()
        except NoLongerFrozen as error:
            flight.outgrow(error.message)
        except ValueError as error:
            flight.outgrow(f"what is kept has grown, and the next snapshot will have room for it: {error}")
        else:
            if self.mode == "held":
                capture.finish()
            else:
                flight.capture, flight.copied = capture, self._copier.submit(capture.finish)
            given = flight, capture, share.frozen, region, self._place
            self._job = flight.job = self.thread.submit(self._write, *given)
        self.stalled = time.perf_counter() - began
        return flight

    def fence(self) -> None:
        """Wait until the copy is complete. Call it before anything changes the state. Not collective."""
        flight = self._flight
        if flight is None or flight.capture is None or flight.copied is None:
            return
        began = time.perf_counter()
        capture, flight.capture = flight.capture, None
        capture.fence()
        flight.copied.exception()
        if moved := capture.moved():
            self.mode, flight.torn = "held", True
            flight.fail(f"{moved[0]!r} and {len(moved) - 1} others changed while they were read")
        self.stalled += time.perf_counter() - began

    def note_unseen_writes(self, weights: Iterable[Tensor]) -> None:
        """Not collective: these were written to within a step, and torch did not count it. See `UnseenWrites`."""
        self.mode = "held"
        if self._flight is not None and self._flight.capture is not None:
            self._flight.capture.note_unseen_writes(weights)

    def signs(self) -> Signs:
        """What this rank sends with the next beat about the snapshot in flight and the room for the next one."""
        self.fence()
        self._follow_thread()
        flight = self._flight
        stage = flight.stage if flight else None
        self._said_ready, self._asked_of = True, self._buffer.next_slot
        return Signs(
            shard_written=stage is SnapshotStage.WRITTEN,
            shard_failed=stage is SnapshotStage.FAILED,
            torn=flight is not None and flight.torn,
            committed=stage is SnapshotStage.COMMITTED,
            ready=self._can_begin(),
            tier_failed=self._buffer.fault is not None,
            outgrown=flight is not None and flight.outgrown,
            stall=self.stalled,
            letter=flight.letter.words() if flight and flight.letter and stage is SnapshotStage.TELLING else None,
        )

    def advance(self, beat: Beat) -> Landing | None:
        """Collective: act on a reduced beat. Returns the landing if the flight has ended."""
        if self._said_ready:  # else the beat is from before the room was changed
            self._all_ready = beat.ready == self._ranks.world_size
        flight = self._flight
        if flight is None:
            return None
        self.outgrown = beat.outgrown > 0
        if beat.torn:
            self.mode = "held"
            return self._drop(f"tensors changed while they were read, on {beat.torn} ranks")
        if beat.shard_failed:
            return self._drop(f"{beat.shard_failed} of {self._ranks.world_size} ranks could not write")
        if beat.committed and beat.committed == (self._ranks.host_count if flight.tier == "fast" else 1):
            return self._end(SnapshotEvent.ALL_COMMITTED)
        if beat.shard_written == self._ranks.world_size:
            flight.move(SnapshotEvent.ALL_WRITTEN)
        elif beat.letters is not None:
            return self._commit_together(flight, Letters(beat.letters))
        return None

    def settle(self) -> Landing | None:
        """Collective: wait until the flight has ended, without the pulse. Returns the landing."""
        flight = self._flight
        if flight is None:
            return None
        self.fence()
        self._await_job(flight)
        if not self._ranks.all_of(flight.stage is not SnapshotStage.FAILED):
            self.outgrown = not self._ranks.all_of(not flight.outgrown)
            return self._drop("a rank could not write")
        if flight.stage is SnapshotStage.WRITTEN:
            flight.move(SnapshotEvent.ALL_WRITTEN)
        if flight.stage is SnapshotStage.TELLING:
            assert flight.letter is not None
            letters = Letters(torch.tensor(self._ranks.from_each(flight.letter.words())))
            if (landing := self._commit_together(flight, letters)) is not None:
                return landing
            self._await_job(flight)
        if not self._ranks.all_of(flight.stage is not SnapshotStage.FAILED):
            return self._drop("a rank could not write")
        return self._end(SnapshotEvent.ALL_COMMITTED)

    def _commit_together(self, flight: SnapshotInFlight, letters: Letters) -> Landing | None:
        """All ranks have written and know each other's letters: commit, unless their parameters differ."""
        if ranks := drift.differing(letters.digests):
            return self._drop(drift.in_words(ranks, self._ranks.world_size, letters.of_parts), drifted=ranks)
        if ranks := drift.differing_parts(letters.parts):
            return self._drop(drift.parts_in_words(ranks), drifted=ranks)
        if ailing := tuple(letters.nonfinite.nonzero().flatten().tolist()):
            return self._drop("there are new values in it that are not finite", ailing=ailing)
        commits = self._ranks.first_of_host if flight.tier == "fast" else self._ranks.first
        flight.move(SnapshotEvent.TO_COMMIT if commits else SnapshotEvent.OTHERS_COMMIT)
        self._job = flight.job = self.thread.submit(self._complete, flight, letters, commits)
        return None

    def _drop(self, why: str, drifted: tuple[int, ...] = (), ailing: tuple[int, ...] = ()) -> Landing:
        return self._end(SnapshotEvent.REFUSED, why, drifted, ailing)

    def _end(
        self, event: SnapshotEvent, why: str = "", drifted: tuple[int, ...] = (), ailing: tuple[int, ...] = ()
    ) -> Landing:
        flight = self._flight
        assert flight is not None
        self.fence()
        self._flight = None
        name, fault = flight.manifest.name, None
        flight.move(event)
        if event is SnapshotEvent.ALL_COMMITTED and flight.job is not None:
            flight.job.result()  # where others committed it, this rank's thread has made the manifest
        if event is SnapshotEvent.REFUSED:
            fault = f"{why} (this rank: {flight.fault})" if flight.fault else why
            if flight.slot is not None:
                self.slots_of_host.release(flight.slot, after=flight.job)
            elif self._ranks.first:
                # In the thread, behind whatever it still does with the directory.
                abandon = partial(ring.abandon, self._paths, name, self._attempt)
                self.thread.submit(say_if_it_fails, f"removing what was written of {name}", abandon)
        took = time.monotonic() - flight.began
        return Landing(flight.manifest, flight.tier, took, fault, drifted, ailing, flight.nonfinite)

    # In the thread -------------------------------------------------------------------------------------------------

    def _write(
        self, flight: SnapshotInFlight, capture: Capture, frozen: Mapping[str, Tensor], region: Region, place: Place
    ) -> None:
        if flight.copied is not None:
            flight.copied.result()
        if flight.slot is not None:
            written = Written(region.size, hash_of(region.view))
            self.slots_of_host.require_file(flight.slot)
        else:
            if self._ranks.apart:  # a shard in this host's directory is no part of anything
                raise OSError("there is no fast tier, and every host has a run directory of its own")
            directory = ring.begin_writing(self._paths, flight.manifest.name, self._attempt)
            written = write_direct(directory / place.file, region.view, place.start)
        self._frozen.require_stored(frozen, first=self._ranks.first)
        flight.nonfinite = capture.nonfinite()
        flight.letter = Letter(written, capture.digest(), len(flight.nonfinite), capture.part_digest())

    def _complete(self, flight: SnapshotInFlight, letters: Letters, commits: bool) -> None:
        manifest = flight.manifest.model_copy(update={"shards": letters.shards()})
        flight.manifest = manifest if flight.slot is not None else manifest.packed()
        if not commits:
            return
        if flight.slot is not None:
            self.slots_of_host.commit(flight.slot, flight.manifest)
        else:
            ring.commit(self._paths, flight.manifest)

    def _await_job(self, flight: SnapshotInFlight) -> None:
        if flight.job is not None:
            flight.job.exception()
        self._follow_thread()

    def _follow_thread(self) -> None:
        flight = self._flight
        if flight is None or flight.job is None or not flight.job.done() or not flight.thread_works:
            return
        error = flight.job.exception()
        if error is None:
            flight.move(SnapshotEvent.THREAD_DONE)
        elif isinstance(error, NoLongerFrozen):
            flight.outgrow(error.message)
        elif isinstance(error, OSError | RollbackError):
            flight.fail(str(error))
            if flight.slot is not None:  # what has failed once may fail each time: the run directory is next
                self.slots_of_host.fault = str(error)
        else:
            raise error

    @property
    def slots_of_host(self) -> FastTier:
        """The fast tier, for callers that hold a slot of it."""
        assert self._fast is not None  # who knows the number of a slot has it from there
        return self._fast

    # The threads ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for all work of the threads: for tests and measurements."""
        self.thread.submit(int).result()
        if self._fast is not None:
            self._fast.settle()

    def close(self) -> None:
        """Wait for the threads."""
        for pool in (self._copier, self.thread):
            pool.shutdown(wait=True)
        self._staging.close()
        if self._fast is not None:
            self._fast.close()
