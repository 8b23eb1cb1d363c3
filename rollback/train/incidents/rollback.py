"""Going back to a checkpoint in process: the one way in which ranks carry out a plan without leaving."""

from __future__ import annotations

import time

from rollback.checkpoints.manifest import Manifest
from rollback.errors import RollbackError
from rollback.facts.history import Case
from rollback.facts.training import Restored
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder
from rollback.train.data.passes import Passes
from rollback.train.data.skips import SkipList
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.incidents.judge import Decision, Judge, Rewind
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.restore import restore
from rollback.train.state.state import TrainingState
from rollback.train.updates.advice import NOT_IN_CHECKPOINT


class Rewinder:
    """Carries out plans that are in the journal. Methods are collective.

    source: the checkpoint that the live objects were last restored from, None where they never were.
    """

    def __init__(
        self,
        ranks: Ranks,
        state: TrainingState,
        watch: Judge,
        keeper: CheckpointManager,
        evidence: IncidentEvidence,
        skips: SkipList,
        passes: Passes,
        record: Recorder,
        source: Manifest | None,
    ) -> None:
        self._ranks = ranks
        self._state = state
        self._watch = watch
        self._keeper = keeper
        self._evidence = evidence
        self._skips = skips
        self._passes = passes
        self._record = record
        self.source = source

    def carry_out(self, decision: Rewind) -> Manifest | Decision | None:
        """Restore what is planned, and skip what is planned from now on. Returns the checkpoint that was restored.

        A planned checkpoint that cannot be believed leaves the ring and the plan is made anew; what is returned is then
        that new plan's decision if it is another one than to go back.
        """
        began, reached = time.monotonic(), self._state.counters.step
        while True:
            self._ranks.barrier()  # the plan is on rank 0's disk before anybody restores
            name = decision.plan.checkpoint
            assert name is not None
            fault = self._keeper.fetch_if_remote(name)
            if fault is None:
                target = self._keeper.manifest(name)
                result = restore(name, self._keeper.places(name), self._ranks, self._state)
                if result.place is not None:
                    break
                fault = result.fault
            replanned = self._watch.plan_without(name, str(fault), decision)
            if not isinstance(replanned, Rewind):
                return replanned
            decision = replanned
        plan = decision.plan
        self._evidence.forget(target.step)
        if plan.action == "rollback" and plan.skip is not None:
            self._skips.add(plan.skip)
        self._skips.announce(self._state.cursor)
        self._keeper.discard(plan)
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
        self._record.note(restored, f"back at step {target.step} in {restored.seconds:.2f} s")
        self._record.advise_of(NOT_IN_CHECKPOINT, self._state.not_in_checkpoint, checkpoint=target.name)
        self._watch.rewound(Case(decision.incident, plan, restored), target.step)
        self.source = target
        self._passes.rewound(left=self._state.counters.epoch_left)
        return target

    def restore_again(self) -> None:
        """The script has run code of its own since the restore. Undo what that did, without a word in the record."""
        assert self.source is not None
        self._evidence.forget(self.source.step)
        name = self.source.name
        result = restore(name, self._keeper.places(name), self._ranks, self._state)
        if result.place is None:
            raise RollbackError(
                f"restoring {name} once more at the start of its epoch: {result.fault}",
                hint="run the same command again: an older checkpoint will be used",
            )
