"""When and how snapshots are taken: the pace, the tier, and whether they overlap with training."""

import time
from collections import deque
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from rollback.errors import RunDirectoryError
from rollback.facts.training import Paced, Saving
from rollback.train.comm.beat import Beat
from rollback.train.comm.ranks import Ranks
from rollback.train.events import RollbackApplied
from rollback.train.run import AttachedRun
from rollback.train.sharded import version_of
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pace import SnapshotPace
from rollback.train.snapshots.tier_choice import SWITCHED_OFF, Allotment, OpenedTier, allot, usual_capture_mode
from rollback.train.state.state import TrainingState
from rollback.train.updates.hooks import before_update, weak_hook

_REMEMBERED = 21  # steps whose median is what a step takes
_TRIES = 6  # of a checkpoint that is waited for: a tier may fail, and a state may grow, but not for ever


class OptimizerStates:
    """Which ranks have an optimizer state. It comes with a first gradient: on some ranks later than on others, or not.

    here: whether this rank's had one at the last look.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self.here = self._everywhere = True
        self._updates, self._asks_at = 0, 1

    def look(self) -> None:
        """Collective."""
        self.here = bool(self._optimizer.state)
        self._everywhere = self._ranks.all_of(self.here)

    def one_has_come(self) -> bool:
        """Collective, behind each update: whether a rank has got one since the last look. The ranks ask each other
        behind the updates 1, 2, 4, 8 and so on: where an optimizer never has a state they would do so for ever."""
        self._updates += 1
        if self._everywhere or self._updates < self._asks_at:
            return False
        self._asks_at = 2 * self._updates
        return not self._ranks.all_of(self.here or not self._optimizer.state)


class SnapshotSchedule:
    """Methods are collective unless they say otherwise.

    open_tier: makes the fast tier again where it has failed; collective. tier: what it returned first.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        checkpoints: CheckpointManager,
        tier: OpenedTier,
        open_tier: Callable[[], OpenedTier],
    ) -> None:
        self._settings = settings = run.settings
        self._ranks = run.ranks
        self._state = state
        self._snapshots = checkpoints.snapshots
        self._checkpoints = checkpoints
        self._record = run.record
        self._tier, self._open_tier = tier, open_tier
        self._taken_at = self._taken_before_end = run.restored.step if run.restored is not None else None
        self._made_for_end = False
        """Whether the newest checkpoint is one of a possible end, which is removed where training goes on."""
        self._measured = False
        self._pace = SnapshotPace(settings.overhead, settings.probation) if settings.snapshot_every == "auto" else None
        self._repaced = False  # since the last snapshot
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_began: float | None = None
        self._allotted: Allotment | None = None
        self._states = OptimizerStates(state.optimizer, run.ranks)
        self._moves_early, self._versions = True, [0]
        """Whether the optimizer may write to weights before its closure has run. What torch counted when it began."""
        self._hook: RemovableHandle | None = state.optimizer.register_step_pre_hook(weak_hook(self._before_step))
        before_update(state.optimizer, self._before_update)
        if settings.snapshot_every:
            self._ranks.agreed(self._snapshots.start_threads)
            self._prepare()

    def end_update(self) -> float:
        """Note that an update has ended. Call it before its beat is sent. Returns the seconds that a step takes on this
        rank, without the cost of snapshots."""
        if self._hook is not None and not self._moves_early:  # not sooner: torch went through the hooks
            self._hook.remove()
            self._hook = None
        now = time.perf_counter()
        if self._step_began is not None:
            self._seconds.append(max(0.0, now - self._step_began))
        self._step_began = now
        self._checkpoints.wanted |= self._snapshots.memory.outgrown  # the one that was dropped is made up for
        if self._states.one_has_come() or self._snapshots.memory.outgrown:
            self._prepare()
        return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else 0.0

    def due(self, beat: Beat | None) -> bool:
        """Whether a snapshot is due at the end of this step, by the beat that was read last.

        At an epoch's start it is waited for where it is overdue by as much again, as that of the epoch's end was: else
        epochs of an update or two would never have one that stays, since the memory is ready again two steps later. Not
        of data that are only read in order: what a loader tells of an epoch that has just begun need not lead back to
        its beginning. Memory that could not be had is tried for as late.
        """
        step, every = self._state.counters.step, self._settings.snapshot_every
        if not every or self._snapshots.in_flight:
            return False
        waits = self._made_for_end and not self._state.cursor.reads_ahead
        taken_at = self._taken_before_end if waits else self._taken_at
        if taken_at is None:
            return True
        ready = self._snapshots.memory.ready
        if not (ready or waits or self._snapshots.memory.failed):
            return False
        if ready and self._checkpoints.wanted:
            return True
        periods = 1 if ready else 2
        if self._pace is None:
            assert isinstance(every, int)
            return step // every >= taken_at // every + periods
        if beat is not None and self._measured:
            self._repaced |= self._pace.measure(beat.stall, beat.step_seconds)
        if step < taken_at + periods * self._pace.every:
            return False
        if beat is not None and self._repaced:  # with a snapshot: of short steps the measure changes with nearly each
            self._repaced = False
            self._record.note(
                Paced(every=self._pace.every, stall=round(beat.stall, 6), step_seconds=round(beat.step_seconds, 6))
            )
        return True

    def take_snapshot(self, timeline: int) -> None:
        """Begin a snapshot of the present state."""
        began = time.perf_counter()
        image, cursor, step = self._state.image(), self._state.cursor, self._state.counters.step
        if self._snapshots.memory.outgrown or (self._ranks.apart and not self._snapshots.memory.slots):
            self._prepare()
        if not self._snapshots.ready:
            self._checkpoints.leave_failed_tier()
            if why := self._snapshots.await_ready(image):
                self._checkpoints.tell_left(why)
        if not self._snapshots.ready:
            self._taken_at = step
            self._checkpoints.note_no_memory()
            return
        self._measured = self._measured or self._taken_at is not None
        flight = self._snapshots.start_snapshot(
            image, step=step, batch=cursor.batch, epoch=cursor.epoch, timeline=timeline, over=not cursor.opened
        )
        self._checkpoints.expect(flight)
        self._taken_at = step
        self._snapshots.stalled = time.perf_counter() - began

    def take_now(self, timeline: int) -> str | None:
        """The name of a checkpoint of the present state, after a look that it exists. None: none could be made.

        No other snapshot may follow, so this waits for it. If the fast tier fails, the run directory gets it.
        """
        self._checkpoints.await_landing()
        self._checkpoints.drop_lost()
        kept, tier = self._checkpoint_here(), ""
        for _ in range(_TRIES if self._settings.snapshot_every else 0):
            if kept is not None or (tier == self._snapshots.memory.tier and not self._snapshots.memory.outgrown):
                break
            tier = self._snapshots.memory.tier
            self.take_snapshot(timeline)
            self._checkpoints.await_landing()
            kept = self._checkpoint_here()
            if self._checkpoints.unanswered is not None:
                break  # the state itself is amiss, wherever it is written to
        return kept

    @property
    def fault(self) -> str:
        """Why there is no checkpoint of the present state, in words, after `take_now` returned None."""
        return self._checkpoints.fault or "what was written is not there any more"

    def take_end(self, timeline: int) -> str | None:
        """As `take_now`, for a state that may be the end of training."""
        there, self._taken_before_end = self._checkpoint_here(), self._taken_at
        kept = self.take_now(timeline)
        self._made_for_end = kept != there
        return kept

    def go_on(self, end: str) -> None:
        """Note that training goes on behind what was taken as its end."""
        if self._made_for_end:
            self._taken_at, self._made_for_end = self._taken_before_end, False
            self._checkpoints.remove_checkpoint(end, "training went on behind the end of an epoch")

    def _checkpoint_here(self) -> str | None:
        """The checkpoint of the present state, if there is one."""
        newest, cursor = self._checkpoints.catalogue.newest(), self._state.cursor
        here = self._state.counters.step, cursor.batch, not cursor.opened
        return newest.name if newest is not None and (newest.step, newest.batch, newest.over) == here else None

    def rollback_applied(self, event: RollbackApplied) -> None:
        """Training goes on where there is a checkpoint; what came between is no part of a step."""
        if not event.undid_one:
            self._taken_at = event.step
        self._step_began = None

    def _prepare(self) -> None:
        """Make room for snapshots, as much as they will need.

        Once more after the first update of a fresh run, and where the state has grown beyond it. A fast tier that has
        failed meanwhile is left alone, but not by hosts apart: a shard in the run directory of one is of no use to the
        others. They try it again.
        """
        before, used = self._allotted, self._snapshots.memory.slots
        if before is not None and not used:
            if self._ranks.apart:  # somebody may have removed it
                self._tier = self._open_tier()
            elif before.slots:
                self._tier = None, "the fast tier has failed"
        image = self._state.image()
        needed = self._snapshots.fit_memory(image)
        self._states.look()
        if not self._states.here:  # most optimizers keep two numbers for each parameter
            parameters = sum(item.nbytes for item in self._state.model.parameters() if item.requires_grad)
            needed += 2 * parameters // self._ranks.world_size
        allotted = allot(*self._tier, self._ranks, needed, self._settings.keep)
        if before is None and self._ranks.apart and not allotted.slots:
            raise RunDirectoryError(
                f"every host has a run directory of its own, so checkpoints go by the fast tier, and {allotted.reason}",
                hint="give the hosts more memory or another place for it (--fast-tier DIR); or share the run directory",
            )
        self._snapshots.memory.use_slots(allotted.slots)
        self._checkpoints.evict_surplus()  # all slots may be taken: they are fewer now, or a death came in front of it
        on_device = any(item.is_cuda for item in image.tensors)
        mode, why = usual_capture_mode(on_device, self._ranks)
        if before is None:
            self._snapshots.mode = mode  # later it may be another one: see `Snapshots.advance`
        if allotted != before or allotted.slots != used:
            told = before is not None and (self._tier[0] is None or not before.slots)
            wanted = self._tier != (None, SWITCHED_OFF)
            notice = allotted.reason if wanted and not (allotted.slots or told) else None
            reason = f"{allotted.reason}; {why}{self._snapshots.frozen.in_words()}"
            self._record.note(
                Saving(
                    slots=allotted.slots, slot_bytes=allotted.slot_bytes, capture=self._snapshots.mode, reason=reason
                ),
                notice,
            )
        self._allotted = allotted

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Not collective. An optimizer may move the weights before it runs its closure, as SAM does."""
        self._snapshots.fence()
        self._versions = [version_of(item) for item in self._state.trained]

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Not collective: the parameters are about to change."""
        self._snapshots.fence()
        if self._moves_early:  # if not, copies may go on beside what its closure computes
            self._moves_early = self._versions != [version_of(item) for item in self._state.trained]
