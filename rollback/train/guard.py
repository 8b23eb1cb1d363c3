"""`rollback.Guard`, for the training script. It hands out batches, and does all other work between two batches."""

import atexit
import os
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from rollback.errors import RollbackError
from rollback.train import drill
from rollback.train.catalogue.draining import at_exit, end_draining
from rollback.train.data.cursor import cursor_for
from rollback.train.data.passes import Again, PassState
from rollback.train.events import RollbackCause
from rollback.train.incidents.decisions import Attend, Decision, Halt, Rewind, Undo
from rollback.train.prober import NO_BATCH
from rollback.train.process.stopping import end_with_supervisor
from rollback.train.run import supervised
from rollback.train.script_side import PassIterator, ScriptSide, refusing
from rollback.train.start import arguments
from rollback.train.start import attach as attaching
from rollback.train.state.rank_allocation import rank_allocation
from rollback.train.state.state import TrainingState
from rollback.train.updates.hooks import weak_hook


class Guard(ScriptSide):
    """Iterate over the guard instead of the loader; report the loss to it. It resumes, rewinds, skips and records.

        guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
        for batch in guard:
            loss = loss_fn(model(batch))
            loss.backward()
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            guard.observe(loss)

    All ranks must make the guard at the same point, after `init_process_group` and after wrapping the model in DDP,
    and must iterate over it alike. docs/guard.md says more.

    model: a module, plain, in DistributedDataParallel, or sharded by fully_shard or parallelize_module. optimizer: its
    torch optimizer. loader: a DataLoader, a Stateful loader, a callable or an iterable (see
    `rollback.train.data.cursor`). Pass any other object with `state_dict` and `load_state_dict` by a name of its own
    (scheduler, scaler, ema, ...): the guard keeps and restores it too. It must be the same on all ranks.

    max_steps: end the iteration after this many optimizer updates; default: at the end of the data. run: the run
    directory (default `runs/<script name>`; `rollback launch --run` takes precedence). All settings of
    `rollback.config.Settings` are accepted as keyword arguments; those of the command line take precedence.

    Raises UsageError for objects that cannot be guarded, RunDoesNotFit for a run directory of another job, RunInUse,
    RunDirectoryError, NoUsableCheckpoint; in all these cases nothing has changed.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        max_steps: int | None = None,
        run: str | os.PathLike[str] | None = None,
        **others: Any,
    ) -> None:
        try:
            ranks = attaching.meet()
            settings, objects = arguments.settings_and_objects(others)
            sentinel = arguments.sentinel_for(settings)
            arguments.check_trained(model, optimizer, objects)
            objects = {**rank_allocation(model), **objects}
            arguments.check_run(run)
            end = None if max_steps is None else arguments.whole_number(max_steps, "Guard got max_steps")
            arguments.check_alike(settings, end, ranks)
            state = TrainingState(model, optimizer, objects, cursor_for(loader), sentinel)
            state.check()  # refuses now what could not be kept later
            attached = attaching.attach(attaching.run_paths(run), state, ranks, settings)
            super().__init__(attached, state, model, loader, end)
        except RollbackError as error:
            attaching.refuse(error)
        end_with_supervisor(weak_hook(self._last.keep))
        atexit.register(self.close)
        at_exit(self.close)
        drilled = drill.DrilledGuard(
            model, self._run, self._state, self._step_in_progress, self._end, self._checkpoints.snapshots,
            self._batches.skips, self._requests.stop, self.close,
        )  # fmt: skip
        drill.take_part(drilled)  # does nothing outside of `rollback drill`

    # What the script uses ------------------------------------------------------------------------------------------

    def epochs(
        self, count: int, *, rehearse: Callable[[], Any] | None = None, resume_between: bool = False
    ) -> Iterator[int]:
        """The epochs from the run's position up to `count`: `for epoch in guard.epochs(10): for batch in guard: ...`

        All ranks alike. Like `range(count)`, except that a resumed run begins at its epoch and that a rollback over an
        epoch's start goes back to that epoch's body, so that the script's work between epochs is repeated too.

        rehearse: makes a batch, for scripts whose code behind the loop over the guard needs what the loop's body sets.
        Where all that is left of an epoch is skipped, the body then runs once with such a batch; on all ranks, and
        nothing of it counts: all that the guard keeps is put back. Default: the loop is empty in such an epoch.
        resume_between: the code behind that loop uses no value that the loop's body sets, but for those of `keep`. So a
        run may also resume behind an epoch's last batch, and do that code again: a death there costs no step.
        Raises UsageError where `count` is not a whole number, and where a body did not iterate over the guard.
        """
        self._pass_rehearsal.make, self._batches.resumes_between = rehearse, resume_between
        return self._passes.epochs(arguments.whole_number(count, "guard.epochs got count"), self.finish)

    @refusing
    def finish(self, by: str) -> bool:
        """Training ends here, and not at `max_steps` or behind `guard.epochs`; `by`: what says so. All ranks alike.

        False where the last update was judged to demand a return: training stands elsewhere then, and goes on."""
        self._prober.drop()
        self._pass_rehearsal.end()
        decision = Attend() if self._requests.starting else self._end_step()  # no batch may be left
        left = self._passes.leave_broken_epoch()
        # Only then may the ranks stop: else the next start would go on with what the script has left unread.
        if self._act(decision) or not self._all_is_well():
            return False
        if kept := self._keep_end(by, left_over=self._step_in_progress.batches, left=left):
            self._last.note_change()
            self._end.note_finished()
        return kept

    @refusing
    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: the batches of one epoch, from the run's position. All ranks alike. The result is an ordinary
        iterator: several places of the loop's body may take from it."""
        self._state.fsdp.reshard()
        self._prober.drop()
        self._pass_rehearsal.end()
        again = self._passes.start_pass()
        self._pass_rehearsal.pass_begins(restored=again is not Again.NOTHING)
        self._step_in_progress.heartbeat.empty_pass = self._passes.epoch
        if again is Again.RANDOM_STATES:
            self._state.restore_random_states()
        elif again is Again.EVERYTHING:
            self._rewinder.restore_again(RollbackCause.EPOCH_START)
        self._state.cursor.begin_pass()
        for code, text in self._passes.advice():
            self._run.record.advise(code, text)
        loop = PassIterator(self)
        self._step_in_progress.heartbeat.loop = weakref.ref(loop)
        return loop

    @refusing
    def __next__(self) -> Any:
        """The next batch. Between two batches the guard does its work: it judges, saves, goes back, stops.

        Collective. StopIteration: the epoch or the training is over. SystemExit: the ranks stop together, on request.
        """
        if self._passes.state is PassState.NONE:
            self._loop_by_next = iter(self)  # a script may call next() alone
        if self._prober.probe is not None and (batch := self._next_of_probe()) is not NO_BATCH:
            return batch
        self._pass_rehearsal.end()
        if self._passes.over and not self._goes_back():
            if self._pass_rehearsal.due:
                return self._pass_rehearsal.begin()
            self._passes.note_end()
            raise StopIteration
        self._step_in_progress.updates.require_scale()
        self._act(Attend() if self._requests.starting else self._end_step())
        while not self._passes.interrupted:
            if self._end.is_due:
                if self._all_is_well() and self._end_pass(self._end.by_max_steps, final=True):
                    break
                continue
            try:
                if (batch := self._next_of_epoch()) is not NO_BATCH:
                    return batch
            except StopIteration:
                if not self._all_is_well():
                    continue
                if self._passes.replaying:
                    self._passes.cross()
                elif self._end_pass("the end of the data"):
                    break
        raise StopIteration

    def _goes_back(self) -> bool:
        """Whether a pass that is over has batches again: an operator may have asked a complete run to go back."""
        if self._requests.starting and not self._passes.awaits_epoch:
            self._act(Attend())
        return not self._passes.over

    def _next_of_probe(self) -> Any:
        """The next batch of the probe that is under way. `NO_BATCH`: the probe is over, and its answer carried out."""
        if (batch := self._prober.next_batch()) is NO_BATCH:
            self._act(self._prober.end())
        return batch

    def _next_of_epoch(self) -> Any:
        """Do what is due at a step's end, and hand out the next batch. `NO_BATCH`: training may stand elsewhere now."""
        between_steps = self._step_in_progress.first_batch is None
        if self._batches.open_epoch():
            self._step_in_progress.begin_epoch()
        if between_steps:
            if self._unseen.looking:
                self._unseen.at_end()
            self._last.mark_end()
        rehearsed = self._pass_rehearsal.due and self._batches.nothing_is_left()
        if (rehearsed or (between_steps and self._snapshot_due())) and not self._take_snapshot(rehearsed=rehearsed):
            return NO_BATCH
        if between_steps and self._judge.first and not self._all_is_well():
            return NO_BATCH
        if between_steps and self._prober.due:
            return self._prober.begin() if self._all_is_well() else NO_BATCH
        return self._pass_rehearsal.begin() if rehearsed and self._pass_rehearsal.ready else self._hand_out_batch()

    def close(self, *, given_up: bool = False) -> None:
        """End the guard: wait for the disk, report the last incident's end. Not collective; called at exit anyway.

        given_up: the script has given this training up, also where its last batch was the last one of an epoch."""
        if not self._run.leave():
            return
        if given_up:
            self._end.forget()
        if (raised := self._end.raised) is not None and not isinstance(raised, SystemExit):
            self._last.raised(f"rank {self._run.ranks.rank} raised {type(raised).__name__}")
        step = self._step_in_progress
        step.heartbeat.failure_recorder.record_exit()
        self._last.leave()
        if not step.heartbeat.failure_recorder.script_failed:
            self._prober.abandon()
            self._end.close(changed=step.updated, judge=None if self._run.ranks.distributed else self._end_step)
        self._pulse.close()
        step.heartbeat.end(in_hand=raised is not None, unrecorded=self._end.unrecorded)
        self._checkpoints.snapshots.close()
        self._judge.close()
        self._batches.close()
        self._requests.stop.withdraw()
        end_draining(self._checkpoints.drainer)
        if self._run.lock is not None:
            self._run.lock.release()
        atexit.unregister(self.close)  # a process may make many guards, and each holds its model

    # Between two batches -------------------------------------------------------------------------------------------

    def _hand_out_batch(self) -> Any:
        if self._step_in_progress.first_batch is None:
            self._rewinder.hold(wanted=self._judge.screens(self._state.cursor.batch))
        step = self._state.counters.step
        batch = self._batches.read(step, self._judge.timeline, partial(self._step_in_progress.show_batch, "reading"))
        self._prober.keep(step, batch)
        self._end.go_on()
        self._pass_rehearsal.due, self._step_in_progress.heartbeat.empty_pass = False, None
        return self._step_in_progress.hand_out(batch)

    def _end_step(self) -> Decision | None:
        """If the loop's body made an update: count it, judge the update before, and send the beat of this one."""
        step = self._step_in_progress
        if not step.updated:
            for code, text in self._advisor.without_update(step.batches):
                self._run.record.advise(code, text)
            return None
        self._state.fsdp.reshard()
        self._last.note_change()
        if self._rewinder.rehearsing:
            self._rewinder.end_rehearsal()
            return None
        mark, (loss, grad_norm, gauges) = step.finish(), step.readings()
        stop, requests_open = self._requests.stop.requested, self._requests.waiting
        seconds = self._checkpoints.schedule.end_update()
        decision = self._judge.end_step(
            mark, loss, grad_norm, stop=stop, scaler_skipped=step.updates.dropped_by_scaler,
            requests_open=requests_open, gauges=gauges, seconds=seconds, screened=self._rewinder.held is not None,
        )  # fmt: skip
        step.next()
        return decision

    def _all_is_well(self) -> bool:
        """Judge the last step too. False: this led to a rollback, so batches follow."""
        return not self._act(self._judge.settle())

    def _act(self, decision: Decision | None) -> bool:
        """Carry out a decision. True: training is at another position now."""
        match decision:
            case Rewind():
                self._rewind(decision)
                return True
            case Undo():
                self._rewinder.undo(decision)
                return True
            case Attend():
                return self._attend()
            case Halt() if self._may_stop() or not decision.save:
                self._halt(decision)
            case _:  # a stop where no checkpoint may be taken: the next beat says it again
                pass
        return False

    def _attend(self) -> bool:
        """Carry out the requests of operators. True: training is at another position now."""
        if self._requests.starting:
            # Once more: the script may have sharded the model since, exchanged parameters, or registered a hook.
            self._state.check()
            arguments.check_averaging(self._model, self._state.objects)
        moved = False
        while decision := self._requests.carry_out(self.step, may_stop=self._may_stop()):
            moved |= self._act(decision)
        return moved

    def _may_stop(self) -> bool:
        """Collective: whether a run may resume here. No checkpoint has the gradients of an update that has begun."""
        return self._step_in_progress.first_batch is None and self._batches.may_resume_here(between=True)

    # Snapshots -----------------------------------------------------------------------------------------------------

    def _snapshot_due(self) -> bool:
        return self._judge.calm and self._checkpoints.schedule.due(self._judge.beat) and self._batches.may_resume_here()

    def _take_snapshot(self, *, rehearsed: bool) -> bool:
        """Take a snapshot at this step's end, or see to what a rehearsal needs. False: a rollback came first.

        The last step is judged first, so that the sentinel's state in the checkpoint is complete.
        """
        if not self._all_is_well():
            return False
        if rehearsed:
            self._pass_rehearsal.prepare(self._judge.timeline)
        elif self._judge.calm:
            self._end.go_on()
            self._checkpoints.schedule.take_snapshot(self._judge.timeline)
        return True

    # Ends ----------------------------------------------------------------------------------------------------------

    def _end_pass(self, by: str, *, final: bool = False) -> bool:
        """End the pass. False: the final state demanded a rollback, so batches follow."""
        if not self._keep_end(by, left_over=self._step_in_progress.batches):
            return False
        self._passes.end(final=final)
        self._step_in_progress.end_pass()
        if final:
            self._requests.stop.withdraw()  # nobody reads the flag any more: SIGTERM gets its old meaning
            self._end.note_finished()
            self._end.complete()
        return True

    def _keep_end(self, by: str, *, left_over: int, left: bool = False) -> bool:
        self._step_in_progress.show(f"saving at {by}")  # the words by which ranks are told apart whose data end apart
        self._end.keep_state(by, left_over=left_over, left=left)
        while self._checkpoints.manager.ailing is not None:
            if self._act(self._judge.answer_state()):
                return False
            self._end.keep_state(by, left_over=left_over, left=left)  # the finding is left alone, and the state is kept
        self._step_in_progress.heartbeat.turn_to("training")
        return True

    def _halt(self, halt: Halt) -> None:
        if halt.save:
            self._last.mark_end()  # for a death, or the end of the grace, before this state is written
            self._step_in_progress.show("saving")
        code = self._end.stop(halt)
        self._requests.note_stop(self.step)
        self._run.ranks.barrier()
        self._requests.stop.obey()
        self.close()
        told = SystemExit(0 if supervised() else int(code))
        self.departure.note(told)
        raise told

    def _rewind(self, decision: Rewind) -> None:
        """Carry out a plan, which is in the journal."""
        self._step_in_progress.show("rewinding")
        if (halt := self._rewinder.carry_out(decision)) is not None:
            self._act(halt)
            raise AssertionError("a rollback without a checkpoint halts the run")
