"""The run directory before the first attempt: checks it, locks it, and leaves it untouched when a job is refused."""

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints import ring
from rollback.errors import BEGIN_ANEW, RollbackError, RunDirectoryError, RunDoesNotFit, reporting
from rollback.facts.training import AttemptStarted, JournalEntry
from rollback.rundir.identity import read_identity, require_key
from rollback.rundir.journal.folded_journal import FoldedJournal, fold_journal
from rollback.rundir.journal.journal import last_fact, read_journal
from rollback.rundir.lock import HOLDER_LIMIT, RunLock
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import read_small_file, temporary_of
from rollback.wording import first_few


@dataclass(frozen=True)
class EarlierAttempts:
    """The record of earlier attempts in a run directory."""

    train: FoldedJournal
    supervisor: list[JournalEntry]
    run_id: str | None = None
    """Of the run that is there; None: it has not begun."""
    files: tuple[object, ...] = ()
    """What told the journals' files from others before they were read."""

    @property
    def last_attempt(self) -> int:
        return max([self.train.history.last_attempt, *(record.attempt for record in self.supervisor)])

    @property
    def last_start(self) -> AttemptStarted | None:
        return last_fact(self.supervisor, AttemptStarted)

    @property
    def last_guarded_start(self) -> AttemptStarted | None:
        """Of the last attempt that has trained under guard: later ones may have been refused, or made no guard."""
        reached = self.train.history.last_attempt
        return last_fact([record for record in self.supervisor if record.attempt <= reached], AttemptStarted)

    @property
    def seats(self) -> tuple[str, ...]:
        """The nodes with which the job has trained last."""
        return () if self.last_guarded_start is None else self.last_guarded_start.nodes


def read_past(paths: RunPaths, before: EarlierAttempts | None = None) -> EarlierAttempts:
    """Read a run directory, which need not exist. Changes nothing.

    before: what was read before the lock was taken. It is the result where nobody has written since.

    Raises RunDoesNotFit for a directory with other files or another format, JournalDamaged, and RunDirectoryError where
    the directory cannot be read or written.
    """
    with reporting(RunDirectoryError, f"reading the run directory {paths.root}"):
        _require_access(paths)
        _require_run_directory(paths)
    identity = read_identity(paths)
    present = tuple(map(_state_of, (paths.identity, paths.train_journal, paths.supervisor_journal)))
    if before is not None and before.files == present:
        return before
    train, supervisor = fold_journal(paths.train_journal), read_journal(paths.supervisor_journal)
    require_key(paths, train.reading.seals + supervisor.seals)
    return EarlierAttempts(train, supervisor.records, identity.run_id if identity else None, present)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Changes with every write to a file; None: there is none."""
    with reporting(RunDirectoryError, f"looking at {path}"), contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _require_access(paths: RunPaths) -> None:
    nearest = next(path for path in (paths.root, *paths.root.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise RunDirectoryError(
            f"the run directory {paths.root} cannot be used: {nearest} is not a directory",
            hint="name another one with --run DIR",
        )
    journals = paths.train_journal.parent
    for directory in (nearest, paths.ring, paths.ranks, paths.skips, journals, paths.metrics.parent):
        if directory.is_dir() and not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            why, do = f"this user may not read and write {directory}", "change its permissions"
            with contextlib.suppress(OSError):  # of a mount that has gone away
                if os.statvfs(directory).f_flag & os.ST_RDONLY:
                    why, do = f"the disk of {directory} is read-only", "mount it so that it can be written"
            raise RunDirectoryError(
                f"the run directory {paths.root} cannot be used: {why}",
                hint=f"{do}, or name another run directory with --run DIR",
            )


def _require_run_directory(paths: RunPaths) -> None:
    """Raise RunDoesNotFit for a directory with other files."""
    if not paths.root.exists() or paths.identity.exists() or paths.train_journal.parent.exists():
        return
    # An attempt that ended before its ranks had attached may have left these, and a node that waited without a seat.
    ours = (
        paths.lock, paths.holder, temporary_of(paths.holder), paths.ranks, paths.ring, paths.skips,
        temporary_of(paths.identity), paths.metrics.parent, paths.nodes, paths.frozen, paths.record_location,
        temporary_of(paths.record_location),
    )  # fmt: skip
    others = sorted({entry.name for entry in os.scandir(paths.root)} - {path.name for path in ours})
    if any(paths.logs.glob("attempt-*")) and paths.own_names.issuperset(others):
        # Ranks whose run directory is removed train on to their end, and their output is kept where it was.
        anew = f"remove what is left, to begin anew: rm -r {shlex.quote(str(paths.root))}"
        raise RunDoesNotFit(
            f"{paths.root} is what is left of a run directory: run.json and journal/, which are its record, are gone",
            hint="bring them back, as from a copy, and the same command goes on. If there is none, "
            f"{BEGIN_ANEW if ring.names(paths) else anew}; nothing was changed",
        )
    if others:
        raise RunDoesNotFit(
            f"{paths.root} is not a run directory: it has neither run.json nor journal/, but "
            + first_few([*map(repr, others)], 1),
            hint="name a new or empty directory with --run DIR; nothing was changed",
        )


def claim_or_private(paths: RunPaths, private: Path, *, insist: bool) -> "tuple[RunPaths, Claim, RollbackError | None]":
    """The locked run directory; or the private one, and the reason why the run directory cannot be used.

    A script without a guard needs no run directory, and nobody knows yet whether the script has a guard. A script with
    a guard gets the error when it makes the guard. private: a directory that need not exist. insist: raise the error.
    It is also raised where the directory holds a run, since then the script has a guard.
    """
    try:
        return paths, Claim(paths, read_past(paths)), None
    except RollbackError as error:
        if insist or os.path.exists(paths.identity):
            raise
        paths = RunPaths(private)
        return paths, Claim(paths), error


class Claim:
    """Holds the lock of a run directory, which it makes where it is missing.

    Call `release` at the end of a run, or `undo` where the job was refused: the disk is then as it was before. The
    constructor raises RunInUse or RunDirectoryError. before: what was read without the lock.
    """

    def __init__(self, paths: RunPaths, before: EarlierAttempts | None = None) -> None:
        self._paths, self.before = paths, before
        self._run_id = before.run_id if before is not None else None
        self._looked_at: tuple[int, ...] | None = None  # run.json, as it was when it was read last
        with reporting(RunDirectoryError, f"looking at the run directory {paths.root}"):
            self._absent = [path for path in (paths.root, *paths.root.parents) if not path.exists()]
            self._lock_was_there = paths.lock.exists()
        self._stale_holder = _content(paths.holder)
        try:
            self._lock = RunLock(paths, "rollback launch")
        except RunDirectoryError:
            self._remove_what_was_made()
            raise

    def keep(self) -> None:
        """Raises RunInUse, as `RunLock.keep`; and RunDoesNotFit where the directory holds another run than it did: the
        ranks have found none, and begun one."""
        self._lock.keep()
        state = self._looked_at
        with contextlib.suppress(RunDirectoryError):  # of a disk that fails for a moment it is looked at again
            state = _state_of(self._paths.identity)
        if state == self._looked_at:
            return
        present = read_identity(self._paths)
        if present is None:
            return
        self._looked_at = state
        self._run_id = self._run_id or present.run_id
        if present.run_id != self._run_id:
            root = self._paths.root
            raise RunDoesNotFit(
                f"the run directory {root} was moved or removed while the ranks started: they found no run there, and "
                "have begun another one",
                hint="put the earlier one back in its place, and the same command goes on with it; what is there now "
                f"can go: rm -r {shlex.quote(str(root))}",
            )

    def release(self) -> None:
        self._lock.release()

    def undo(self) -> None:
        with contextlib.suppress(OSError):  # of a disk that refuses, and the job is refused for another reason
            if not self._lock_was_there and self._lock.in_place:
                # A contender that waits on the file that vanishes here sees that it is gone and opens the name anew.
                files.unlink(self._paths.lock)
        self._lock.release()
        if self._stale_holder is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # somebody else may hold it already, and have said so
            with contextlib.suppress(OSError), os.fdopen(files.open_file(self._paths.holder, flags), "wb") as file:
                file.write(self._stale_holder)
        self._remove_what_was_made()

    def _remove_what_was_made(self) -> None:
        with contextlib.suppress(OSError):  # it is not there, or somebody else uses it by now
            for path in self._absent:
                path.rmdir()


def _content(holder: Path) -> bytes | None:
    """None where there is no file. A file that is not ours is refused when the lock is taken."""
    try:
        return read_small_file(holder, HOLDER_LIMIT)
    except (OSError, ValueError):
        return None
