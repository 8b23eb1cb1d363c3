"""`rollback.Guard`, for the training script."""

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from rollback.config import Settings
from rollback.errors import RollbackError, RunDoesNotFit, UsageError
from rollback.train import drill
from rollback.train.assembly import assemble
from rollback.train.data.cursor import cursor_for
from rollback.train.data.passes import PassState
from rollback.train.events import RollbackApplied
from rollback.train.process.stopping import at_exit, end_with_supervisor
from rollback.train.start import arguments
from rollback.train.start import attach as attaching
from rollback.train.state.adalora import rank_allocation
from rollback.train.state.kept_values import KeptValues
from rollback.train.state.state import TrainingState
from rollback.train.updates.hooks import weak_hook
from rollback.wording import Calls

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refusing(act: "Callable[Concatenate[Guard, _P], _T]") -> "Callable[Concatenate[Guard, _P], _T]":
    """`act` of a guard, which ends the job and not only the attempt where another one would meet the same error again.
    Behind the end of the rank, or an error in putting a state back, it ends that again. What does not fit in a process
    that has gone back may fit in a new one, in which the script begins anew: its start is refused if it does not."""

    @functools.wraps(act)
    def refusing_act(guard: "Guard", /, *given: _P.args, **others: _P.kwargs) -> _T:
        guard.exit_order.require_none()
        try:
            return act(guard, *given, **others)
        except RollbackError as error:
            may_fit_anew = isinstance(error, RunDoesNotFit) and guard._loop.rewinder.has_gone_back
            if isinstance(error, UsageError | RunDoesNotFit) and not may_fit_anew:
                guard.refuse(error)
            guard.exit_order.note(error)
            raise

    return refusing_act


class Guard:
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
            model, others = arguments.as_called(model), {name: arguments.as_called(it) for name, it in others.items()}
            with ExitStack() as if_refused:
                ranks = attaching.meet()

                def checked() -> tuple[Settings, int | None, TrainingState]:
                    settings, objects = arguments.settings_and_objects(others)
                    sentinel = arguments.sentinel_for(settings)
                    arguments.check_trained(model, optimizer, objects)
                    objects = {**rank_allocation(model), **objects}
                    arguments.check_run(run)
                    end = None if max_steps is None else arguments.whole_number(max_steps, "Guard got max_steps")
                    state = TrainingState(model, optimizer, objects, cursor_for(loader), sentinel)
                    state.check()  # refuses now what could not be kept later
                    return settings, end, state

                settings, end, state = ranks.agreed(checked)
                arguments.check_alike(settings, end, run, ranks)
                arguments.check_wrapped_alike(state.broadcasts, ranks)
                attached = attaching.attach(attaching.run_paths(run), state, ranks, settings)
                self._loop = loop = assemble(attached, state, model, loader, end, if_refused, weak_hook(self.refuse))
                ranks.agreed(functools.partial(end_with_supervisor, weak_hook(loop.last_snapshot.keep)))
                if_refused.pop_all()
                loop.failures.replace_earlier()
        except RollbackError as error:
            attaching.refuse(error)
        self.exit_order = loop.exit_order
        atexit.register(loop.close)
        at_exit(weak_hook(loop.close))
        drill.take_part(loop)  # does nothing outside of `rollback drill`

    # The loop ------------------------------------------------------------------------------------------------------

    @refusing
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
        Behind the last epoch training is over. Raises UsageError where the script loops over the guard again then, also
        by another `guard.epochs`; where `count` is not a whole number, and where a body did not iterate over the guard.
        """
        self._loop.pass_rehearsal.make, self._loop.batches.resumes_between = rehearse, resume_between
        return self._loop.passes.epochs(arguments.whole_number(count, "guard.epochs got count"), self.finish)

    @refusing
    def finish(self, by: str) -> bool:
        """Training ends here, and not at `max_steps` or behind `guard.epochs`; `by`: what says so. All ranks alike. As
        behind `max_steps`, the guard hands out no more batches then.

        False where the last update was judged to demand a return: training stands elsewhere then, and goes on."""
        return self._loop.finish(by)

    @refusing
    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: the batches of one epoch, from the run's position. All ranks alike. The result is an ordinary
        iterator: several places of the loop's body may take from it."""
        self._loop.start_pass()
        batches = PassIterator(self)
        self._loop.step_in_progress.heartbeat.activity.loop = weakref.ref(batches)
        return batches

    @refusing
    def __next__(self) -> Any:
        """The next batch. Between two batches the guard does its work: it judges, saves, goes back, stops.

        Collective. StopIteration: the epoch or the training is over. SystemExit: the ranks stop together, on request.
        """
        if self._loop.passes.state is PassState.NONE:
            self._begun_by_next = iter(self)  # a script may call next() alone
        with self._loop.step_in_progress.asking:
            return self._loop.next_batch()

    def close(self, *, given_up: bool = False) -> None:
        """End the guard: wait for the disk, report the last incident's end. Not collective; called at exit anyway.

        given_up: the script has given this training up, also where its last batch was the last one of an epoch."""
        self._loop.close(given_up=given_up)

    def refuse(self, error: RollbackError) -> NoReturn:
        """End this rank because of `error`, and with it the job: for loops of a library that see what would be an
        error of the script's. Other ranks may wait for this one."""
        self.exit_order.require_none()
        try:
            attaching.refuse(error, status=1)
        except (SystemExit, RollbackError) as told:
            self.exit_order.note(told)
            self.close()  # here it sees why; at the process's end it would take it for the script's own end
            raise

    # What it tells -------------------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float, *, grad_norm: Tensor | float | None = None) -> None:
        """Report the loss of this batch and, if known, the norm of the update's gradient before clipping.

        Call it for every batch, or once for each optimizer update, anywhere in the loop's body. The call does not wait.
        loss: scalar, of this rank. The losses of an update's batches are averaged; they may be divided by the number of
        accumulation steps.
        """
        self._loop.step_in_progress.observe(loss, grad_norm)

    def keep(self, **first: Any) -> KeptValues:
        """Keep values of the script in each checkpoint; a resume and a rollback restore them.

            kept = guard.keep(best=float("inf"), tokens=0)
            ...
            kept.tokens += x.numel()         # in front of loss.backward()

        Call it before the loop, once for each name. `first`: the values of a fresh run. A resumed run has the values of
        its checkpoint at once, or these if the checkpoint does not have the name. Returns the one object with all
        values as attributes. Values are numbers, texts, None, and lists, tuples and dicts of these; a tensor of one
        number becomes that number. A random generator of torch, NumPy or Python is kept too, and an object whose
        `state_dict()` has such values: its `load_state_dict` gets them after each resume and rollback. Each rank has
        its own values, so rank 0 may use a name that others do not. Raises UsageError for any other value, and for a
        name that is already kept; RunDoesNotFit where an object does not load what the checkpoint has by its name.
        """
        try:
            return self._loop.state.kept.add(first)
        except RunDoesNotFit as error:
            self.refuse(error)

    def announce(self, phase: str) -> None:
        """Announce a new phase: other data, another loss. The sentinel learns the new level.

        The phase begins with the update in progress, or with the next one if that update is complete. All ranks should
        announce it; one suffices. After a rollback to before the phase, no new announcement is needed. phase: its name,
        for the record. Raises UsageError where that is no text.
        """
        self._loop.step_in_progress.announce(phase)

    def on_rollback(self, act: Callable[[RollbackApplied], object]) -> None:
        """Call `act(event)` whenever training is put back to a checkpoint: for what the script keeps beside the guard.

        By then all that the guard keeps has been put back. `event.step` and `event.batch` say where training goes on,
        `event.checkpoint` from what, `event.cause` why (`rollback.train.events`). On every rank, with the same event,
        between two batches or at the start of an epoch; several are called in the order in which they were given. A
        resume is none: where it stands is known when the guard is made. What `act` raises ends this rank.
        """
        self._loop.rewinder.subscribers.append(act)

    def without_probes(self, why: str) -> None:
        """Never hand out a probe batch: for loops that count what they are handed. The first time that one would have
        been of use, the journal has the reason."""
        self._loop.prober.refuse(why)

    def without_prefetch_watch(self) -> None:
        """For loops of a library that draw each batch when they train on it: a script may leave batches out there, by
        which an update looks as if it had drawn one of the next."""
        self._loop.step_in_progress.trust_draws()

    def name_ends(self, max_steps: str, epochs: str = "guard.epochs({})") -> None:
        """Say in these words what has ended the training: for loops of a library, whose users have written neither
        `max_steps` nor `guard.epochs`. `{}` in them stands for the number."""
        end, self._loop.passes.epochs_in_words = self._loop.training_end, epochs
        end.max_steps_in_words, end.way_out = max_steps, ""

    def name_calls(self, calls: Calls) -> None:
        """Have advice say what the script's author can type, where `protect` has made this guard."""
        self._loop.run.record.calls = calls

    def watch(self, variables: Sequence[tuple[str, Any]]) -> None:
        """Have advice look at these, too, pairs of a name and a value: for what is in no variable of the script's that
        the guard sees, as the attributes of a Trainer's callback. Advice names those that no checkpoint has."""
        self._loop.advisor.unkept.watch(variables)

    def judge_first(self) -> None:
        """Judge each update before the next batch is handed out, and not beside that batch: for loops that cannot go
        through their next batch where weights are NaN, as one that samples from the model. Each step then waits for the
        sum of what the ranks have told, and on a GPU for the update."""
        self._loop.judge.before_next_batch = True

    # What it asks --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The update in progress: the number of completed ones."""
        return self._loop.state.counters.step

    @property
    def batch(self) -> int:
        """The position in the data stream of the batch in hand (of the next batch, if there is none).

        Batches count from 0 over the whole run; micro-batches of an accumulation count one by one.
        """
        return self._loop.step_in_progress.batch

    @property
    def batch_in_epoch(self) -> int:
        """The position in its epoch of the batch in hand (of the next batch, if there is none): 0 for an epoch's first.

        The number from `enumerate(loader)` in a script without a guard. `enumerate(guard)` begins at 0 even if a
        resumed run goes on in the middle of an epoch, and does not go back in a rollback.
        """
        return max(0, self._loop.state.cursor.offset - self._loop.step_in_progress.behind)

    @property
    def last_in_epoch(self) -> bool:
        """Whether the loader has no further batch in the epoch of the batch in hand.

        Of a loader that is read in order the next batch is read to know it. A loader that draws from the random states
        of the process while it is read draws that batch from a stream of its own.
        """
        return self._loop.state.cursor.is_last()

    @property
    def epoch(self) -> int:
        """The epoch of the batch in hand, from 0."""
        return self._loop.passes.epoch

    @property
    def interrupted(self) -> bool:
        """Whether the pass of `guard.epochs` that has just ended did so to go back to an earlier epoch.

        Its epoch has not come to its end then: what a script does behind an epoch is for another time.
        """
        return self._loop.passes.interrupted

    @property
    def awaits_epoch(self) -> bool:
        """Whether this pass is empty because the run, which has been resumed, stands in a later epoch."""
        return self._loop.passes.awaits_epoch

    @property
    def finished(self) -> bool:
        """Whether training is over: `max_steps` is reached, or `guard.epochs` has come to its end.

        What the script loads from here on, as its best model for a test, is in no checkpoint.
        """
        return self._loop.training_end.is_on_record

    @property
    def script_was_told(self) -> bool:
        """Whether a handler of the script's has got a stop signal while training is not over: if the script leaves its
        loop now, training need not be complete."""
        return self._loop.requests.stop.script_was_told and not self.finished

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._loop.run.paths.root

    # What it asks of a loader --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches in an epoch: `len(loader)`. Raises TypeError where the loader has no length."""
        return len(self._loop.batches.loader)

    def __bool__(self) -> bool:
        return True  # even if the loader is empty or has no length

    @property
    def dataset(self) -> Any:
        """The loader's data set. Raises AttributeError where it has none."""
        return self._loop.batches.loader.dataset

    if not TYPE_CHECKING:  # else a type checker accepts every attribute

        def __getattr__(self, name: str) -> NoReturn:
            batches = getattr(self.__dict__.get("_loop"), "batches", None)
            kind = type(getattr(batches, "loader", None)).__name__
            raise AttributeError(
                f"the guard has no attribute {name!r}; what its loader ({kind}) has, ask of the loader"
            )


class PassIterator:
    """The result of `iter(guard)`: the guard's batches. `iter` of it does not begin another pass."""

    def __init__(self, guard: Iterator[Any]) -> None:
        self._guard = guard

    def __iter__(self) -> "PassIterator":
        return self

    def __next__(self) -> Any:
        return next(self._guard)
