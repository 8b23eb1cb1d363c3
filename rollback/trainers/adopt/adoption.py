"""What becomes of a script that is watched: whether it is under guard, and what the guard is told of it.

    loader iterated      if it is trained on, the guard is made here, before the first batch is drawn
    its batches          the guard's
    backward             its scalar is the loss of the batch
    optimizer updates    those of another optimizer than the guard's are a sign that the guard does not see all
    end of the script    the guard ends with it
    a library's Trainer  is given to `rollback.protect` when it begins to train, and has its own guard

A refusal goes the way of all refusals to the supervisor, which starts the script again without us (`--adopt`), or ends
(`--adopt=strict`). Notices that come between two trainings, and those that come late, when starting again would lose
more than it mends, are only said where `--adopt` is not strict.

Which loader is trained on, of what the guard is made, and whether another pass is of the same training, each rank finds
out by itself. The ranks compare that where they iterate a loader that is trained on. A rank that does not come there
trains something else, and ends at its next notice.
"""

import builtins
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from rollback.errors import UsageError
from rollback.source import instrumentation
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import say
from rollback.train.guard import Guard
from rollback.train.updates.optimizer import applies_gradients
from rollback.trainers.adopt import notices
from rollback.trainers.adopt.adoption_state import AdoptionState, ScriptEvent, moved
from rollback.trainers.adopt.enumeration import ScriptProgress, limit, numbered
from rollback.trainers.adopt.epoch_loop import EpochLoop, EpochMoved, in_place_of
from rollback.trainers.adopt.made_objects import Adopted, MadeObjects, guard_parts
from rollback.trainers.adopt.notices import ScriptNotices, inexact
from rollback.trainers.adopt.own_resume import OwnResume
from rollback.trainers.adopt.script_losses import ScriptLosses
from rollback.trainers.adopt.script_pass import OtherBatches, ScriptPass, described
from rollback.trainers.adopt.script_variables import ScriptVariables
from rollback.trainers.adopt.sources import ScriptSources
from rollback.trainers.adopt.step_numbers import ScriptStepLoops, StepMoved
from rollback.trainers.protect import protect_once


class Adoption:
    """Of the script in this rank. strict: late notices end it too. `hooks` calls the methods, on every rank alike."""

    def __init__(self, *, strict: bool) -> None:
        self.made = MadeObjects()
        self.losses = ScriptLosses()
        self._notices = ScriptNotices(strict=strict)
        self._state = AdoptionState.WATCHED
        self._adopted: Adopted | None = None
        self._trains_elsewhere = ""
        """What this rank trains elsewhere, in words."""
        self._guard_iterates = False
        """Whether it is the guard that iterates, not the script."""
        self._progress = ScriptProgress()
        self.own_resume = OwnResume(self._progress, self._notices)
        self._other_loader: Any = None
        """The loader that the last batch came from, where it is not ours."""
        self._loops: dict[tuple[str, int] | None, EpochLoop] = {}
        """Those over epochs that the script has begun last, by where they are."""
        self._passes_before = 0
        """How many passes over its loader Lightning Fabric had counted in front of the training."""
        self._variables = ScriptVariables(self._progress, self._loops, self._notices)
        self._sources = ScriptSources(self._variables.add, self._notices.refuse)
        self._led_loop: EpochLoop | None = None
        """The one that the guard leads."""

    def _move(self, event: ScriptEvent) -> None:
        self._state = moved(self._state, event)

    # The script ------------------------------------------------------------------------------------------------------

    def read_script(self, source: bytes, filename: str) -> CodeType:
        """Compile it, instrumented, as modules that it imports are. Raises SyntaxError as Python does."""
        step_loops = ScriptStepLoops(self._progress, self._variables.count_of, self._sources.demands)
        vars(builtins).update({
            instrumentation.ENUMERATE: partial(numbered, self._progress), instrumentation.NEXT: step_loops.take_batch,
            instrumentation.LIMIT: partial(limit, self._progress), instrumentation.RAISED: self._note_raised,
            instrumentation.EPOCHS: self._epochs, instrumentation.EPOCH_MOVED: EpochMoved,
            instrumentation.BY_BATCH: self._variables.by_batch, instrumentation.BY_EPOCH: self._variables.by_epoch,
            instrumentation.STEPS: step_loops.steps, instrumentation.STEP_MOVED: StepMoved,
        })  # fmt: skip
        self._sources.watch_imports()
        return self._sources.read_script(source, filename)

    def _epochs(self, numbers: Any, filename: str, line: int) -> Any:
        """What the script goes over in place of `numbers`, in the loop of that line."""
        begun = partial(self._loops.__setitem__, (filename, line))
        return in_place_of(numbers, lambda found: EpochLoop(found, begun))[0]

    @property
    def _current_loop(self) -> EpochLoop | None:
        """The loop over epochs that the script is in."""
        return self._loops.get(self._sources.epochs_at())

    def end(self) -> None:
        """The script is through, or leaves its process group. Collective inside a pass; nothing where it raised."""
        raised = sys.exc_info()[1]
        leaves = raised is None or (isinstance(raised, SystemExit) and raised.code in (None, 0))
        state, adopted = self._state, self._adopted
        if state is AdoptionState.LEFT or not leaves:
            return
        if adopted is None:
            if state is AdoptionState.UNGUARDED:
                self._notices.tell_nothing_guarded()
            return
        self._move(ScriptEvent.LEAVES)
        guard, breaks_off = adopted.guard, state is AdoptionState.IN_PASS and not self._progress.limited
        told = self._notices.script_was_told(together=state is AdoptionState.IN_PASS)
        if state is AdoptionState.IN_PASS and not told:
            self._notices.share()
            stays = self._with_guard(guard.finish, "the script's own end of its loop")
            left = f"the script has left its loop by itself, at step {guard.step}"
            if not stays:
                say(f"{left}; its last update was judged to demand a return. The next attempt goes on from there")
                raise SystemExit(1)
            if breaks_off and not self._sources.ends_by_what_is_restored():
                self._notices.say(f"{left}. {notices.LEFT_BEHIND}")
        given_up = told or (state is AdoptionState.ELSEWHERE and bool(self._given_up_by))
        loop = None if breaks_off or given_up or self._sources.ends_by_what_is_restored() else self._led_loop
        if loop is not None and loop.place + 1 < len(loop):
            self._notices.say(notices.left_epochs(loop.place + 1, len(loop)))
        guard.close(given_up=given_up)

    def leave_group(self, original: Callable[..., Any], *given: Any, **others: Any) -> Any:
        """destroy_process_group(group=None)."""
        if self._adopted is not None and {*given, *others.values()} <= {None, torch.distributed.group.WORLD}:
            self.end()
        return original(*given, **others)

    def script_makes_guard(self, original: Callable[..., Any], guard: Guard, **given: Any) -> None:
        """Guard.__init__: a script that has a guard of its own is not adopted."""
        if not self._guard_iterates and self._state is not AdoptionState.LEFT:
            self._move(ScriptEvent.LEAVES)
            self._notices.say("the script makes a guard by itself: --adopt has nothing to do")
        original(guard, **given)

    def library_trains(self, original: Callable[..., Any], trainer: Any, *given: Any, **others: Any) -> Any:
        """`train` or `fit` of a Trainer whose loop `rollback.protect` knows."""
        entry = original.__name__
        if entry in vars(trainer):  # protected
            return original(trainer, *given, **others)
        if self._state is AdoptionState.LEFT or self._adopted is not None:
            self._notices.end_of_guard(f"trains a second time, by {type(trainer).__name__}.{entry}()")
            return original(trainer, *given, **others)
        if getattr(getattr(type(trainer), entry), "__wrapped__", None) is not original:
            self._notices.refuse(notices.trains_by_own_entry(trainer, entry))
        self._move(ScriptEvent.LEAVES)
        return protect_once(trainer, entry)(*given, **others)

    def load(self, original: Callable[..., Any], optimizer: Optimizer, state_dict: Any) -> Any:
        """`Optimizer.load_state_dict`."""
        if self._adopted is None and not self._guard_iterates:  # else a guard loads
            self.own_resume.note_load()
        return original(optimizer, state_dict)

    # Loaders ---------------------------------------------------------------------------------------------------------

    def iterate(self, original: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        """`iter(loader)` of a torch DataLoader."""
        return original(loader) if self._guard_iterates else self.iterate_prepared(original, loader)

    def iterate_counted(self, original: Callable[..., Any], loader: Any) -> Any:
        """`iter(loader)` of a loader that Lightning Fabric has set up: it iterates the script's, behind `set_epoch`.

        Fabric counts the passes, and tells the sampler that count as the epoch. A process that resumes has had none,
        and one that was sent back has had more than the training as it counts.
        """
        if self._led_loop is None:
            self._passes_before = loader._num_iter_calls
        elif self._adopted is not None and loader._dataloader is self._adopted.loader:
            loader._num_iter_calls = self._passes_before + self._led_loop.place
        return original(loader)

    def iterate_prepared(self, original: Callable[..., Any], loader: Any) -> Any:
        """`iter(loader)` of a loader that Accelerate has prepared."""
        if self._adopted is not None and torch.is_grad_enabled():
            self._adopted.guard.exit_order.require_none()
        if self._state is AdoptionState.LEFT or not torch.is_grad_enabled():
            return original(loader)
        whole = self.own_resume.whole(loader, guarded=self._adopted is not None)
        if self._adopted is not None and whole is not self._adopted.loader:
            return OtherBatches(self._note_other_loader, original(loader), loader)
        if self._sources.trains() is False or not self.made.are_trained(in_any_mode=self._sources.sets_mode()):
            return original(loader)
        if self._adopted is None:
            loop = now if (now := self._current_loop) is not None and now.at_first else None
            self._adopted = self._adopt(whole, loop)
            self._move(ScriptEvent.GUARD_MADE)
            if loop is not None:
                self._lead(self._adopted, loop)
        elif (other := self._other_training(self._adopted)) is not None:
            self._notices.end_of_guard(other, self._given_up_by, self._adopted.guard.step)
            self._move(ScriptEvent.LEAVES)
            self._adopted.guard.close(given_up=bool(self._given_up_by))
            if self._led_loop is not None:
                self._led_loop.release()
            return original(loader)
        else:
            self._look_for_schedulers(self._adopted)
        own = self._adopted
        return ScriptPass(partial(self._begin_pass, own), partial(self._next_batch, own), partial(self._go_on, own))

    def _adopt(self, loader: Any, loop: EpochLoop | None) -> Adopted:
        """Make the guard, of all that there is. Collective; ends the ranks where it cannot be."""
        try:
            if self._sources.cycles():
                raise notices.cycled_loader()
            parts = guard_parts(loader, self.made.alive(), loop, strict=self._notices.strict)
            seen = parts.seen(None if loop is None else loop.last)
        except UsageError as error:
            seen = {"refused": {"message": error.message, "hint": error.hint}}
        self._notices.agree(seen)
        try:
            guard, prepared = self._with_guard(parts.make)
        except UsageError as error:
            self._notices.refuse(error)
        self._notices.guard = guard
        self._progress.set_guard(guard)
        self._variables.keep(guard, parts.model, self._sources.step_counts())
        guard.without_probes("the script knows nothing of the guard, and may count its batches")
        notices.speak_of_script(guard)
        if loop is None and (where := self._sources.left_at()) is not None:
            self._notices.say(notices.not_led(where))
        for where, counter in self._sources.counters():
            self._notices.tell_counter(where, counter, here=self._sources.is_here(counter))
        return Adopted(guard, parts.model, parts.optimizer, self.made.schedulers_of(parts.optimizer), loader, prepared)

    def _lead(self, adopted: Adopted, loop: EpochLoop) -> None:
        """Let the guard lead the loop over epochs that the script has just begun. Collective."""
        self._led_loop, begun = loop, Ranks().from_each(loop.first)
        first = adopted.guard.keep(first_epoch=loop.first).first_epoch
        self._notices.agree({"the first epoch of the run": first})
        if {*begun} != {first}:
            self._notices.say(notices.begins_elsewhere(max(begun), first))
        loop.follow(first, {*begun}, partial(self._places, adopted))

    def _other_training(self, adopted: Adopted) -> str | None:
        """Collective, where the guard's loader is trained on again: why that is another training; None: it is not."""
        other = self._trains_elsewhere or None
        if self._led_loop is not None and (self._led_loop.over or self._current_loop is not self._led_loop):
            other = "trains on its loader again, behind its loop over epochs"
        elif adopted.prepared is None and self.made.has_several_optimizers():
            other = "trains on its loader again, with another optimizer"
        self._notices.agree({"another training": other, "the error before it": other and self._given_up_by})
        return other

    def _look_for_schedulers(self, adopted: Adopted) -> None:
        """Whether the script has made one since. Raises RollbackError in a first epoch that begins again: what its body
        makes is kept by the guard of an attempt that begins there."""
        since = [each for each in self.made.schedulers_of(adopted.optimizer) if each not in adopted.schedulers]
        if not since:
            return
        kind, loop = type(since[0]).__name__, self._led_loop
        if loop is not None and loop.place == 0 and loop.again:
            raise notices.scheduler_made_anew(kind)
        what = f"makes a {kind} in its loop over epochs, which the guard does not keep"
        self._notices.note_inexact(what, adopted.guard.step)

    def _places(self, adopted: Adopted, epochs: int) -> Iterator[int]:
        """Of the epochs to come in a loop that is led. Collective."""
        loader = adopted.loader if adopted.prepared is None else adopted.loader.base_dataloader
        rehearse = None if self._sources.gathers_updates() else lambda: next(iter(loader))
        places = adopted.guard.epochs(epochs, rehearse=rehearse)
        try:
            yield from iter(partial(self._with_guard, next, places, None), None)
        except UsageError as error:
            self._notices.refuse(error)

    def _begin_pass(self, adopted: Adopted) -> tuple[Iterator[Any], int]:
        """A pass over the guard: its batches, and the number of its epoch."""
        if (loop := self._led_loop) is not None:
            if loop.taken and not loop.over:
                self._notices.refuse(inexact("goes over its loader more than once in each of its epochs"))
            loop.taken = True
            if adopted.prepared is not None:
                adopted.loader.iteration = loop.place
        if self._progress.untrained:
            self._notices.note_inexact(notices.READS, adopted.guard.step)
        self._progress.note_script_pass(holds=self._sources.gathers_updates())
        self.own_resume.note_script_pass()
        return self._batches_of(adopted), loop.place if loop is not None else 0

    def _next_batch(self, adopted: Adopted, batches: Iterator[Any], epoch: int) -> Any:
        guard = adopted.guard
        self.own_resume.require_trained()
        guard.exit_order.require_none()
        if self._led_loop is not None and self._led_loop.place != epoch:
            self._notices.refuse(inexact("takes the batches of one pass over its loader in several of its epochs"))
        try:
            batch = self._with_guard(next, batches)
        except StopIteration:
            self._move(ScriptEvent.PASS_ENDED)
            self._notices.share()  # here the ranks have just met; at the script's end some might wait long for others
            if guard.interrupted:
                raise EpochMoved from None
            self._progress.note_end()
            raise
        self._other_loader = None
        self._progress.note_batch(guard)
        return batch

    def _go_on(self, adopted: Adopted) -> tuple[Iterator[Any], int] | None:
        """What a script that demands a batch goes on with, where a pass ends early because of us; None: it is told."""
        early = self._led_loop is None and self._progress.falls_short()
        return (self._batches_of(adopted), 0) if early and self._sources.demands() else None

    def _batches_of(self, adopted: Adopted) -> Any:
        """Of another pass over the guard."""
        found = iter(adopted.prepared) if adopted.prepared is not None else self._with_guard(iter, adopted.guard)
        self._move(ScriptEvent.PASS_BEGAN)
        self._progress.note_guard_pass(adopted.guard)
        return found

    def _with_guard(self, call: Callable[..., Any], *given: Any) -> Any:
        """What the guard iterates meanwhile is its own."""
        before, self._guard_iterates = self._guard_iterates, True
        try:
            return call(*given)
        except SystemExit:
            self._move(ScriptEvent.LEAVES)  # the ranks stop together, and the guard is closed
            raise
        finally:
            self._guard_iterates = before

    def _note_other_loader(self, loader: Any) -> None:
        """The script has taken a batch of another loader. Whether it trains on it, backward says."""
        if torch.is_grad_enabled() and self._adopted is not None and self._adopted.model.training:
            self._other_loader = loader

    # Losses and updates ----------------------------------------------------------------------------------------------

    def backward(self, original: Callable[..., Any], tensors: Any, *given: Any, **others: Any) -> Any:
        self._move(ScriptEvent.BACKWARD)
        self._progress.untrained = False
        self.own_resume.note_backward()
        if (adopted := self._adopted) is None or not self._state.guarded:
            return original(tensors, *given, **others)
        if (other := self._other_loader) is not None:
            self._note_inexact(f"trains on two loaders: {described(adopted.loader, other)}", adopted.guard.step)
        if adopted.prepared is not None:  # Accelerate's backward tells the guard
            return original(tensors, *given, **others)
        return self.losses.backward(original, adopted.guard.observe, tensors, *given, **others)

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make an update."""
        adopted = self._adopted
        ours = adopted is not None and optimizer is adopted.optimizer
        if ours:
            self._progress.note_update()
        over = self._state in (AdoptionState.ELSEWHERE, AdoptionState.LEFT)
        if over or (ours and not self._updates_astray()) or not applies_gradients(optimizer):
            return
        if adopted is None:
            self._notices.refuse(notices.updates_without_loop(self._sources.caller()))
        what = f"trains with a second optimizer, {type(optimizer).__name__}, which was not there at the start"
        if ours:
            what = "trains on batches that its loader does not give it one by one: of a list, again, or drawn ahead"
        note = self._notices.note_inexact if ours and self._led_loop is None else self._note_inexact
        note(what, adopted.guard.step)  # without a loop that is led another pass may follow

    def _updates_astray(self) -> bool:
        """Whether the guard's optimizer updates by what came from no pass, where no loop over epochs repeats that."""
        adopted, loop, astray = self._adopted, self._led_loop, self._state is AdoptionState.ASTRAY
        early = adopted is not None and adopted.guard.step == 0 and not self._progress.holds  # it may have a rest
        return astray and adopted is not None and (early or loop is None or loop.over)

    def _note_inexact(self, what: str, step: int) -> None:
        """The script does what the guard cannot keep exact. This rank alone may see it, and calls the guard as the
        others do. Another training is told to them where the guard's loader is iterated next (`_other_training`)."""
        goes_on = self._state is AdoptionState.IN_PASS or (self._led_loop is not None and not self._led_loop.over)
        if goes_on and not self._given_up_by:
            self._notices.note_inexact(what, step)
        else:
            self._notices.end_of_guard(what, self._given_up_by, step)
            self._trains_elsewhere = what
            self._move(ScriptEvent.OTHER_TRAINING)

    def _note_raised(self) -> tuple[()]:
        """An exception leaves a loop that trains. Returns the kinds that the loop is to catch: none."""
        in_pass = self._state is AdoptionState.IN_PASS and self._other_loader is None
        trains = in_pass if self._led_loop is None else self._current_loop is self._led_loop
        if trains:
            self._progress.note_raised()
        return ()

    @property
    def _given_up_by(self) -> str:
        """By which kind of error the script has left the guarded training in its midst; empty: it has not."""
        loop = self._led_loop
        return "" if loop is not None and (loop.over or self._current_loop is loop) else self._progress.raised
