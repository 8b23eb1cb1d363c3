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
from rollback.checkpoints.format.layout import NotReadBack
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.format.packs import Place
from rollback.checkpoints.format.shard import Written
from rollback.errors import RollbackError
from rollback.facts.checkpoints import CaptureMode
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.system.region import Region
from rollback.system.threads import Threads
from rollback.train.comm.beat import Beat, Signs
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say_if_it_fails
from rollback.train.snapshots import drift
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.capture import Capture, share_of
from rollback.train.snapshots.frozen import FrozenWeights, NoLongerFrozen
from rollback.train.snapshots.in_flight import (
    Landing,
    ShardReport,
    ShardReports,
    SnapshotEvent,
    SnapshotInFlight,
    SnapshotStage,
)
from rollback.train.snapshots.memory import SnapshotMemory
from rollback.train.state.image import Image
from rollback.train.state.nonfinite import FiniteCheck

_MOVED = (
    "weights were changed outside of optimizer.step() while they were copied (as sharpness-aware or adversarial "
    "training does by hand, and a schedule-free optimizer in its eval() and train()); from now on training waits for "
    "each copy"
)


def _copier() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollback-copier")


class Snapshots:
    """At most one snapshot is in flight. Methods marked *collective* must be called by all ranks in the same step.

    fast: the slots, if there are any; else ranks write to the run directory's ring. mode: see `tier_choice`. unsure:
    whether copies are waited for in any mode, as it is not known yet what the script writes within a step.
    thread: the only one that writes and removes files. stalled: seconds for which the last snapshot blocked the loop.
    memory: what the next snapshot is copied into. frozen: the weights that are left out, since they are stored once.
    finite: looks at each copy. next_seq: the number of the next checkpoint.
    """

    def __init__(
        self,
        paths: RunPaths,
        ranks: Ranks,
        finite: FiniteCheck,
        next_seq: int,
        attempt: int,
        fast: FastTier | None = None,
    ) -> None:
        self.mode: CaptureMode = "at_once"
        self.unsure = False
        self.stalled = 0.0
        self.drifted = False
        """Whether a snapshot has found that the ranks no longer have the same state; alike on all ranks."""
        self._paths = paths
        self._ranks = ranks
        self._finite = finite
        self.next_seq = next_seq
        self._attempt = attempt
        self._turn = next_seq
        """Of the samples of what other objects keep. One that differs is compared until it does no more."""
        self.thread = Threads(1, "rollback-snapshot")
        self.memory = SnapshotMemory(ranks, self.thread, fast)
        self.frozen = FrozenWeights(paths)
        self._copier = _copier()
        self.in_flight: SnapshotInFlight | None = None

    # Memory for the next one ---------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all ranks have said that the next snapshot can begin; the same on all ranks."""
        return self.in_flight is None and self.memory.ready

    def fit_memory(self, image: Image) -> int:
        """Collective: snapshots will be of such an image. Returns the rank's shard size. See `SnapshotMemory.fit`."""
        drift.require_alike(image, self._ranks)
        self.frozen.agree(image, self._ranks)
        return self.memory.fit(share_of(image, self._ranks, self.frozen.digests))

    def await_ready(self, image: Image) -> str:
        """Collective: wait until the next snapshot can begin. If the fast tier is not ready in time, stop using it, and
        return why; else an empty string."""
        if not self.memory.fitted:
            self.fit_memory(image)
            self.memory.use_slots(self.memory.slots)
        return self.memory.await_ready()

    # The flight ----------------------------------------------------------------------------------------------------

    def start_snapshot(
        self, image: Image, *, step: int, batch: int, epoch: int, timeline: int, over: bool = False
    ) -> SnapshotInFlight:
        """Collective, when `ready`: copy this rank's part of the image, or begin to copy it. Never waits for a disk.

        over: whether the snapshot is behind the last batch of the epoch.
        """
        if self.in_flight is not None:
            raise RuntimeError("a snapshot is in flight already")
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        manifest = Manifest(
            name=CheckpointName.of(seq, step), seq=seq, step=step, batch=batch, epoch=epoch, over=over,
            timeline=timeline, attempt=self._attempt, created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self._ranks.world_size, shards=(), frozen=self.frozen.record,
        )  # fmt: skip
        mode: CaptureMode = "held" if self.unsure else self.mode
        slot, region = self.memory.reserve()
        flight = self.in_flight = SnapshotInFlight(manifest, slot, time.monotonic())
        try:
            self.frozen.require_frozen(image)
            share = share_of(image, self._ranks, self.frozen.digests, self._turn)
            capture = Capture(share, self.memory.layout_of(share), region, mode)
            capture.start()
        except NoLongerFrozen as error:
            flight.outgrow(error.message)
        except NotReadBack as error:
            flight.fail(
                "what loader, scheduler and guard.keep have beside tensors is too much, or nested too deep, to be read "
                f"again; long lists of numbers may be kept as arrays of NumPy: {error}"
            )
        except ValueError as error:
            flight.outgrow(f"what is kept has grown, and the next snapshot will have room for it: {error}")
        else:
            if mode == "held" or (copied := self._begin_copy(capture)) is None:
                capture.finish()
            else:
                flight.capture, flight.copied = capture, copied
            given = flight, capture, share.frozen, region, self.memory.place
            self.memory.used_by = flight.job = self.thread.submit(self._write, *given)
        return flight

    def _begin_copy(self, capture: Capture) -> Future[None] | None:
        """Copy in a thread; None: none can be made, as under `ulimit -u`, so this rank has to copy at once."""
        try:
            return self._copier.submit(capture.finish)
        except RuntimeError:
            self._copier.shutdown(wait=False, cancel_futures=True)  # else the next thread would do this copy too
            self._copier = _copier()
            return None

    def fence(self) -> None:
        """Wait until the copy is complete. Call it before anything changes the state. Not collective."""
        flight = self.in_flight
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
        if self.in_flight is not None and self.in_flight.capture is not None:
            self.in_flight.capture.note_unseen_writes(weights)

    def signs(self) -> Signs:
        """What this rank sends with the next beat about the snapshot in flight and the room for the next one."""
        flight = self.in_flight
        if flight is not None:
            self.fence()
            self._follow_thread()
        stage, report = (flight.stage, flight.shard_report) if flight else (None, None)
        return Signs(
            shard_written=stage is SnapshotStage.WRITTEN,
            shard_failed=stage is SnapshotStage.FAILED,
            torn=flight is not None and flight.torn,
            committed=stage is SnapshotStage.COMMITTED,
            ready=self.memory.tell_ready(),
            tier_failed=self.memory.fault is not None,
            outgrown=flight is not None and flight.outgrown,
            stall=self.stalled,
            shard_report=report.words() if report is not None and stage is SnapshotStage.TELLING else None,
        )

    def advance(self, beat: Beat) -> Landing | None:
        """Collective: act on a reduced beat. Returns the landing if the flight has ended."""
        self.memory.note_ready(beat.ready, beat.tier_failed)
        flight = self.in_flight
        if flight is None:
            return None
        self.memory.outgrown = beat.outgrown > 0
        if beat.torn:
            self.mode = "held"
            return self._end(f"{_MOVED}, on {beat.torn} ranks")
        if beat.shard_failed:
            return self._end(f"{beat.shard_failed} of {self._ranks.world_size} ranks could not write")
        if beat.committed and beat.committed == (self._ranks.host_count if flight.tier == "fast" else 1):
            return self._end()
        if beat.shard_written == self._ranks.world_size:
            flight.move(SnapshotEvent.ALL_WRITTEN)
        elif beat.shard_reports is not None:
            return self._commit_together(flight, ShardReports(beat.shard_reports))
        return None

    def await_landing(self) -> Landing | None:
        """Collective: wait until the flight has ended, without the pulse. Returns the landing."""
        flight = self.in_flight
        if flight is None:
            return None
        self.fence()
        self._await_job(flight)
        if not self._ranks.all_of(flight.stage is not SnapshotStage.FAILED):
            self.memory.outgrown = not self._ranks.all_of(not flight.outgrown)
            return self._end("a rank could not write")
        if flight.stage is SnapshotStage.WRITTEN:
            flight.move(SnapshotEvent.ALL_WRITTEN)
        if flight.stage is SnapshotStage.TELLING:
            assert flight.shard_report is not None
            reports = ShardReports(torch.tensor(self._ranks.from_each(flight.shard_report.words()), device="cpu"))
            if (landing := self._commit_together(flight, reports)) is not None:
                return landing
            self._await_job(flight)
        if not self._ranks.all_of(flight.stage is not SnapshotStage.FAILED):
            return self._end("a rank could not write")
        return self._end()

    def _commit_together(self, flight: SnapshotInFlight, reports: ShardReports) -> Landing | None:
        """All ranks have written and know each other's shard reports: commit, unless what must be alike differs."""
        if ranks := drift.differing(reports.digests):
            what = drift.PLAIN if reports.of_parts else drift.PARAMETERS_IN_WORDS
            return self._end(drift.in_words(ranks, self._ranks.world_size, what), drifted=ranks)
        if ranks := drift.differing_parts(reports.parts):
            return self._end(drift.parts_in_words(ranks), drifted=ranks)
        if ranks := drift.differing(reports.spot_checks):
            return self._end(drift.in_words(ranks, self._ranks.world_size, drift.OBJECTS), drifted=ranks)
        self._turn += 1
        if nonfinite_ranks := tuple(reports.nonfinite.nonzero().flatten().tolist()):
            return self._end("there are new values in it that are not finite", nonfinite_ranks=nonfinite_ranks)
        commits = self._ranks.first_of_host if flight.tier == "fast" else self._ranks.is_rank_0
        flight.move(SnapshotEvent.TO_COMMIT if commits else SnapshotEvent.OTHERS_COMMIT)
        self.memory.used_by = flight.job = self.thread.submit(self._complete, flight, reports, commits)
        return None

    def _end(
        self, fault: str | None = None, drifted: tuple[int, ...] = (), nonfinite_ranks: tuple[int, ...] = ()
    ) -> Landing:
        """fault: why it becomes no checkpoint; None: it is one."""
        flight = self.in_flight
        assert flight is not None
        self.fence()
        self.in_flight = None
        self.drifted |= bool(drifted)
        name = flight.manifest.name
        flight.move(SnapshotEvent.ALL_COMMITTED if fault is None else SnapshotEvent.REFUSED)
        if fault is None and flight.job is not None:
            flight.job.result()  # where others committed it, this rank's thread has made the manifest
        if fault is not None:
            fault = f"{fault} (this rank: {flight.fault})" if flight.fault else fault
            if flight.slot is not None:
                self.memory.fast_tier.release(flight.slot, after=flight.job)
            elif self._ranks.is_rank_0:
                # In the thread, behind whatever it still does with the directory.
                abandon = partial(ring.abandon, self._paths, name, self._attempt)
                self.thread.submit(say_if_it_fails, f"removing what was written of {name}", abandon)
        took = time.monotonic() - flight.began
        return Landing(flight.manifest, flight.tier, took, fault, drifted, nonfinite_ranks, flight.nonfinite)

    # In the thread -------------------------------------------------------------------------------------------------

    def _write(
        self, flight: SnapshotInFlight, capture: Capture, frozen: Mapping[str, Tensor], region: Region, place: Place
    ) -> None:
        if flight.copied is not None:
            flight.copied.result()
        if flight.slot is not None:
            written = Written(region.size, hash_of(region.view))
            self.memory.fast_tier.require_file(flight.slot)
        else:
            if self._ranks.apart:  # a shard in this host's directory is no part of anything
                raise OSError("there is no fast tier, and every host has a run directory of its own")
            directory = ring.begin_writing(self._paths, flight.manifest.name, self._attempt)
            written = write_direct(directory / place.file, region.view, place.start)
        self.frozen.require_stored(frozen, is_rank_0=self._ranks.is_rank_0)
        flight.nonfinite = self._finite.newly_nonfinite(capture.copies())
        flight.shard_report = ShardReport(
            written, capture.digest(), len(flight.nonfinite), capture.part_digest(), capture.spot_check_digest()
        )

    def _complete(self, flight: SnapshotInFlight, reports: ShardReports, commits: bool) -> None:
        manifest = flight.manifest.model_copy(update={"shards": reports.shards()})
        flight.manifest = manifest if flight.slot is not None else manifest.packed()
        if not commits:
            return
        if flight.slot is not None:
            self.memory.fast_tier.commit(flight.slot, flight.manifest)
        else:
            ring.commit(self._paths, flight.manifest)

    def _await_job(self, flight: SnapshotInFlight) -> None:
        if flight.job is not None:
            flight.job.exception()
        self._follow_thread()

    def _follow_thread(self) -> None:
        flight = self.in_flight
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
                self.memory.fast_tier.fault = str(error)
        else:
            raise error

    # The threads ---------------------------------------------------------------------------------------------------

    def start_threads(self) -> None:
        """Those without which there is no snapshot, before they are needed. Not collective. Raises RollbackError where
        one cannot be made."""
        self.thread.submit(int)
        if self.memory.has_fast_tier:
            self.memory.fast_tier.start_thread()

    def wait(self) -> None:
        """Wait for all work of the threads: for tests and measurements."""
        self.thread.submit(int).result()
        self.memory.await_slots()

    def close(self) -> None:
        """Wait for the threads."""
        for pool in (self._copier, self.thread):
            pool.shutdown(wait=True)
        self.memory.close()
