"""Errors that a user can act on, and the exit codes that scripts may rely on.

Every error says what was being done, to which object, why it failed and what to do next. A bug in rollback is never one
of these errors: it appears as an ordinary Python exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any


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

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = type(self).exit_code if exit_code is None else ExitCode(exit_code)

    @property
    def fields(self) -> dict[str, Any]:
        """For another process, as JSON: `RollbackError(**fields)` is the error there."""
        return {"message": self.message, "hint": self.hint, "exit_code": int(self.exit_code)}

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


@contextmanager
def reporting(kind: type[RollbackError], doing: str, hint: str | None = None) -> Iterator[None]:
    """What the system refuses within (OSError) is raised as an error for the reader: `DOING: reason`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{doing}: {error.strerror or error}", hint=hint) from error


class UsageError(RollbackError):
    """The command or the call is wrong; nothing was started or written."""

    exit_code = ExitCode.USAGE


class RunInUse(RollbackError):
    """Another live process holds the run directory."""

    exit_code = ExitCode.IN_USE


class NodesMissing(RollbackError):
    """Other nodes of the job, or their leader, did not come within the waiting time."""

    exit_code = ExitCode.RESUMABLE


class RunDirectoryError(RollbackError):
    """The run directory cannot be read or written."""

    exit_code = ExitCode.IO


class OutputNotWritten(RollbackError):
    """A command could not write its output file."""

    exit_code = ExitCode.IO


class RingUnavailable(RollbackError):
    """The ring's URL cannot be reached or used."""

    exit_code = ExitCode.IO


class JournalDamaged(RunDirectoryError):
    """A journal line other than the last is damaged."""


class RunDoesNotFit(RollbackError):
    """The run directory belongs to another job: other model, optimizer, world size or data."""

    exit_code = ExitCode.UNFIT


class StoppedAsStructural(RollbackError):
    """The run was stopped because skipping data did not help, and nothing has changed since."""

    exit_code = ExitCode.STRUCTURAL


class NoUsableCheckpoint(RollbackError):
    """The run has a record but no checkpoint that verifies."""

    exit_code = ExitCode.NO_CHECKPOINT


class CheckpointDamaged(RollbackError):
    """A checkpoint fails verification: it goes to quarantine, and an older one is used."""

    exit_code = ExitCode.NO_CHECKPOINT


class CheckpointUnreadable(CheckpointDamaged):
    """The disk refuses to read a checkpoint. The checkpoint may be sound, so another try makes sense."""
