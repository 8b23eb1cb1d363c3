"""What is refused alike of every Trainer, by a UsageError; and what looks like it, and is left aside."""

from collections.abc import Iterable

from rollback.errors import UsageError
from rollback.train.comm.recorder import say


def require_none_of(cases: Iterable[tuple[object, str, str]]) -> None:
    """What a Trainer is set to do, and a guard cannot go along with. Each case: whether it is so, what, and what to do
    instead."""
    for met, what, instead in cases:
        if met:
            raise UsageError(f"rollback.protect cannot guard this Trainer: {what}", hint=instead)


def say_left_aside(saved: object) -> None:
    """The script hands over what its Trainer has saved in this run, to resume from it.

    Scripts look for the newest of what they have saved, and hand it over where there is one: never when a run begins,
    and always when it goes on. A refusal would end the run at its first crash.
    """
    say(f"the script is to resume from {saved}: this is left aside, since the run goes on from its own checkpoint")
