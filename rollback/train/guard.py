"""`rollback.Guard`: what the training script holds. It hands out batches, and between them sees to everything else."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rollback.checkpoints import tiers
from rollback.checkpoints.manifest import Manifest
from rollback.config import Settings
from rollback.errors import RollbackError, RunDoesNotFit, UsageError
from rollback.sentinel import Hint
from rollback.train import attach as attaching
from rollback.train import drill
from rollback.train.arguments import check_run, check_trained, sentinel_for, settings_and_objects, whole_number
from rollback.train.comm.pulse import Pulse
from rollback.train.data.batches import Batches
from rollback.train.data.cursor import cursor_for
from rollback.train.data.passes import Again, Passes
from rollback.train.data.prefetch import PrefetchWatch
from rollback.train.data.skips import SkipList
from rollback.train.ending import TrainingEnd
from rollback.train.incidents.evidence import IncidentEvidence
from rollback.train.incidents.judge import Attend, Decision, Halt, Judge, Rewind
from rollback.train.incidents.requests import Requests
from rollback.train.incidents.rollback import Rewinder
from rollback.train.process.heartbeat import SignsOfLife
from rollback.train.process.rehearsal import needs_rehearsal
from rollback.train.process.stopping import StopRequest, end_with_supervisor
from rollback.train.script_side import PassIterator, ScriptSide
from rollback.train.snapshots.buffers import fast_tier
from rollback.train.snapshots.catalogue import Catalogue
from rollback.train.snapshots.draining import at_exit, end_draining, start_draining
from rollback.train.snapshots.manager import CheckpointManager
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.remote import elsewhere_of
from rollback.train.snapshots.schedule import Saver
from rollback.train.snapshots.tier_choice import open_tier
from rollback.train.state.state import Stateful, TrainingState
from rollback.train.step import StepInHand
from rollback.train.updates.advice import NEVER_UPDATED, WITHOUT_UPDATE, Advisor
from rollback.train.updates.optimizer import Updates


class Guard(ScriptSide):
    """Iterate over it instead of the loader; tell it the loss. It resumes, rewinds, skips and records.

        guard = rollback.Guard(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler)
        for batch in guard:
            loss = loss_fn(model(batch))
            loss.backward()
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            guard.observe(loss)

    All ranks must make the guard at the same point, after `init_process_group` and after wrapping the model in DDP,
    and must iterate over it alike. docs/guard.md says more.

    model: a module, plain or in DistributedDataParallel. optimizer: its torch optimizer. loader: a DataLoader, a
    Stateful loader, a callable or an iterable (see `rollback.train.data.cursor`). Anything else that has `state_dict`
    and `load_state_dict` can be handed over by a name of its own (scheduler, scaler, ema, ...) and is kept and restored
    with the rest; it must be the same on all ranks.

    max_steps: end the iteration after so many optimizer updates; default: at the end of the data. run: the run
    directory (default `runs/<script name>`; `rollback launch --run` takes precedence). All settings of
    `rollback.config.Settings` are accepted as keyword arguments; those of the command line take precedence.

    Raises UsageError for what cannot be guarded, RunDoesNotFit for a run directory of another job, RunInUse,
    RunDirectoryError, NoUsableCheckpoint; in all these cases nothing has been changed.
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
            self._ranks = attaching.meet()
            settings, objects = settings_and_objects(others)
            check_trained(model, optimizer)
            check_run(run)
            self._max_steps = None if max_steps is None else whole_number(max_steps, "Guard got max_steps")
            self._attach(model, optimizer, loader, objects, settings, run)
        except RollbackError as error:
            attaching.refuse(error)
        self._watch.max_steps = self._max_steps
        self._hand = StepInHand()
        self._closed = False
        self._process = os.getpid()
        end_with_supervisor()
        atexit.register(self.close)
        at_exit(self.close)
        drill.take_part(self, model)  # does nothing outside of `rollback drill`

    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any,
        objects: dict[str, Stateful],
        settings: Settings,
        run: str | os.PathLike[str] | None,
    ) -> None:
        ranks, sentinel, cursor = self._ranks, sentinel_for(settings), cursor_for(loader)
        self._settings, self._loader = settings, loader
        self._paths = attaching.run_paths(run)
        self._state = TrainingState(model, optimizer, objects, cursor, sentinel)
        self._state.check()  # refuses now what could not be kept later
        self._updates = Updates(optimizer, objects.get("scaler"), model)
        reading, self._lock = attaching.read_run(self._paths, self._state.job(ranks.world_size), ranks, settings)
        try:
            attached = attaching.attach(self._paths, reading, self._state, ranks, settings)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise
        self._stop, self._record = StopRequest(), attached.record
        self._life = SignsOfLife(self._paths, ranks, attached.attempt, cursor)
        tier = open_tier(self._paths, ranks, attached.run_id, tiers.base_of(settings.fast_tier))
        self._drainer = start_draining(self._paths, settings, self._record, ranks)
        slots = fast_tier(tier[0], ranks, attached.slots)
        self._snapshots = Snapshots(self._paths, ranks, attached.next_seq, attached.attempt, slots)
        self._skips = SkipList(self._paths, ranks.rank, attached.history, self._record)
        self._skips.announce(cursor)
        self._evidence = IncidentEvidence(
            self._paths, ranks, attached.attempt, self._state.model, settings.evidence_bytes
        )
        holdings = Catalogue(settings.probation, attached.manifests, attached.history.good)
        away = elsewhere_of(self._paths, ranks, self._record, settings.ring, self._life.turn_to)
        self._keeper = CheckpointManager(
            self._paths, ranks, self._snapshots, holdings, self._record, settings.keep, away
        )
        pulse = Pulse(ranks, next((p.device for p in model.parameters()), torch.device("cpu")))
        self._watch = Judge(
            ranks, settings, pulse, sentinel, self._keeper, self._snapshots, self._record, self._evidence,
            attached.history, cursor.batch, Advisor(self._state.model, optimizer), self._skips,
            finite=self._state.finite,
        )  # fmt: skip
        afresh = settings.accept_data_change or attached.ranks_before is not None
        self._batches = Batches(self._paths, ranks, cursor, self._skips, self._record, afresh=afresh)
        self._prefetch = PrefetchWatch(model, optimizer, self._updates.telltale)
        self._passes = Passes(cursor, objects.values())
        self._rewinder = Rewinder(
            ranks, self._state, self._watch, self._keeper, self._evidence, self._skips, self._passes, self._record,
            attached.restored,
        )  # fmt: skip
        self._requests = Requests(
            self._paths, ranks, self._record, attached.history, self._watch, self._keeper, self._skips, cursor
        )
        self._saver = Saver(
            settings, ranks, self._state, self._snapshots, self._keeper, self._record, tier,
            attached.restored.step if attached.restored else None,
        )  # fmt: skip
        self._end = TrainingEnd(
            self._state, self._saver, self._keeper, self._watch, self._record, attached.history, attached.restored,
            keeps=settings.snapshot_every != 0,
        )  # fmt: skip
        self._rehearsing = needs_rehearsal(model, ranks.world_size, self.step)
        if attached.restored is not None:
            self._passes.resume(left=self._state.counters.epoch_left)

    # What the script uses ------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs from where the run stands up to `count`: `for epoch in guard.epochs(10): for batch in guard: ...`

        All ranks alike. Like `range(count)`, except that a resumed run begins at its epoch and that a rollback over an
        epoch's start goes back to that epoch's body, so that what the script does between epochs is done again as well.
        Raises UsageError where `count` is no whole number, and where a body did not iterate over the guard.
        """
        return self._passes.epochs(whole_number(count, "guard.epochs got count"), self.finish)

    def finish(self, by: str) -> bool:
        """Training ends here, and not at `max_steps` or behind `guard.epochs`; `by`: what says so. All ranks alike.

        False where the last update was judged to demand a return: training stands elsewhere then, and goes on."""
        if self._act(self._end_step()) or not self._all_is_well():
            return False
        left, left_over = self._passes.leave_broken_epoch(), self._hand.batches
        if kept := self._keep_end(by, left_over=left_over, left=left):
            self._end.tell()
        return kept

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: the batches of one epoch, from where the run stands. All ranks alike.

        What it returns is an iterator like any other: it can be taken from in several places of the loop's body.
        """
        match self._passes.begin():
            case Again.RANDOM_STATES:
                self._state.restore_random_states()
            case Again.EVERYTHING:
                self._rewinder.restore_again()
        self._state.cursor.begin_pass()
        for code, text in self._passes.advice():
            self._record.advise(code, text)
        return PassIterator(self)

    def __next__(self) -> Any:
        """The next batch. Between two batches the guard does its work: it judges, saves, goes back, stops.

        Collective. StopIteration: the epoch is over, or all is. SystemExit: the ranks stop together, as they were told.
        """
        try:
            return self._next()
        except (UsageError, RunDoesNotFit) as error:
            attaching.refuse(error, status=1)

    def _next(self) -> Any:
        if not self._passes.begun:
            iter(self)  # a script may call next() alone
        if self._passes.over:
            self._passes.note_end()
            raise StopIteration
        self._act(Attend() if self._requests.starting else self._end_step())
        while not self._passes.interrupted:
            if self._max_steps is not None and self.step >= self._max_steps:
                if self._all_is_well() and self._end_pass(f"max_steps={self._max_steps}", final=True):
                    break
                continue
            try:
                if self._batches.open_epoch():
                    self._state.counters.epoch_left, self._hand.epoch_began = False, True
                if not self._snapshot_due() or self._take_snapshot():
                    return self._take_batch()
            except StopIteration:
                if not self._all_is_well():
                    continue
                if self._passes.replaying:
                    self._passes.cross()
                elif self._end_pass("the end of the data"):
                    break
        raise StopIteration

    def close(self) -> None:
        """End the guard: wait for the disk, say how the last incident ended. Not collective; called at exit anyway."""
        if self._closed or os.getpid() != self._process:
            return  # a loader worker, forked with all that is to be done at exit, is not the rank that ends
        self._closed = True
        if not self._life.raised:
            changed = self._updates.happened or self._updates.dropped_by_scaler
            self._end.close(changed=changed, judge=None if self._ranks.distributed else self._end_step)
        self._watch.end_pulse()
        self._life.end()
        self._snapshots.close()
        self._watch.close()
        self._batches.close()
        self._stop.withdraw()
        end_draining(self._drainer)
        if self._lock is not None:
            self._lock.release()

    # Between two batches -------------------------------------------------------------------------------------------

    def _take_batch(self) -> Any:
        hand, whole = self._hand, self._state.counters.batches_per_step

        def show(doing: str, position: int) -> None:
            self._life.take(doing, self.step, position, hand.first_batch, whole)

        batch = self._batches.next(self.step, self._watch.timeline, lambda position: show("reading", position))
        position = self.batch
        self._end.passed()
        self._prefetch.handed_out()
        hand.take(position)
        show("training", position)
        self._evidence.take(position, batch, self._state.cursor.indices())
        self._updates.expect_backward(last=hand.batches >= whole)
        return batch

    def _end_step(self) -> Decision | None:
        """If the body that has just run made an update: count it, judge the one before, send this one's beat."""
        updates, counters, hand, cursor = self._updates, self._state.counters, self._hand, self._state.cursor
        if not (updates.happened or updates.dropped_by_scaler):
            if hand.batches == WITHOUT_UPDATE:
                self._record.advise(*NEVER_UPDATED)
            return None
        if self._rehearsing:
            self._end_rehearsal()
            return None
        counters.note_update(hand.batches, last_of_epoch=cursor.epoch_end == cursor.batch)
        hints = self._state.note_learning_rate() | (Hint.EPOCH if hand.epoch_began else Hint.NONE)
        habit = updates.end_step(hand.batches)
        mark = hand.mark(counters, cursor, hints, habit)
        self._evidence.end_step(counters.step, hand.losses, updates.gradients)
        norm, skipped = updates.grad_norm if hand.grad_norm is None else hand.grad_norm, updates.dropped_by_scaler
        gauges, stop, asked = updates.gauges(), self._stop.requested, self._requests.waiting
        self._saver.end_update()
        decision = self._watch.end_step(
            mark, hand.mean_loss(), norm, stop=stop, scaler_skipped=skipped, asked=asked, gauges=gauges,
            seconds=self._saver.step_seconds,
        )  # fmt: skip
        counters.step += 1
        self._forget_step(hand.next_phase)
        return decision

    def _end_rehearsal(self) -> None:
        """The step that has just ended does not count: go back, and take it again."""
        self._rehearsing = False
        self._rewinder.restore_again()
        self._passes.rewound(left=self._state.counters.epoch_left)
        self._forget_step()

    def _forget_step(self, phase: str | None = None) -> None:
        self._hand = StepInHand(phase)
        self._updates.forget()

    def _all_is_well(self) -> bool:
        """Judge the last step too. False if that led to a rewind: then there are batches to come."""
        return not self._act(self._watch.settle())

    def _act(self, decision: Decision | None) -> bool:
        """Carry out a decision. Whether training stands elsewhere now."""
        match decision:
            case Rewind():
                self._rewind(decision)
                return True
            case Attend():
                return self._attend()
            case Halt() if self._batches.may_resume_here() or not decision.save:
                self._halt(decision)
            case _:  # told to stop where no checkpoint may be taken: the next step's beat says it again
                pass
        return False

    def _attend(self) -> bool:
        """Do what operators have asked for. Whether training stands elsewhere now."""
        moved = False
        while decision := self._requests.take_up(self.step, may_stop=self._batches.may_resume_here()):
            moved |= self._act(decision)
        return moved

    # Snapshots -----------------------------------------------------------------------------------------------------

    def _snapshot_due(self) -> bool:
        between_steps = self._hand.first_batch is None
        due = between_steps and self._watch.calm and self._saver.due(self._watch.beat)
        return due and self._batches.may_resume_here()

    def _take_snapshot(self) -> bool:
        """Take one at this step's end. False if there turned out to be something more urgent to do.

        The last step is judged first, so that the sentinel's state in the checkpoint is complete.
        """
        if not self._all_is_well():
            return False
        if self._watch.calm:
            self._saver.take(self._watch.timeline)
        return True

    # Ends ----------------------------------------------------------------------------------------------------------

    def _end_pass(self, by: str, *, final: bool = False) -> bool:
        """False if the state at the end turned out to demand a return: then there are batches to come."""
        self._life.show("saving", self.step, self.batch, now=True)
        if not self._keep_end(by, left_over=self._hand.batches):
            return False
        self._passes.end(final=final)
        if final:
            self._stop.withdraw()  # nobody will read the flag any more: SIGTERM means again what it meant before
            self._end.tell()
        self._life.turn_to("training")
        return True

    def _keep_end(self, by: str, *, left_over: int, left: bool = False) -> bool:
        self._end.come(by, left_over=left_over, left=left)
        while self._keeper.ailing is not None:
            if self._act(self._watch.answer_state()):
                return False
            self._end.come(by, left_over=left_over, left=left)  # it is left alone, and kept as it is
        return True

    def _halt(self, halt: Halt) -> None:
        if halt.save:
            self._life.show("saving", self.step, self.batch, now=True)
        code = self._end.stop(halt)
        self._requests.note_stop(self.step)
        self._ranks.barrier()
        self.close()
        raise SystemExit(0 if attaching.supervised() else int(code))

    def _rewind(self, decision: Rewind) -> None:
        """Carry out a plan that is in the journal already."""
        self._life.show("rewinding", self.step, self.batch, now=True)
        reached = self._rewinder.carry_out(decision)
        if not isinstance(reached, Manifest):
            self._act(reached)
            raise AssertionError("a rollback without a checkpoint halts the run")
        self._requests.rewound(decision)
        self._forget_step()
        self._saver.restored(reached.step)
