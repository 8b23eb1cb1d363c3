"""Rehearsals of passes: a pass that has no batch left may be given one that does not count.

Code behind the script's loop may need what the body sets (docs/design.md, "Epochs").

What the batch changes is put back from a checkpoint of this very state. Where an update has begun, with batches that an
accumulation had left over in the epoch before, there must be none: a run that resumed from it would have lost their
gradients. Then the state is held in memory, and the update goes on behind the rehearsal.
"""

from collections.abc import Callable
from typing import Any

from rollback.train.events import RollbackCause
from rollback.train.incidents.rewinder import Rewinder
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import GradientCopy, StateCopy
from rollback.train.step import StepInProgress


class PassRehearsal:
    """The batch that does not count, of a pass that has no batch left.

    make: makes the batch; None: no pass gets one. due: whether the present pass gets one if nothing is left of it.
    ready: whether it gets one now. source: the checkpoint that is put back then; None: the one that was restored last.
    """

    def __init__(
        self, state: TrainingState, step: StepInProgress, rewinder: Rewinder, schedule: SnapshotSchedule
    ) -> None:
        self._state, self._step, self._rewinder, self._schedule = state, step, rewinder, schedule
        self._held: StateCopy | None = None
        self._under_way: tuple[GradientCopy, Callable[[], None]] | None = None
        self._restored = False
        self.make: Callable[[], Any] | None = None
        self.due = self.ready = False
        self._source: str | None = None

    def pass_begins(self, *, restored: bool) -> None:
        """restored: the state is that of the checkpoint that was restored last. Not collective."""
        self.due, self.ready, self._source = self.make is not None, False, None
        self._held, self._restored = None, restored

    def prepare(self, timeline: int) -> None:
        """Collective: see to it that the present state can be put back. All steps are judged."""
        self._held = self._rewinder.present_state() if self._step.first_batch is not None else None
        if self._held is None and not self._restored:
            self._source = self._schedule.take_now(timeline)
        self.ready = self._restored or self._held is not None or self._source is not None

    def begin(self) -> Any:
        """The batch. Not collective."""
        assert self.make is not None
        self.due = self.ready = False
        self._step.updates.forget()
        self._under_way = GradientCopy(self._state.trained, self._state.fsdp), self._step.hold()
        return self.make()

    def end(self) -> None:
        """Collective: put back all that the batch has changed, if it was the last one."""
        if self._under_way is None:
            return
        (gradients, put_back_step), self._under_way = self._under_way, None
        self._rewinder.rehearsing &= not self._step.updates.attempted  # else DDP's buckets are cut now
        if (held := self._held) is not None:
            self._rewinder.put_back_probe(held, gradients)
        else:
            gradients.put_back(lambda: self._rewinder.restore_again(RollbackCause.EPOCH_START, self._source))
        self._held = None
        put_back_step()
