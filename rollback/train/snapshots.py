"""Snapshots on their way to becoming checkpoints: captured at a step's end, written by a thread, committed by pulse.

The stages of the one snapshot that may be in flight, on each rank:

    stage      what the rank does                        what moves it on
    WRITING    its thread writes the shard               the thread ends
    WRITTEN    says so on every pulse                    all ranks have said so (rank 0: COMMITTING, others stay)
    COMMITTING rank 0's thread writes manifest, renames  the thread ends
    COMMITTED  rank 0 says so on the next pulse          that pulse is read: every rank lands it in the same step
    FAILED     says so on the next pulse                 that pulse is read: every rank drops it in the same step

No rank decides on what it alone knows: `advance` is fed with reduced beats only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from rollback.errors import RollbackError
from rollback.rundir import ring
from rollback.rundir.manifest import Manifest
from rollback.rundir.paths import RunPaths, checkpoint_name, shard_name
from rollback.rundir.shard import Piece, write_shard
from rollback.train import tree
from rollback.train.pulse import Beat, Signs
from rollback.train.ranks import Ranks
from rollback.train.record import say
from rollback.train.state import Image, owners


class Stage(Enum):
    WRITING = "writing"
    WRITTEN = "written"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


@dataclass
class Flight:
    """The snapshot in flight. `error` is this rank's own, for its log; whether it failed is decided by pulse."""

    manifest: Manifest
    began: float
    stage: Stage
    job: Future[None]
    error: str | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Landing:
    """A flight's end, known to all ranks in the same step."""

    manifest: Manifest
    committed: bool
    reason: str
    seconds: float
    bytes: int


class Snapshots:
    """At most one snapshot is in flight. Methods marked *collective* must be called by all ranks in the same step."""

    def __init__(self, paths: RunPaths, ranks: Ranks, next_seq: int, attempt: int) -> None:
        self._paths = paths
        self._ranks = ranks
        self._next_seq = next_seq
        self._attempt = attempt
        self._buffers: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollback-snapshot")
        self._flight: Flight | None = None
        self._leaving: dict[str, Callable[[], None]] = {}  # touched by the thread alone

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    def begin(self, image: Image, *, step: int, batch: int, epoch: int, timeline: int) -> str:
        """Collective: copy this rank's part of the image and start writing it. Waits for the copy, not for the disk.

        Returns the name that the checkpoint will have.
        """
        if self._flight is not None:
            raise RuntimeError("a snapshot is in flight already")
        seq, self._next_seq = self._next_seq, self._next_seq + 1
        manifest = Manifest(
            name=checkpoint_name(seq, step), seq=seq, step=step, batch=batch, epoch=epoch, timeline=timeline,
            attempt=self._attempt, created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self._ranks.world_size, shards=(),
        )  # fmt: skip
        owner = owners(image.shared_tensors, self._ranks.world_size)
        mine = {name: item for name, item in image.shared_tensors.items() if owner[name] == self._ranks.rank}
        copies = self._copy({**mine, **image.local_tensors})
        metadata = {"local": json.dumps(image.local)}
        if self._ranks.first:
            metadata["shared"] = json.dumps(image.shared)
        job = self._thread.submit(self._write, manifest.name, copies, metadata)
        self._flight = Flight(
            manifest, time.monotonic(), Stage.WRITING, job, bytes=sum(c.nbytes for c in copies.values())
        )
        return manifest.name

    def signs(self) -> Signs:
        """What this rank has to say of its flight on the next beat."""
        self._follow_thread()
        stage = self._flight.stage if self._flight else None
        failed = stage is Stage.FAILED
        return Signs(
            shard_written=stage is Stage.WRITTEN,
            shard_failed=failed,
            committed=stage is Stage.COMMITTED,
        )

    def advance(self, beat: Beat) -> Landing | None:
        """Collective: act on a reduced beat. The landing, if the flight ended by it."""
        flight = self._flight
        if flight is None:
            return None
        if beat.shards_failed:
            return self._land(False, f"{beat.shards_failed} of {self._ranks.world_size} ranks could not write")
        if beat.committed:
            return self._land(True, "")
        if beat.shards_written == self._ranks.world_size and self._ranks.first and flight.stage is Stage.WRITTEN:
            flight.stage = Stage.COMMITTING
            flight.job = self._thread.submit(ring.commit, self._paths, flight.manifest)
        return None

    def settle(self) -> Landing | None:
        """Collective: wait until the flight has ended one way or the other, without the pulse."""
        if self._flight is None:
            return None
        self._flight.job.exception()
        self._follow_thread()
        if self._ranks.all_of(self._flight.stage is not Stage.FAILED) and self._ranks.first:
            if self._flight.stage is Stage.WRITTEN:
                self._flight.stage = Stage.COMMITTING
                self._flight.job = self._thread.submit(ring.commit, self._paths, self._flight.manifest)
            self._flight.job.exception()
            self._follow_thread()
        committed = bool(self._ranks.from_first(self._flight.stage is Stage.COMMITTED))
        return self._land(committed, "" if committed else "a rank could not write")

    def evict(self, name: str, then: Callable[[], None]) -> None:
        """Rank 0: remove a checkpoint, in the thread, and call `then` once it is gone. Other ranks: nothing.

        A pinned one stays; if it is no longer pinned when another leaves, it leaves too.
        """
        if self._ranks.first:
            self._thread.submit(self._evict, name, then)

    def quarantine(self, name: str) -> None:
        """Rank 0: move a checkpoint that cannot be believed out of the ring. Other ranks: nothing."""
        if self._ranks.first:
            self._tell(f"moving checkpoint {name} to quarantine", lambda: ring.quarantine(self._paths, name))

    def _evict(self, name: str, then: Callable[[], None]) -> None:
        self._leaving[name] = then
        for leaving in list(self._leaving):
            self._tell(f"evicting checkpoint {leaving}", partial(self._evict_unless_pinned, leaving))

    def _evict_unless_pinned(self, name: str) -> None:
        then = self._leaving.pop(name)
        if ring.evict(self._paths, name):
            then()
        else:
            self._leaving[name] = then

    def _tell(self, doing: str, act: Callable[[], None]) -> None:
        """Do what the run can go on without; say so where it fails."""
        try:
            act()
        except OSError as error:
            say(f"{doing} failed ({error}); training goes on")

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown(wait=True)

    def _land(self, committed: bool, reason: str) -> Landing:
        flight = self._flight
        assert flight is not None
        self._flight = None
        if not committed and self._ranks.first:
            # In the thread, behind whatever it still does with the directory.
            name = flight.manifest.name
            self._thread.submit(
                self._tell, f"removing what was written of {name}", lambda: ring.abandon(self._paths, name)
            )
        detail = f"{reason} (this rank: {flight.error})" if flight.error else reason
        return Landing(flight.manifest, committed, detail, time.monotonic() - flight.began, flight.bytes)

    def _follow_thread(self) -> None:
        flight = self._flight
        if flight is None or flight.stage not in (Stage.WRITING, Stage.COMMITTING) or not flight.job.done():
            return
        error = flight.job.exception()
        if error is None:
            flight.stage = Stage.WRITTEN if flight.stage is Stage.WRITING else Stage.COMMITTED
        elif isinstance(error, OSError | RollbackError | ValueError):
            flight.stage, flight.error = Stage.FAILED, str(error)
        else:
            raise error

    def _copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory that is kept from snapshot to snapshot: fresh pages cost more than the bytes."""
        copies = {}
        on_gpu = False
        for name, source in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(source, non_blocking=True)
            on_gpu |= source.is_cuda
            copies[name] = buffer
        if on_gpu:
            torch.cuda.synchronize()
        return copies

    def _write(self, name: str, copies: dict[str, Tensor], metadata: dict[str, str]) -> None:
        directory = ring.begin_writing(self._paths, name)
        pieces = [
            Piece(key, tree.DTYPE_CODE[value.dtype], tuple(value.shape), bytes_of(value))
            for key, value in copies.items()
        ]
        written = write_shard(directory / shard_name(self._ranks.rank), pieces, metadata)
        ring.leave_note(directory, self._ranks.rank, written)


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view."""
    return value.reshape(-1).view(torch.uint8).numpy().data
