"""Going back to a checkpoint within the process. The ranks carry out a plan in no other way without exiting.
And whether a process that goes on has to rehearse its first step."""

import time
from collections.abc import Callable, Iterable

from torch.nn.parallel import DistributedDataParallel

from rollback.checkpoints.format.manifest import Manifest
from rollback.errors import RollbackError
from rollback.facts.history import Case
from rollback.facts.training import Restored, Window
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.decisions import Halt, Rewind, Undo
from rollback.train.incidents.judge import Judge
from rollback.train.restore.late_writes import writes_behind
from rollback.train.restore.restore import restore
from rollback.train.run import AttachedRun
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.state.module_buffers import NOT_IN_CHECKPOINT
from rollback.train.state.state import TrainingState
from rollback.train.state.state_copy import GradientCopy, StateCopy


class Rewinder:
    """Puts training back to an earlier state, and tells everybody who keeps something of it. Methods are collective,
    apart from `hold` and `present_state`.

    rehearsing: whether the first step to come is a rehearsal.
    subscribers: called in this order with every `RollbackApplied`, whatever its cause, once the live objects are those
    of the checkpoint and the journal has all there is to say of it.
    """

    def __init__(
        self, run: AttachedRun, state: TrainingState, judge: Judge, checkpoints: CheckpointManager, *, rehearsing: bool
    ) -> None:
        self._run = run
        self._state = state
        self._judge = judge
        self._checkpoints = checkpoints
        self._restored = run.restored
        self._source: Manifest | StateCopy | None = run.restored
        self.has_gone_back = False
        """Whether this process has gone back by a plan. Before it has, the script says what is to be trained."""
        self.held: StateCopy | None = None
        """The state before the update in progress, where that can be undone."""
        self.rehearsing = rehearsing
        self.written = writes_behind(run, state)
        self.before: Callable[[], object] = lambda: None
        """Called when the live objects are about to change."""
        self.subscribers: list[Callable[[RollbackApplied], object]] = []

    def carry_out(self, decision: Rewind) -> Halt | None:
        """Restore what is planned; the plan is in the journal already.

        A planned checkpoint that fails its check leaves the ring, and a new plan is made. Returns its
        decision if that is not to go back: then nothing was restored.
        """
        began, reached = time.monotonic(), self._state.counters.step
        self.has_gone_back = True
        self.before()
        while True:
            self._run.ranks.barrier()  # the plan is on rank 0's disk before anybody restores
            name = decision.plan.checkpoint
            assert name is not None
            result = restore(name, self._checkpoints.places(name), self._run.ranks, self._state)
            if result.place is not None:
                break
            replanned = self._judge.plan_without(name, result.fault, decision)
            if not isinstance(replanned, Rewind):
                assert isinstance(replanned, Halt), "who only observes never goes back"
                return replanned
            decision = replanned
        plan, target = decision.plan, self._checkpoints.catalogue.manifest(name)
        self._checkpoints.discard(plan)
        restored = Restored(
            incident=plan.incident,
            checkpoint=target.name,
            step=target.step,
            batch=target.batch,
            steps_lost=reached - target.step,
            seconds=round(time.monotonic() - began, 4),
            route="in_process",
            tier=result.place.tier,
        )
        self._run.record.note(restored, f"back at step {target.step} in {restored.seconds:.2f} s")
        self._run.record.advise_of(NOT_IN_CHECKPOINT, self._state.not_in_checkpoint, checkpoint=target.name)
        self._publish(RollbackCause.PLAN, target, Case(decision.incident, plan, restored))
        return None

    def hold(self, *, wanted: bool) -> None:
        """Hold the present state, so that the update that begins now can be undone. Not wanted: hold none.

        Behind it, nobody asks for the state that was put back last: only a pass that begins does.
        """
        self._source = self._restored
        self.held = self.present_state(self.held) if wanted else None

    def present_state(self, before: StateCopy | None = None, *, data: bool = True) -> StateCopy:
        """The present state, held for a while. The arguments are those of `StateCopy`."""
        return StateCopy(self._state, self._checkpoints.snapshots.frozen.unchanged, before, data=data)

    def undo(self, decision: Undo) -> None:
        """Put back the state from before the last update, whose batches are skipped from now on."""
        assert self.held is not None
        self._put_back(RollbackCause.SCREEN, self.held, decision.window)
        self.held = None

    def put_back_probe(self, held: StateCopy, gradients: GradientCopy) -> None:
        """Undo a step that was none of the run's; where the data stand has not changed."""
        gradients.put_back(lambda: self._load(held))
        self._publish(RollbackCause.PROBE, held)

    def restore_again(self, cause: RollbackCause, name: str | None = None) -> None:
        """Restore again, to undo what the script's own code did since the restore. The journal does not mention it.

        name: the checkpoint; None: the one that was restored last.
        """
        source = self._source if name is None else self._checkpoints.catalogue.manifest(name)
        assert source is not None
        if isinstance(source, StateCopy):
            self._put_back(cause, source)
            return
        self.before()
        result = restore(source.name, self._checkpoints.places(source.name), self._run.ranks, self._state)
        if result.place is None:
            raise RollbackError(
                f"restoring {source.name} once more at the start of its epoch: {result.fault.message}",
                hint="run the same command again: an older checkpoint will be used",
            )
        self._publish(cause, source)

    def end_rehearsal(self) -> None:
        """The step that has just ended does not count: go back, and take it again."""
        self.rehearsing = False
        self.restore_again(RollbackCause.REHEARSAL)

    def _put_back(self, cause: RollbackCause, held: StateCopy, screened_out: Window | None = None) -> None:
        self._load(held)
        self._publish(cause, held, screened_out=screened_out)

    def _load(self, held: StateCopy) -> None:
        """Raises, on all ranks, what the objects of one refuse: the others would train on without it."""
        self._checkpoints.snapshots.fence()
        self.before()
        self._run.ranks.agreed(lambda: held.put_back(self._state))

    def _publish(
        self,
        cause: RollbackCause,
        source: Manifest | StateCopy,
        case: Case | None = None,
        screened_out: Window | None = None,
    ) -> None:
        if self.has_gone_back or source is not self._run.restored:
            self._state.switches.put_back(self._state.switches.loaded)
        if cause is not RollbackCause.PROBE:
            self._source = source
        if isinstance(source, Manifest):
            self._restored = source
        name = source.name if isinstance(source, Manifest) else ""
        counters = self._state.counters
        event = RollbackApplied(cause, source.step, source.batch, name, counters.epoch_left, case, screened_out)
        for subscriber in self.subscribers:
            subscriber(event)


def needs_rehearsal(replicas: Iterable[DistributedDataParallel], world_size: int, resumed_at: int) -> bool:
    """Whether the first step of a resumed process is one that does not count, so that each DDP has cut its gradient
    buckets as in the undisturbed run (docs/design.md, "Rehearsal"); the same on all ranks. With two ranks a sum has
    only one order, and at step 0 the undisturbed run has the first cut too."""
    cut_again = any(ddp.static_graph or not ddp.find_unused_parameters for ddp in replicas)
    return cut_again and world_size > 2 and resumed_at > 0
