"""A Trainer of a library under guard: methods of its objects, in whose place ours stand; what all of them refuse."""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from rollback.errors import RollbackError, UsageError
from rollback.train.comm.recorder import say
from rollback.train.guard import Guard
from rollback.train.introspection import is_of_own_file
from rollback.train.run import has_been_here, supervised
from rollback.train.start import attach
from rollback.train.start.arguments import check_run
from rollback.wording import Calls


class GuardedTrainer(ABC):
    """One training of one Trainer; each library has a class of its own. entry: the Trainer's method that trains.
    step_name: by which a script reads how many updates there were. guard: once the training is under way."""

    entry: ClassVar[str]
    step_name: ClassVar[str]
    guard: Guard

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        self._trainer, self._settings = trainer, settings
        self._originals: dict[str, Callable[..., Any]] = {}
        self._owners: dict[str, Any] = {}

    @classmethod
    def protect(cls, trainer: Any, /, *besides: Any, **settings: Any) -> Any:
        """Put a guard into the loop of a Trainer: `rollback.protect(trainer)`. Returns it."""
        if besides:
            raise UsageError(
                f"rollback.protect got a {type(besides[0]).__name__} besides a Trainer",
                hint="a Trainer has its model, optimizer and loader. What else has a state goes by a name: "
                "rollback.protect(trainer, ema=ema)",
            )
        if isinstance(getattr(getattr(trainer, cls.entry), "__self__", None), cls):
            raise UsageError("this Trainer has been given to rollback.protect before", hint="call it once")
        cls.require_known(trainer)
        cls(trainer, settings).install()
        return trainer

    @staticmethod
    @abstractmethod
    def require_known(trainer: Any) -> None:
        """Raises UsageError for what a Trainer is set to do, and a guard cannot go along with."""

    @abstractmethod
    def install(self) -> None:
        """Put ours in the place of the Trainer's methods."""

    def _begin(self, *ends: str, **objects: Any) -> None:
        """Make the guard of the Trainer's objects. ends: see `Guard.name_ends`."""
        self.guard = guard = made_guard(self._settings, **objects)
        guard.without_probes("the Trainer counts every batch as one of its own")
        guard.name_ends(*ends)
        guard.name_calls(Calls("rollback.protect(trainer, ", self.step_name, keep=None))

    def _require_first(self) -> None:
        if hasattr(self, "guard"):
            raise UsageError(
                f"trainer.{self.entry}() a second time: rollback.protect guards one training",
                hint="train with another Trainer, and in a run directory of its own: by a launch for each training "
                '(rollback launch --run DIR), or without launch by rollback.protect(trainer, run="runs/second")',
            )

    def _leave_aside(self, saved: object, given: str, is_of_this_run: bool, to_begin_with_it: str) -> None:
        """The script hands over what its Trainer has saved, to resume from it. Raises UsageError where this run has not
        saved it.

        Scripts look for the newest of what they have saved, and hand it over where there is one: never when a run
        begins, and always when it goes on. A refusal would end the run at its first crash.
        """
        if not is_of_this_run:
            raise UsageError(
                f"trainer.{self.entry}({given}) of a Trainer under rollback.protect",
                hint="leave it out: the same command goes on where the run was. To begin a new run with the weights of "
                f"such a {to_begin_with_it}",
            )
        say(f"the script is to resume from {saved}: this is left aside, since the run goes on from its own checkpoint")

    def _replace(self, owner: Any, *names: str) -> None:
        """`owner` calls what this object has of these names from now on. A name is replaced in one owner only."""
        for name in names:
            self._replace_one(owner, name, getattr(self, name))

    def _replace_one(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self._originals[name], self._owners[name] = getattr(owner, name), owner
        setattr(owner, name, instead)

    def uninstall(self) -> None:
        """The Trainer trains as if it had never been protected."""
        for name, owner in self._owners.items():
            delattr(owner, name)
            if getattr(owner, name) != self._originals[name]:  # that was no method of its class
                setattr(owner, name, self._originals[name])


def made_guard(settings: dict[str, Any], /, **objects: Any) -> Guard:
    """A guard of a library's objects, and of what `rollback.protect` was given besides. Raises UsageError where that
    has the name of one of them; what `Guard` raises besides.

    Scripts make a Trainer for each fold or seed. In one run directory the second one is given the weights of the first,
    and trains only what it has more steps. In a notebook that may be wanted: so it is said.
    """
    if twice := sorted(objects.keys() & settings.keys()):
        raise UsageError(
            f"rollback.protect got {twice[0]}=, a name that the guard has for what protect finds by itself",
            hint="leave it out: a Trainer has it, and what accelerator.prepare() has returned is handed over without a "
            "name. An object of your own goes by another name",
        )
    if os.environ.get("RANK", "0") == "0" and not supervised():  # under a supervisor it is refused
        _tell_where_it_goes_on(settings.get("run"))
    return Guard(**objects, **settings)


def _tell_where_it_goes_on(run: Any) -> None:
    check_run(run)
    paths = attach.run_paths(run)
    if has_been_here(paths) and os.path.lexists(paths.identity):
        say(
            f"this process has trained in {paths.root} before: what is trained now goes on with that run, with its "
            "weights and at its place, and is no new training. For another one (a fold, a seed, a trial) name another "
            'run directory: rollback.protect(..., run="runs/fold-2")'
        )


def require_none_of(cases: Iterable[tuple[object, str, str]]) -> None:
    """What a Trainer is set to do, and a guard cannot go along with. Each case: whether it is so, what, and what to do
    instead."""
    for met, what, instead in cases:
        if met:
            raise UsageError(f"rollback.protect cannot guard this Trainer: {what}", hint=instead)


@contextlib.contextmanager
def refusing(*, status: int = 0) -> Iterator[None]:
    """An error that is ours ends this rank. status: see `attach.refuse`."""
    try:
        yield
    except RollbackError as error:
        attach.refuse(error, status=status)


@contextlib.contextmanager
def replaced(owner: Any, **instead: Any) -> Iterator[None]:
    """Within it an object, or a module, has these in place of its own."""
    own = vars(owner)
    before = {name: own[name] for name in instead if name in own}  # else they are its class's
    own.update(instead)
    try:
        yield
    finally:
        own.update(before)
        for name in instead.keys() - before:
            del own[name]


def named(name: str, items: Iterable[Any]) -> dict[str, Any]:
    """Each by the name that a guard keeps it by: `scheduler`, `scheduler_2`."""
    return {f"{name}_{number}" if number > 1 else name: item for number, item in enumerate(items, 1)}


def attributes_of(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    """What those of the script's own classes hold, by name, for advice: callbacks without a state, of which nothing
    comes back. They may be in no variable of the script's, and make an average when training begins."""
    own = [item for item in callbacks if is_of_own_file(type(item))]
    return [(f"{type(item).__name__}.{name}", held) for item in own for name, held in vars(item).items()]
