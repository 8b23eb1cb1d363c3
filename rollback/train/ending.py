"""How training ends: complete with its state kept, or by a script that left its loop before.

The guard knows the end where it ends the iteration itself: at `max_steps`, or at the last epoch of `guard.epochs(n)`.
Any other pass that reaches the end of the data may be the last one. So the state is kept after each pass, and released
when another batch is handed out. The state that is kept when the guard is closed is the final state.
"""

import itertools
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from rollback.checkpoints.resume import script_left_at
from rollback.errors import ExitCode
from rollback.facts.ending import EndedAs, GivingUp
from rollback.facts.training import FinalStateLost, Finished, LastSaveFailed, ScriptLeft, Stopped
from rollback.rundir.heartbeats import END_OF_DATA, UnrecordedEnd
from rollback.train.incidents.decisions import Halt
from rollback.train.incidents.judge import Judge
from rollback.train.run import AttachedRun
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.state.state import TrainingState

_NUMBERS = itertools.count()
_WHY = 200  # characters: a heartbeat's place on the board is small
_GIVING_UP: dict[GivingUp, ExitCode] = {"structural": ExitCode.STRUCTURAL, "no_checkpoint": ExitCode.NO_CHECKPOINT}
_MADE_UNDER = "_rollback_made_under"


class EndStage(Enum):
    """What is to be put on record when the guard is closed."""

    UNTRAINED = "nothing but a possible end: no batch has been handed out"
    TRAINED = "that the script has left its loop, or a possible end"
    RECORDED = "nothing: it is done"
    STOPPED = "nothing: the ranks have stopped together, and that is on record"


class TrainingEnd:
    """The end of one rank's training. max_steps: the last update; None: the end of the data."""

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        schedule: SnapshotSchedule,
        checkpoints: CheckpointManager,
        judge: Judge,
        max_steps: int | None,
    ) -> None:
        self._state = state
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._judge = judge
        self._record = run.record
        self.max_steps = max_steps
        self.max_steps_in_words = "max_steps={}"
        self.way_out = (
            'max_steps=N or guard.epochs(N); where the script decides, `if guard.finish("enough"): break` in place of '
            "`break`"
        )
        """What would have ended the loop where the script has left it; empty: nothing that the script could write."""
        self.on_complete: list[Callable[[], object]] = []
        """Called when the guard has ended the loop at `max_steps`."""
        self._keeps = run.settings.snapshot_every != 0
        self._before = run.history.finished
        self._possible: Finished | None = None
        """The end of training, unless another batch is handed out."""
        self._given_up = False
        self._stage = EndStage.UNTRAINED
        self.unrecorded: UnrecordedEnd | None = None
        self._number = next(_NUMBERS)
        if (handled := sys.exc_info()[1]) is not None:
            # The script's loop may stand in an `except`, and a process be forked in one. That exception is marked and
            # not kept: it would keep all frames that it has passed through.
            vars(handled).setdefault(_MADE_UNDER, []).append(self._number)
        if run.restored is not None and run.restored.name == run.history.final:
            self._possible = self._before
        self._left = script_left_at(run.history, run.restored) if run.restored is not None else None
        """Where the script had left, and this attempt goes on: perhaps that was its last epoch."""

    @property
    def is_due(self) -> bool:
        """Whether `max_steps` is reached."""
        return self.max_steps is not None and self._state.counters.step >= self.max_steps

    @property
    def by_max_steps(self) -> str:
        """What ends the training then, in words."""
        return self.max_steps_in_words.format(self.max_steps)

    @property
    def raised(self) -> BaseException | None:
        """The exception that is ending the script: not one that was being handled when the guard was made, nor the end
        of an epoch's batches, within which the ranks may stop together."""
        raised = sys.exc_info()[1]
        if raised is None or self._stage is EndStage.STOPPED or self._number in vars(raised).get(_MADE_UNDER, ()):
            return None
        return raised

    def keep_state(self, by: str, *, left_over: int, left: bool) -> None:
        """Collective: keep the state at a possible end. All steps are judged. by: what ended the training.

        left_over: batches after the last update. left: the script has done its work after the last epoch.
        """
        calm, self._state.counters.epoch_left = self._judge.calm, left
        if self._possible is not None and self._possible.batch != self._state.cursor.batch:
            self._pass_end()  # an epoch without a batch lies behind it, and the slots have room for one end
        kept = self._schedule.take_end(self._judge.timeline)
        self._possible = Finished(
            step=self._state.counters.step, batch=self._state.cursor.batch, checkpoint=kept, by=by, calm=calm,
            left_over=left_over,
        )  # fmt: skip

    def come_again(self) -> None:
        """The pass that had ended before this attempt has ended again. Not collective."""
        if self._left is not None and self._possible is None and self._stage is EndStage.UNTRAINED:
            self._possible = Finished(
                step=self._left.step, batch=self._left.batch, checkpoint=self._left.checkpoint, by=END_OF_DATA,
                calm=self._judge.calm,
            )  # fmt: skip

    def go_on(self) -> None:
        """Collective: a batch is handed out, so that was not the end."""
        if self._stage is EndStage.UNTRAINED:
            self._stage = EndStage.TRAINED
        self._pass_end()

    def _pass_end(self) -> None:
        """Collective: what was taken for the end was none."""
        passed, self._possible = self._possible, None
        if passed is not None and passed.checkpoint is not None:
            self._schedule.go_on(passed.checkpoint)

    def forget(self) -> None:
        """What was taken for the end is none, and no further batch follows. Not collective: the checkpoint stays."""
        self._possible, self._given_up = None, True

    def stop(self, halt: Halt) -> ExitCode:
        """Collective: the ranks stop together before the end. Returns the exit code for a run without a supervisor."""
        kept = self._schedule.take_now(self._judge.timeline) if halt.save else None
        if halt.giving_up is None:
            self._checkpoints.drop_lost()
        where, unsaved = self._standing()
        account = halt.account
        if lost := halt.save and kept is None and self._keeps:
            failed = LastSaveFailed(**where, steps=unsaved, reason=self._schedule.fault)
            account = failed.in_words()
            self._record.note(failed)
        stopped = Stopped(**where, reason=halt.giving_up or "preempted", account=account)
        self._record.note(stopped, f"stopped at step {stopped.step}: {account}")
        self._stage = EndStage.STOPPED
        if halt.giving_up is not None:
            self._note_unrecorded(halt.giving_up, stopped)
            return _GIVING_UP[halt.giving_up]
        if stopped.checkpoint is not None:
            return ExitCode.RESUMABLE
        return ExitCode.IO if lost else ExitCode.FAILED

    def complete(self) -> None:
        for act in self.on_complete:
            act()

    def close(self, *, changed: bool, told: bool, judge: Callable[[], object] | None) -> None:
        """The script seems to be complete. Not collective.

        changed: it has made an update since its last batch. told: a handler of its own was told to stop, so that a
        possible end need not be the one that it was to come to. judge: ends that step, where this needs no other rank.
        A plan that follows is for the next start.
        """
        if self.is_on_record or self.raised is not None:  # `finally` and `with` close the guard in an exception too
            return
        if self._possible is not None and not changed and not told:
            self.note_finished()
            return
        if self._stage is EndStage.UNTRAINED:
            return
        if changed and judge is not None:
            judge()
            self._judge.judge_pending()
            changed = False
        self._note_left(changed + self._judge.awaits_verdict)

    def note_finished(self) -> None:
        """Journal the end of training, once, after `keep_state`. Not collective."""
        if self.is_on_record:
            return
        self._stage = EndStage.RECORDED
        assert self._possible is not None
        self._note_complete(self._possible)
        self._note_unrecorded("complete", self._possible)

    @property
    def is_on_record(self) -> bool:
        """Whether it is journalled how the training ended, or why it stopped."""
        return self._stage in (EndStage.RECORDED, EndStage.STOPPED)

    def _note_complete(self, end: Finished) -> None:
        step, batch = end.step, end.batch
        if end.checkpoint is not None or not self._keeps:
            notice = None
            if self._before is not None and (self._before.step, self._before.checkpoint) == (step, end.checkpoint):
                notice = (
                    f"nothing was left to train behind step {step}; ask for more steps or epochs to go on, or name "
                    "another run directory for another training"
                )
            elif self.max_steps is not None and 0 < step < self.max_steps:
                notice = f"training ends at step {step}, by {end.by}, and not by {self.by_max_steps}"
            elif not step and batch and not end.left_over:
                notice = f"nothing was trained: each of the {batch} batches is skipped, as the run's skip list says"
            elif not step:  # else "done" would be taken for trained
                notice = "training has ended without an update by the optimizer that the guard was handed"
            self._record.note(end, notice)
            return
        where, unsaved = self._standing()
        lost = FinalStateLost(**where, steps=unsaved, reason=self._schedule.fault)
        self._record.note(
            lost, f"training is complete at step {step}, but its final state could not be kept: the last {lost.steps} "
            f"updates are in no checkpoint ({lost.reason}); once that is mended, the same command trains them again",
        )  # fmt: skip

    def _standing(self) -> tuple[dict[str, Any], int]:
        """Step, batch and newest checkpoint, as fields of a fact; and the number of updates after that checkpoint."""
        newest, step = self._checkpoints.catalogue.newest(), self._state.counters.step
        where = {"step": step, "batch": self._state.cursor.batch, "checkpoint": newest.name if newest else None}
        return where, step - (newest.step if newest else 0)

    def _note_left(self, unjudged: int) -> None:
        self._stage = EndStage.RECORDED
        left = ScriptLeft(**self._standing()[0], unjudged=unjudged)
        what = f"; its last {unjudged} updates were not judged" if unjudged > 1 else ""
        what = "; its last update was not judged" if unjudged == 1 else what
        end_there = ""
        if self.way_out and not self._given_up:
            end_there = f". To end there, let the guard end the loop: {self.way_out}"
            if self.max_steps is not None and left.step + unjudged >= self.max_steps:
                end_there = f". Take the `break` out of the loop: the guard itself ends it at {self.by_max_steps}"
        kept = "No checkpoint has been taken"
        if left.checkpoint is not None:
            kept = f"What came behind the newest checkpoint ({left.checkpoint}) is in none"
        if self._possible is not None and left.checkpoint == self._possible.checkpoint is not None:
            kept, end_there = f"It was told to stop, and goes on from there ({left.checkpoint})", ""
        self._record.note(
            left, f"the script has left its loop over the guard, at step {left.step}{what}. {kept}{end_there}"
        )
        self._note_unrecorded("left", left)

    def _note_unrecorded(self, how: EndedAs, end: Stopped | Finished | ScriptLeft) -> None:
        """For the last heartbeat, where the journal could not take this end."""
        if why := self._record.unwritten:
            self.unrecorded = UnrecordedEnd(how=how, why=why[:_WHY], step=end.step, batch=end.batch)
