"""The methods of the guard for the script, in the loop's body and elsewhere."""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from torch import Tensor

from rollback.errors import RollbackError, RunDoesNotFit, UsageError
from rollback.train.assembly import GuardAssembly
from rollback.train.events import RollbackApplied
from rollback.train.start.attach import refuse
from rollback.train.state.kept_values import KeptValues
from rollback.wording import Calls

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refusing(act: Callable[_P, _T]) -> Callable[_P, _T]:
    """`act` of a guard, which ends the job and not only the attempt where another one would meet the same error again.
    Other ranks may wait for this one. Behind the end of the rank it ends that again."""

    @functools.wraps(act)
    def refusing_act(*given: _P.args, **others: _P.kwargs) -> _T:
        guard: Any = given[0]
        guard.departure.require_none()
        try:
            return act(*given, **others)
        except (UsageError, RunDoesNotFit) as error:
            refuse_guarded(error, guard)

    return refusing_act


def refuse_guarded(error: RollbackError, guard: Any) -> NoReturn:
    """End this rank because of `error`. Other ranks may wait for this one."""
    guard.departure.require_none()
    try:
        refuse(error, status=1)
    except SystemExit as told:
        guard.departure.note(told)
        guard.close()  # here it sees why; at the process's end it would take it for the script's own end
        raise


class ScriptSide(GuardAssembly):
    """`Guard` without its loop. Nothing here is collective, and nothing waits for the device."""

    # What it tells -------------------------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float, *, grad_norm: Tensor | float | None = None) -> None:
        """Report the loss of this batch and, if known, the norm of the update's gradient before clipping.

        Call it for every batch, or once for each optimizer update, anywhere in the loop's body. The call does not wait.
        loss: scalar, of this rank. The losses of an update's batches are averaged; they may be divided by the number of
        accumulation steps.
        """
        self._step_in_progress.observe(loss, grad_norm)

    def keep(self, **first: Any) -> KeptValues:
        """Keep values of the script in each checkpoint; a resume and a rollback restore them.

            kept = guard.keep(best=float("inf"), tokens=0)
            ...
            kept.tokens += x.numel()         # in front of loss.backward()

        Call it before the loop, once for each name. `first`: the values of a fresh run. A resumed run has the values of
        its checkpoint at once, or these if the checkpoint does not have the name. Returns the one object with all
        values as attributes. Values are numbers, texts, None, and lists, tuples and dicts of these; a tensor of one
        number becomes that number. An object with `state_dict` and `load_state_dict` is kept too: the guard stores such
        values from the former, and gives them to the latter after each resume and rollback. So is a random generator
        of torch, NumPy or Python. Each rank has its own values, so rank 0 may use a name that others do not. Raises
        UsageError for any other value, and for a name that is already kept.
        """
        return self._state.kept.add(first)

    def announce(self, phase: str) -> None:
        """Announce a new phase: other data, another loss. The sentinel learns the new level.

        The phase begins with the update in progress, or with the next one if that update is complete. All ranks should
        announce it; one suffices. After a rollback to before the phase, no new announcement is needed.
        """
        self._step_in_progress.announce(phase)

    def on_rollback(self, act: Callable[[RollbackApplied], object]) -> None:
        """Call `act(event)` whenever training is put back to a checkpoint: for what the script keeps beside the guard.

        By then all that the guard keeps has been put back. `event.step` and `event.batch` say where training goes on,
        `event.checkpoint` from what, `event.cause` why (`rollback.train.events`). On every rank, with the same event,
        between two batches or at the start of an epoch; several are called in the order in which they were given. A
        resume is none: where it stands is known when the guard is made. What `act` raises ends this rank.
        """
        self._rewinder.subscribers.append(act)

    def without_probes(self, why: str) -> None:
        """Never hand out a probe batch: for loops that count what they are handed. The first time that one would have
        been of use, the journal has the reason."""
        self._prober.refuse(why)

    def name_ends(self, max_steps: str, epochs: str = "guard.epochs({})") -> None:
        """Say in these words what has ended the training: for loops of a library, whose users have written neither
        `max_steps` nor `guard.epochs`. `{}` in them stands for the number."""
        self._end.max_steps_in_words, self._passes.epochs_in_words, self._end.way_out = max_steps, epochs, ""

    def name_calls(self, calls: Calls) -> None:
        """Have advice say what the script's author can type, where `protect` has made this guard."""
        self._run.record.calls = calls

    def watch(self, variables: Sequence[tuple[str, Any]]) -> None:
        """Have advice look at these, too, pairs of a name and a value: for what is in no variable of the script's that
        the guard sees, as the attributes of a Trainer's callback. Advice names those that no checkpoint has."""
        self._unkept.watch(variables)

    def judge_first(self) -> None:
        """Judge each update before the next batch is handed out, and not beside that batch: for loops that cannot go
        through their next batch where weights are NaN, as one that samples from the model. Each step then waits for the
        sum of what the ranks have told, and on a GPU for the update."""
        self._judge.first = True

    # What it asks --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The update in progress: the number of completed ones."""
        return self._state.counters.step

    @property
    def batch(self) -> int:
        """The position in the data stream of the batch in hand (of the next batch, if there is none).

        Batches count from 0 over the whole run; micro-batches of an accumulation count one by one.
        """
        return self._step_in_progress.batch

    @property
    def batch_in_epoch(self) -> int:
        """The position in its epoch of the batch in hand (of the next batch, if there is none): 0 for an epoch's first.

        The number from `enumerate(loader)` in a script without a guard. `enumerate(guard)` begins at 0 even if a
        resumed run goes on in the middle of an epoch, and does not go back in a rollback.
        """
        return max(0, self._state.cursor.offset - self._step_in_progress.behind)

    @property
    def last_in_epoch(self) -> bool:
        """Whether the loader has no further batch in the epoch of the batch in hand.

        Of a loader that is read in order the next batch is read to know it. A loader that draws from the random states
        of the process while it is read draws that batch from a stream of its own.
        """
        return self._state.cursor.is_last()

    @property
    def epoch(self) -> int:
        """The epoch of the batch in hand, from 0."""
        return self._passes.epoch

    @property
    def interrupted(self) -> bool:
        """Whether the pass of `guard.epochs` that has just ended did so to go back to an earlier epoch.

        Its epoch has not come to its end then: what a script does behind an epoch is for another time.
        """
        return self._passes.interrupted

    @property
    def awaits_epoch(self) -> bool:
        """Whether the pass has no batches because the run, which goes on, stands in the epoch of a later one."""
        return self._passes.awaits_epoch

    @property
    def finished(self) -> bool:
        """Whether training is over: `max_steps` is reached, or `guard.epochs` has come to its end.

        What the script loads from here on, as its best model for a test, is in no checkpoint.
        """
        return self._end.is_on_record

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._run.paths.root

    # What it asks of a loader --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches in an epoch: `len(loader)`. Raises TypeError where the loader has no length."""
        return len(self._batches.loader)

    def __bool__(self) -> bool:
        return True  # even if the loader is empty or has no length

    @property
    def dataset(self) -> Any:
        """The loader's data set. Raises AttributeError where it has none."""
        return self._batches.loader.dataset

    if not TYPE_CHECKING:  # else a type checker accepts every attribute

        def __getattr__(self, name: str) -> NoReturn:
            kind = type(getattr(self.__dict__.get("_batches"), "loader", None)).__name__
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
