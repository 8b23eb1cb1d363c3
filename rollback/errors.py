"""Errors that a user can act on, and the exit codes that scripts may rely on.

Every error says what was being done, to which object, why it failed and what to do next. A bug in rollback is never one
of these errors: it appears as an ordinary Python exception.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")

RefusalKind = Literal["job", "ranks", "command", "settings", "data", "script"]
"""What an error refuses: the job as a whole, its number of ranks, what the command or a call says, a setting, the data,
or what the script does."""


class ExitCode(IntEnum):
    """Exit status of `rollback` commands. The numbers follow sysexits.h where it has one for the case."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_CHECKPOINT = 65
    IN_USE = 73
    IO = 74
    RESUMABLE = 75
    STRUCTURAL = 76
    UNFIT = 78


class RollbackError(Exception):
    """Base of all errors meant for the reader. `hint` says what to do next."""

    exit_code = ExitCode.FAILED
    refuses: RefusalKind = "job"

    def __init_subclass__(cls, exit_code: ExitCode | None = None, refuses: RefusalKind | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code
        if refuses is not None:
            cls.refuses = refuses

    def __init__(
        self, message: str, *, hint: str | None = None, exit_code: int | None = None, refuses: RefusalKind | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = type(self).exit_code if exit_code is None else ExitCode(exit_code)
        self.refuses = refuses or type(self).refuses

    @property
    def fields(self) -> dict[str, Any]:
        """For another process, as JSON: `RollbackError(**fields)` is the error there."""
        hint = None if self.hint is None else encodable(self.hint)
        return {
            "message": encodable(self.message), "hint": hint, "exit_code": int(self.exit_code), "refuses": self.refuses,
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


def encodable(text: str) -> str:
    """A text that any reader of JSON takes: in a name that is no UTF-8 Python has lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def message_of(error: Exception) -> str:
    """Without its hint, for a sentence around it."""
    return error.message if isinstance(error, RollbackError) else str(error)


@contextmanager
def reporting(
    kind: type[RollbackError], doing: str, hint: str | None = None, *, if_forbidden: str | None = None
) -> Iterator[None]:
    """What the system refuses within (OSError) is raised as an error for the reader: `DOING: reason`.

    if_forbidden: the hint where this user lacks a permission."""
    try:
        yield
    except OSError as error:
        hint = if_forbidden or hint if isinstance(error, PermissionError) else hint
        raise kind(f"{doing}: {error.strerror or error}", hint=hint) from error


def may_pass(error: RollbackError) -> bool:
    """Whether it is what the system refused, which may not be so at the next try. What is damaged stays so."""
    return isinstance(error.__cause__, OSError)


class UsageError(RollbackError, exit_code=ExitCode.USAGE, refuses="command"):
    """The command or the call is wrong; nothing was started or written."""


class WrongSetting(UsageError, refuses="settings"):
    """A setting does not fit the others, the data, or what it names. Without a guard it would be left out unasked."""


class DataUnreadable(UsageError, refuses="data"):
    """The script catches what the reading of its data raises. It may have trained for long: no reason to begin anew."""


class ScriptRefused(UsageError, refuses="script"):
    """The ranks refuse what the script does: no guard could keep it. It can run without one."""


EARLY = 100
"""Updates: what is found out about a script by then may end the job, or start it without a guard. There is not much to
lose yet."""


class RunInUse(RollbackError, exit_code=ExitCode.IN_USE):
    """Another live process holds the run directory."""


class NodesMissing(RollbackError, exit_code=ExitCode.RESUMABLE):
    """Other nodes of the job, or their leader, did not come within the waiting time."""


class RunDirectoryError(RollbackError, exit_code=ExitCode.IO):
    """The run directory cannot be read or written."""


class OutputNotWritten(RollbackError, exit_code=ExitCode.IO):
    """A command could not write its output file."""


class RingUnavailable(RollbackError, exit_code=ExitCode.IO):
    """The ring's URL cannot be reached or used."""


class IndexDamaged(RingUnavailable):
    """The ring's URL can be reached, and none of its indexes can be believed."""


class JournalDamaged(RunDirectoryError):
    """A journal line that no crash has torn is damaged."""


BEGIN_ANEW = (
    "the checkpoints can be read all the same (`rollback ring list RUN`): begin a new run with one, by "
    "`rollback ring export RUN newest --dcp OUT` and `rollback launch --run NEW --init OUT ...`"
)
MOVED = "where the run directory was moved, bring it back to what was written here since: cp -au MOVED/. {}/"
"""Both hold a part of the run, and the same command goes on from the whole."""
LINKED = "a link has taken the place of {}, which only a start follows: give the same command again"
RESTORE_THE_JOURNAL = f"restore the file from a copy. If there is none, {BEGIN_ANEW}"


class RunDoesNotFit(RollbackError, exit_code=ExitCode.UNFIT):
    """The run directory belongs to another job: other model, optimizer, world size or data."""


class RanksDoNotFit(RunDoesNotFit, refuses="ranks"):
    """The run directory belongs to this job, and with so many ranks every batch would have other samples."""


class StoppedAsStructural(RollbackError, exit_code=ExitCode.STRUCTURAL):
    """The run was stopped because skipping data did not help, and nothing has changed since."""


class NoUsableCheckpoint(RollbackError, exit_code=ExitCode.NO_CHECKPOINT):
    """The run has a record but no checkpoint that verifies."""


class CheckpointUnusable(RollbackError, exit_code=ExitCode.NO_CHECKPOINT):
    """A checkpoint is of no use here and now. What is damaged is condemned for good, and of the other kinds none."""


class CheckpointDamaged(CheckpointUnusable):
    """A checkpoint fails verification: it goes to quarantine, and an older one is used."""


class CheckpointUnreadable(CheckpointUnusable):
    """The disk refuses to read a checkpoint. The checkpoint may be sound, so another try makes sense."""


class CheckpointLeft(CheckpointUnusable):
    """A host has given its part of a checkpoint up for a newer one, or a ring has. Nothing is wrong with it."""


class CheckpointForbidden(CheckpointUnreadable, exit_code=ExitCode.IO):
    """This user may not read a checkpoint. Nothing speaks against it, and somebody has to act before another try."""


class CheckpointOutOfReach(CheckpointUnreadable, exit_code=ExitCode.RESUMABLE):
    """A host cannot get its copy of a checkpoint: the ring's URL does not answer there, or its disk is full. Nothing
    speaks against the checkpoint, and no other one could be had."""


class StateRefused(RollbackError):
    """An object did not load the state that the checkpoint has of it: mostly the state of an object of another kind."""


LET_IT_BE_READ = (
    "nothing was changed, and the checkpoint may be sound: let the user that runs the job read it (chown, chmod), then "
    "run the same command again; to go on from an older one, move it out of the ring"
)


def unreadable(doing: str, error: OSError) -> CheckpointUnusable:
    """What the system refuses of a checkpoint, as an error for the reader: `DOING: reason`. What is not there, or is
    something else, is damaged; of the rest nobody knows."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        kind: type[CheckpointUnusable] = CheckpointDamaged
    else:
        kind = CheckpointForbidden if isinstance(error, PermissionError) else CheckpointUnreadable
    return kind(f"{doing}: {error.strerror or error}")


@contextmanager
def reading_checkpoint(doing: str) -> Iterator[None]:
    """As `reporting`, with `unreadable`."""
    try:
        yield
    except OSError as error:
        raise unreadable(doing, error) from error


def once_more_if_unreadable(act: Callable[[], _T]) -> _T:
    """What `act` gives. A disk that refuses once must not cost a checkpoint."""
    try:
        return act()
    except CheckpointUnreadable:
        return act()
