"""The checkpoints that a run keeps. Snapshots land, pass probation, become good and leave; each event is journalled.

`Catalogue` knows which checkpoints can be restored, and in which slot of this host each of them is. Those that are in
no slot lie in the run directory's ring, which rank 0 looks after. Methods are collective.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollback.checkpoints import ring
from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import of_present_timeline
from rollback.errors import EARLY, CheckpointOutOfReach, CheckpointUnusable, UsageError
from rollback.facts.training import (
    BecameGood,
    CheckpointLost,
    Committed,
    Drifted,
    Dropped,
    Evicted,
    Planned,
    Quarantined,
    Saving,
    Tier,
    Trouble,
)
from rollback.policy import PolicyCheckpoint
from rollback.rundir.paths import MANIFEST
from rollback.train.catalogue.catalogue import Catalogue, CheckpointPlace
from rollback.train.catalogue.remote import HostCopies, RemoteRing
from rollback.train.comm.beat import Beat
from rollback.train.comm.recorder import say, say_if_it_fails
from rollback.train.events import RollbackApplied
from rollback.train.run import AttachedRun
from rollback.train.snapshots.drift import NEVER_ALIKE, REPLICAS_DIFFER
from rollback.train.snapshots.in_flight import Landing, SnapshotInFlight
from rollback.train.snapshots.pipeline import Snapshots


class CheckpointManager:
    """If there are fewer slots than the ring keeps checkpoints, the slots keep one less than their number. remote: the
    ring at a URL, if there is one. copies: where every host has a run directory of its own."""

    def __init__(
        self,
        run: AttachedRun,
        snapshots: Snapshots,
        catalogue: Catalogue,
        remote: RemoteRing | None = None,
        copies: HostCopies | None = None,
    ) -> None:
        self.snapshots = snapshots
        self.catalogue = catalogue
        self._paths = run.paths
        self._ranks = run.ranks
        self._record = run.record
        self._keep = run.settings.keep
        self._remote = remote
        self._copies = copies
        self._leaving: dict[str, Callable[[bool], None]] = {}  # touched by the thread alone
        self._failing = False
        """Whether the last snapshot could not be written. That is said once, however many follow."""
        self._left = False
        """Whether the fast tier has been left since the last checkpoint was committed."""
        self.unanswered: Landing | None = None
        """A snapshot that was dropped since something in it is not finite that was before, until it is answered."""
        self.wanted = False
        """Whether a snapshot is due as soon as there is room for it, whatever the pace: the fast tier has failed, and
        what it held may be lost or out of reach; or a snapshot was torn, or had no room. The same on all ranks."""
        self.fault: str | None = None
        """Why the last snapshot became no checkpoint, None where it did."""

    def expect(self, flight: SnapshotInFlight) -> None:
        """Note that a snapshot was begun."""
        self.wanted = False
        self.catalogue.add_snapshot(flight.manifest, flight.slot)

    def note_no_memory(self) -> None:
        """Note that no snapshot could begin, since a rank has no memory for a copy."""
        self.fault = self._ranks.first_fault(self.snapshots.memory.fault) or "no memory for a copy was free"
        if not self._failing:
            self._record.note(
                Trouble(doing="taking a checkpoint", error=self.fault),
                f"no checkpoint can be taken: {self.fault}; training goes on, and it is said when one can be written "
                "again",
            )
        self._failing = True

    def advance(self, beat: Beat) -> None:
        """Act on a reduced beat."""
        if (landing := self.snapshots.advance(beat)) is not None:
            self._land(landing)
        self.wanted |= beat.torn > 0
        if beat.tier_failed and self.snapshots.memory.tier == "fast":
            self._leave_fast_tier(f"it failed on {beat.tier_failed} ranks")
        elif beat.missed:
            self.drop_lost()

    def await_landing(self) -> None:
        """Wait for the snapshot in flight. A plan that is made afterwards may try again to fetch what failed before."""
        if self._remote is not None:
            self._remote.try_again()
        if (landing := self.snapshots.await_landing()) is not None:
            self._land(landing)
            if not landing.committed and landing.tier == "fast":
                self.leave_failed_tier()

    def leave_failed_tier(self) -> None:
        """If the fast tier has failed on any rank, do not use it any more: see `tell_left`."""
        if self.snapshots.memory.tier == "fast" and not self._ranks.all_of(self.snapshots.memory.fault is None):
            self._leave_fast_tier("it has failed")

    def tell_left(self, why: str) -> None:
        """Journal that the fast tier is not used for writing any more. Hosts apart have no other place: with each
        snapshot it is tried again, and that is said once, until one is a checkpoint."""
        apart = self._ranks.apart
        then = "it is tried again" if apart else "checkpoints are written to the run directory from now on"
        self._record.note(
            Saving(slots=0, slot_bytes=0, capture=self.snapshots.mode, reason=f"the fast tier: {why}"),
            f"the fast tier: {why}; {then}" if not (apart and self._left) else None,
        )
        self._left = True

    def _leave_fast_tier(self, why: str) -> None:
        detail = f" (this rank: {self.snapshots.memory.fault})" if self.snapshots.memory.fault else ""
        self.snapshots.memory.use_slots(0)
        self.tell_left(why + detail)
        self.wanted = not self._ranks.apart  # what fails at once is not to be tried in each step
        self.drop_lost()

    def drop_lost(self) -> None:
        """Find checkpoints that are not there any more, and stop holding them. If a slot has lost one, the fast tier is
        left: it cannot be relied on."""
        in_slots = self.catalogue.in_slots()
        missing = [name for name in sorted(point.name for point in self.catalogue.as_held()) if self._misses(name)]
        if self._ranks.all_of(not missing):
            return
        lost = sorted(set[str]().union(*self._ranks.from_each(missing)))
        for name in lost:
            tier: Tier = "fast" if name in in_slots else "durable"
            if tier == "fast" or self._owns_ring:  # else the drainer may have thinned its ring
                where = "memory" if tier == "fast" else self._paths.ring
                told = f"checkpoint {name} is gone from {where}: somebody else has removed it, or part of it"
                self._record.note(CheckpointLost(checkpoint=name, tier=tier), told)
            if tier == "fast":
                self._release_slot(name)
                self.catalogue.leave(name)
            else:
                self.catalogue.drop(name)
        if self.snapshots.memory.tier == "fast" and not in_slots.isdisjoint(lost):
            self._leave_fast_tier("it has lost checkpoints")

    def misses_a_candidate(self) -> bool:
        """Whether this rank misses a checkpoint that is about to become good.

        Not collective. In most steps it does not touch a disk."""
        return any(map(self._misses, self.catalogue.about_to_pass()))

    def judge(self, healthy: bool, onset: int | None) -> None:
        """Count a verdict."""
        for manifest in self.catalogue.judge(healthy, onset):
            self._record.note(BecameGood(checkpoint=manifest.name, step=manifest.step))

    def rollback_applied(self, event: RollbackApplied) -> None:
        """Start the probation of candidates again, and forget the faults of later states.

        An update that was undone at once was in no checkpoint, and no verdict counted it.
        """
        if event.undid_one:
            return
        self.catalogue.restart_probation()
        self.unanswered = None

    def as_held(self) -> list[PolicyCheckpoint]:
        """The checkpoints that a plan may choose from. Rank 0 looks into the ring for those that left the fast tier."""
        if self.snapshots.memory.has_fast_tier:
            there = self._rank_0_sees(lambda: ring.names(self._paths))
            if there is not None:
                self.catalogue.consult(there)
        if self._remote is not None:
            self.catalogue.offer(self._remote.offered())
        return self.catalogue.to_choose_from()

    def look_into_ring(self) -> None:
        """Hold all checkpoints of this timeline in the ring, also candidates that left the slots and pinned ones.

        So an operator can go back to every checkpoint that `rollback ring list` shows. Automatic plans do not use it.
        Rank 0 looks from its thread: what has to leave the ring has left it by then, and is not chosen on its way out.
        """
        look = self.snapshots.thread.submit
        for manifest, good in self._rank_0_sees(lambda: look(self._of_present_timeline).result()) or ():
            self.catalogue.admit(Manifest.model_validate_json(manifest), good)

    def places(self, name: str) -> Sequence[CheckpointPlace]:
        """The places to restore a checkpoint of `as_held` from, best first. Waits until no live object is being copied
        any more."""
        self.snapshots.fence()
        found = [CheckpointPlace(self._paths.checkpoint(name), self._paths, bring=self._bring)]
        if (slot := self.catalogue.slot(name)) is not None:
            fast = self.snapshots.memory.fast_tier
            memory = fast.memory(slot)
            view = memory.view if memory else None
            found.insert(0, CheckpointPlace(fast.paths.slot(slot), self._paths, in_slot=True, memory=view))
        return found

    def _bring(self, name: str) -> None:
        """Collective: make sure that a checkpoint is in the run directory of every host. Raises CheckpointUnusable."""
        if self._remote is not None and self.catalogue.is_remote(name):
            self.catalogue.admit(self._remote.fetch(name), good=True)
        elif self._copies is not None:
            self._copies.bring(name)

    def put_aside(self, name: str, fault: CheckpointUnusable) -> None:
        """Put a damaged checkpoint aside. One that is only at the URL is not offered again for the present plan; one
        that a host cannot reach, in this attempt."""
        if self.catalogue.is_remote(name):
            return
        reason = fault.message
        self._release_slot(name)
        self.catalogue.drop(name)
        if isinstance(fault, CheckpointOutOfReach):
            if self._ranks.is_rank_0:
                say(f"checkpoint {name} cannot be used in this attempt: {reason}")
            return
        if self._ranks.is_rank_0 and os.path.lexists(self._paths.checkpoint(name)):
            say_if_it_fails(f"moving checkpoint {name} to quarantine", lambda: ring.quarantine(self._paths, name))
        self._record.note(Quarantined(checkpoint=name, reason=reason), f"checkpoint {name} cannot be used: {reason}")

    def discard(self, plan: Planned) -> None:
        """Remove the checkpoints that are newer than the restored one."""
        for name in plan.discards:
            if not self.catalogue.is_remote(name):  # that is the drainer's
                self.remove_checkpoint(name, "beyond a restored checkpoint")

    def remove_checkpoint(self, name: str, reason: str) -> None:
        """Remove a checkpoint that is of no use any more."""
        slot = self.catalogue.slot(name)
        self.catalogue.drop(name)
        self._evict(name, slot, reason)

    def _misses(self, name: str) -> bool:
        """Whether this rank misses a checkpoint that was committed. Not collective.

        It looks at the manifest; in a slot also at this rank's shard.
        """
        if (slot := self.catalogue.slot(name)) is not None:
            return not self.snapshots.memory.fast_tier.has_checkpoint(slot)
        return self._ranks.is_rank_0 and not os.path.lexists(self._paths.checkpoint(name) / MANIFEST)

    def _rank_0_sees(self, look: Callable[[], Any]) -> Any:
        """What rank 0 finds in the ring, on all ranks. None: the disk failed."""
        found = None
        if self._ranks.is_rank_0:
            try:
                found = look()
            except OSError as error:
                say(f"looking into {self._paths.ring} failed ({error}); what is held is known all the same")
        return self._ranks.from_first(found)

    def _of_present_timeline(self) -> list[tuple[str, bool]]:
        """Rank 0: the manifests in the ring that belong to the run, and whether they are good."""
        history = self._record.history
        sound, _ = ring.manifests(self._paths)
        present = [m for m in of_present_timeline(history, sound) if m.name not in history.left_run_directory]
        return [(manifest.model_dump_json(), manifest.name in history.good) for manifest in present]

    def _land(self, landing: Landing) -> None:
        manifest = landing.manifest
        if landing.nonfinite_ranks:
            self.unanswered = landing
        self.fault = landing.fault
        failed_before = self._failing
        if not landing.nonfinite_ranks:
            self._failing = landing.fault is not None
        if landing.fault is not None:
            self.catalogue.drop(manifest.name)
            if landing.drifted:
                self._report_drift(landing)
            self._record.note(
                Dropped(checkpoint=manifest.name, step=manifest.step, reason=landing.fault),
                f"the checkpoint of step {manifest.step} could not be written: {landing.fault}; training goes on, and "
                "it is said when one can be written again"
                if not landing.nonfinite_ranks and not failed_before else None,
            )  # fmt: skip
            return
        self._left = False
        self._record.note(
            Committed(
                checkpoint=manifest.name,
                step=manifest.step,
                batch=manifest.batch,
                timeline=manifest.timeline,
                bytes=manifest.bytes,
                seconds=round(landing.seconds, 4),
                tier=landing.tier,
            ),
            f"the checkpoint of step {manifest.step} could be written again" if failed_before else None,
        )
        if self.catalogue.land(manifest):
            self._record.note(BecameGood(checkpoint=manifest.name, step=manifest.step))
        if not manifest.over:  # for one that leaves again if training goes on, nothing has to leave
            self.evict_surplus()

    def evict_surplus(self) -> None:
        """Each tier has its own capacity."""
        slots = self.snapshots.memory.slots
        counted = self.catalogue.in_slots() if slots else None
        for name, reason in self.catalogue.surplus(min(self._keep, slots - 1) if slots else self._keep, counted):
            slot = self.catalogue.slot(name)
            if self.snapshots.memory.has_fast_tier:
                self.catalogue.leave(name)
            else:
                self.catalogue.drop(name)
            self._evict(name, slot, reason)
        if slots and self._owns_ring:
            in_ring = {point.name for point in self.catalogue.as_held()} - self.catalogue.in_slots()
            for name, reason in self.catalogue.surplus(self._keep, in_ring):
                self.remove_checkpoint(name, reason)

    def _release_slot(self, name: str) -> None:
        """Release the slot of a checkpoint, if it is in one."""
        if (slot := self.catalogue.slot(name)) is not None:
            self.snapshots.memory.fast_tier.release(slot)

    def _evict(self, name: str, slot: int | None, reason: str) -> None:
        """Evict a checkpoint: from its slot at once on all ranks, from the ring by rank 0's thread."""

        def told(tier: Tier, was_there: bool) -> None:
            left, lost = Evicted(checkpoint=name, reason=reason, tier=tier), CheckpointLost(checkpoint=name, tier=tier)
            self._record.note(left if was_there else lost)

        if slot is not None:
            self.snapshots.memory.fast_tier.release(slot, partial(told, "fast"))
        elif self._owns_ring and self._ranks.is_rank_0:
            self.snapshots.thread.submit(self._evict_from_ring, name, partial(told, "durable"))

    def _evict_from_ring(self, name: str, then: Callable[[bool], None]) -> None:
        """Evict a checkpoint from the ring. One that is pinned, or that the disk does not let go, leaves with a later
        one."""
        self._leaving[name] = then
        for leaving in list(self._leaving):
            say_if_it_fails(f"evicting checkpoint {leaving}", partial(self._evict_unless_pinned, leaving))

    def _evict_unless_pinned(self, name: str) -> None:
        there = os.path.lexists(self._paths.checkpoint(name))
        if not there or ring.evict(self._paths, name):
            self._leaving.pop(name)(there)

    @property
    def _owns_ring(self) -> bool:
        """Whether the ranks evict from the run directory's ring. If slots are drained into it, the drainer does."""
        return not self.snapshots.memory.has_fast_tier or self._remote is not None

    def _report_drift(self, landing: Landing) -> None:
        """Raises UsageError where a run has hardly begun, and no checkpoint has an update that all ranks made alike: so
        they train. Later it may be a machine that miscalculates, and there is more to lose."""
        manifest = landing.manifest
        fact = Drifted(checkpoint=manifest.name, step=manifest.step, ranks=landing.drifted)
        newest = self.catalogue.newest()
        if manifest.step < EARLY and (newest is None or not newest.step):
            self._record.note(fact)
            raise UsageError(f"{landing.fault}, since the first updates of the run", hint=NEVER_ALIKE)
        self._record.note(fact, landing.fault)
        self._record.advise(REPLICAS_DIFFER)
