"""The training loop behind a guard: it hands out batches, and does all other work between two of them."""

import atexit
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from torch import nn

from rollback.ring.drainer import Drainer
from rollback.ring.shard_copier import ShardCopier
from rollback.rundir.heartbeats import END_OF_DATA, READING, SAVING_AT
from rollback.train.advice.advisor import Advisor
from rollback.train.catalogue.draining import end_draining
from rollback.train.comm.pulse import Pulse
from rollback.train.data.batches import Batches
from rollback.train.data.passes import Passes, RestoreAtPass
from rollback.train.ending import TrainingEnd
from rollback.train.events import RollbackCause
from rollback.train.incidents.decisions import Decision, Halt, Rewind, ServeRequests, Undo
from rollback.train.incidents.judge import Judge
from rollback.train.incidents.requests import Requests
from rollback.train.incidents.rewinder import Rewinder
from rollback.train.last_snapshot.survivor import LastSnapshot
from rollback.train.pass_rehearsal import PassRehearsal
from rollback.train.probe.prober import NO_BATCH, Prober
from rollback.train.process.failure_record import FailureRecorder
from rollback.train.process.stopping import ExitOrder
from rollback.train.run import AttachedRun, supervised
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.schedule import SnapshotSchedule
from rollback.train.snapshots.unseen_writes import UnseenWrites
from rollback.train.start import averaging
from rollback.train.state.state import TrainingState
from rollback.train.step import StepInProgress
from rollback.train.updates.learning_rate import LoweredRate


class TrainingMoved(Exception):
    """Training has been put to another position: what was to be done at the one before is void."""


@dataclass(eq=False)
class TrainingLoop:
    """The loop of one guard, of the parts that `assembly` makes. Methods are collective unless they say otherwise."""

    run: AttachedRun
    state: TrainingState
    model: nn.Module
    """As the script calls it."""
    batches: Batches
    passes: Passes
    step_in_progress: StepInProgress
    advisor: Advisor
    checkpoints: CheckpointManager
    schedule: SnapshotSchedule
    drainer: Drainer | ShardCopier | None
    """Copies checkpoints to the durable ring; None: another process does."""
    pulse: Pulse
    judge: Judge
    rewinder: Rewinder
    prober: Prober
    pass_rehearsal: PassRehearsal
    requests: Requests
    unseen_writes: UnseenWrites
    last_snapshot: LastSnapshot
    training_end: TrainingEnd
    failures: FailureRecorder
    lowered_rate: LoweredRate
    exit_order: ExitOrder = field(default_factory=ExitOrder)

    # What the script asks for --------------------------------------------------------------------------------------

    def start_pass(self) -> None:
        """Begin a pass: the batches of one epoch, from the run's position."""
        self.state.fsdp.reshard()
        self.prober.drop()
        self.pass_rehearsal.end()
        again = self.passes.start_pass()
        self.pass_rehearsal.pass_begins(restored=again is not RestoreAtPass.NOTHING)
        self.step_in_progress.heartbeat.activity.empty_pass = self.passes.epoch
        if again is RestoreAtPass.RANDOM_STATES:
            self.state.restore_random_states()
        elif again is RestoreAtPass.EVERYTHING:
            self.rewinder.restore_again(RollbackCause.EPOCH_START)
        self.state.cursor.begin_pass()
        self.run.record.advise(*self.passes.advice())

    def next_batch(self) -> Any:
        """The next batch. StopIteration: the epoch or the training is over. SystemExit: the ranks stop together."""
        if self.prober.probe is not None and (batch := self._next_of_probe()) is not NO_BATCH:
            return batch
        self.pass_rehearsal.end()
        if self.passes.over and not self._goes_back():
            if self.pass_rehearsal.due:
                return self.pass_rehearsal.begin()
            self.passes.note_end()
            if not self.passes.awaits_epoch:
                self.training_end.come_again()
            raise StopIteration
        self.step_in_progress.updates.require_scale()
        if (decision := ServeRequests() if self.requests.starting else self._end_step()) is not None:
            self._carry_out(decision)
        while not self.passes.interrupted:
            try:
                if self.training_end.is_due:
                    self._settle()
                    self._end_pass(self.training_end.by_max_steps, final=True)
                    break
                try:
                    if (batch := self._next_of_epoch()) is not NO_BATCH:
                        return batch
                    continue
                except StopIteration:
                    pass
                self._settle()
                if not self.passes.replaying:
                    self._end_pass(END_OF_DATA)
                    break
                self.passes.cross()
            except TrainingMoved:
                continue
        raise StopIteration

    def finish(self, by: str) -> bool:
        """Training ends here, by what `by` says. False: its last update demanded a return, so it goes on."""
        self.prober.drop()
        self.pass_rehearsal.end()
        decision = ServeRequests() if self.requests.starting else self._end_step()  # no batch may be left
        left = self.passes.leave_broken_epoch()
        # Only then may the ranks stop: else the next start would go on with what the script has left unread.
        try:
            self._act(decision)
            self._settle()
            self._keep_end(by, left_over=self.step_in_progress.batches, left=left)
        except TrainingMoved:
            return False
        self.last_snapshot.note_change()
        self._end_training()
        return True

    def close(self, *, given_up: bool = False) -> None:
        """End the guard. Not collective. given_up: the script has given this training up."""
        if not self.run.leave():
            return
        if given_up:
            self.training_end.forget()
        if (raised := self.training_end.raised) is not None and not isinstance(raised, SystemExit):
            self.last_snapshot.raised(f"rank {self.run.ranks.rank} raised {type(raised).__name__}")
        step = self.step_in_progress
        self.failures.record_exit()
        self.last_snapshot.leave()
        if not step.heartbeat.activity.script_failed:
            self.prober.abandon()
            judge, told = None if self.run.ranks.distributed else self._end_step, self.requests.stop.script_was_told
            self.training_end.close(changed=step.updated, told=told, judge=judge)
        self.pulse.close()
        step.heartbeat.end(in_hand=raised is not None, unrecorded=self.training_end.unrecorded)
        self.checkpoints.snapshots.close()
        self.judge.close()
        self.batches.close()
        self.lowered_rate.end()
        self.requests.stop.withdraw()
        end_draining(self.drainer)
        if self.run.lock is not None:
            self.run.lock.release()
        atexit.unregister(self.close)  # a process may make many guards, and each holds its model
        if step.heartbeat.activity.script_failed:
            self.requests.stop.heed()

    # Between two batches -------------------------------------------------------------------------------------------

    def _goes_back(self) -> bool:
        """Whether a pass that is over has batches again: an operator may have asked a complete run to go back."""
        if self.requests.starting and not self.passes.awaits_epoch:
            self._carry_out(ServeRequests())
        return not self.passes.over

    def _next_of_probe(self) -> Any:
        """The next batch of the probe that is under way. `NO_BATCH`: the probe is over, and its answer carried out."""
        if (batch := self.prober.next_batch()) is NO_BATCH:
            self._carry_out(self.prober.end())
        return batch

    def _next_of_epoch(self) -> Any:
        """Do what is due at a step's end, and hand out the next batch. `NO_BATCH`: a probe that was due has none."""
        between_steps = self.step_in_progress.first_batch is None
        if self.batches.open_epoch():
            self.step_in_progress.begin_epoch()
        if between_steps:
            if self.unseen_writes.looking:
                self.unseen_writes.at_end()
            self.last_snapshot.mark_end()
        rehearsed = self.pass_rehearsal.due and self.batches.nothing_is_left()
        calm = between_steps and self.judge.calm
        if rehearsed or (calm and self.schedule.due(self.judge.beat) and self.batches.may_resume_here()):
            self._take_snapshot(rehearsed=rehearsed)
        if between_steps and self.judge.before_next_batch:
            self._settle()
        if between_steps and self.prober.due:
            self._settle()
            return self.prober.begin()
        return self.pass_rehearsal.begin() if rehearsed and self.pass_rehearsal.ready else self._hand_out_batch()

    def _hand_out_batch(self) -> Any:
        if self.step_in_progress.first_batch is None:
            self.rewinder.hold(wanted=self.judge.screens(self.state.cursor.batch))
        step = self.state.counters.step
        batch = self.batches.read(step, self.judge.timeline, partial(self.step_in_progress.show_batch, READING))
        self.prober.keep(step, batch)
        self.training_end.go_on()
        self.pass_rehearsal.due, self.step_in_progress.heartbeat.activity.empty_pass = False, None
        return self.step_in_progress.hand_out(batch)

    def _end_step(self) -> Decision | None:
        """If the loop's body made an update: count it, judge the update before, and send the beat of this one."""
        step = self.step_in_progress
        if not step.updated:
            self.run.record.advise(*self.advisor.without_update(step.batches))
            return None
        self.state.fsdp.reshard()
        self.last_snapshot.note_change()
        if self.rewinder.rehearsing:
            self.rewinder.end_rehearsal()
            return None
        span, (loss, grad_norm, gauges) = step.finish(), step.readings()
        stop, requests_open = self.requests.stop.requested, self.requests.waiting
        seconds = self.schedule.end_update()
        decision = self.judge.end_step(
            span, loss, grad_norm, stop=stop, scaler_skipped=step.updates.dropped_by_scaler,
            requests_open=requests_open, gauges=gauges, seconds=seconds, screened=self.rewinder.held is not None,
        )  # fmt: skip
        step.next()
        return decision

    def _settle(self) -> None:
        """Judge the last step too. Raises TrainingMoved where this led to a rollback, so that batches follow."""
        self._act(self.judge.judge_pending())

    def _act(self, decision: Decision | None) -> None:
        """Carry out a decision. Raises TrainingMoved where training is at another position then."""
        if self._carry_out(decision):
            raise TrainingMoved

    def _carry_out(self, decision: Decision | None) -> bool:
        """Carry out a decision. True: training is at another position now."""
        match decision:
            case Rewind():  # the plan is in the journal
                self.step_in_progress.show("rewinding")
                if (halt := self.rewinder.carry_out(decision)) is not None:
                    self._halt(halt)
                return True
            case Undo():
                self.rewinder.undo(decision)
                return True
            case ServeRequests():
                return self._serve_requests()
            case Halt() if self._may_stop() or not decision.save:
                self._halt(decision)
            case _:  # a stop where no checkpoint may be taken: the next beat says it again
                pass
        return False

    def _serve_requests(self) -> bool:
        """Carry out the requests of operators. True: training is at another position now."""
        if self.requests.starting:
            # Once more: the script may have sharded the model since, exchanged parameters, or registered a hook.
            self.state.check()
            averaging.check_averaging(self.model, self.state.objects)
        moved = False
        while decision := self.requests.carry_out(self.state.counters.step, may_stop=self._may_stop()):
            moved |= self._carry_out(decision)
        return moved

    def _may_stop(self) -> bool:
        """Whether a run may resume here. No checkpoint has the gradients of an update that has begun."""
        return self.step_in_progress.first_batch is None and self.batches.may_resume_here(between=True)

    # Snapshots and ends --------------------------------------------------------------------------------------------

    def _take_snapshot(self, *, rehearsed: bool) -> None:
        """Take a snapshot at this step's end, or see to what a rehearsal needs.

        The last step is judged first, so that the sentinel's state in the checkpoint is complete.
        """
        self._settle()
        if rehearsed:
            self.pass_rehearsal.prepare(self.judge.timeline)
        elif self.judge.calm:
            self.training_end.go_on()
            self.schedule.take_snapshot(self.judge.timeline)

    def _end_pass(self, by: str, *, final: bool = False) -> None:
        """End the pass. Raises TrainingMoved where the final state demanded a rollback, so that batches follow."""
        self._keep_end(by, left_over=self.step_in_progress.batches)
        self.step_in_progress.end_pass()
        if final:
            self._end_training()
            self.training_end.complete()
        else:
            self.passes.end(final=False)

    def _end_training(self) -> None:
        """The final state is kept, and no batch follows. Not collective."""
        self.passes.end(final=True)
        self.requests.stop.withdraw()  # nobody reads the flag any more: SIGTERM gets its old meaning
        self.training_end.note_finished()

    def _keep_end(self, by: str, *, left_over: int, left: bool = False) -> None:
        self.step_in_progress.show(SAVING_AT.format(by))
        self.training_end.keep_state(by, left_over=left_over, left=left)
        while self.checkpoints.unanswered is not None:
            self._act(self.judge.answer_state())  # where the finding is left alone, the state is kept
            self.training_end.keep_state(by, left_over=left_over, left=left)
        self.step_in_progress.heartbeat.turn_to("training")

    def _halt(self, halt: Halt) -> NoReturn:
        if halt.save:
            self.last_snapshot.mark_end()  # for a death, or the end of the grace, before this state is written
            self.step_in_progress.show("saving")
        code = self.training_end.stop(halt)
        self.requests.note_stop(self.state.counters.step)
        self.run.ranks.barrier()
        self.requests.stop.obey()
        self.close()
        told = SystemExit(0 if supervised() else int(code))
        self.exit_order.note(told)
        raise told
