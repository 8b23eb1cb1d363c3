"""The supervisor's journal. It is written only once this job may write to the run directory."""

import contextlib
import threading
from collections.abc import Callable

from rollback.errors import RunDirectoryError
from rollback.facts.training import Fact
from rollback.rundir.journal.journal import Journal, now
from rollback.rundir.paths import RunPaths


class SupervisorJournal:
    """Notes facts of the current attempt. Safe to use from any thread.

    Until `open` is called, the facts stay in memory, with the time of each.

    A journal that cannot be written does not stop the run. The supervisor reports it once and keeps the facts for the
    next try.
    """

    def __init__(self, paths: RunPaths, say: Callable[[str], None]) -> None:
        self.attempt = 0
        self.opened = False
        self._path = paths.supervisor_journal
        self._say = say
        self._journal: Journal | None = None
        self._held: list[tuple[int, str, Fact]] = []
        self._complained = False
        self._lock = threading.Lock()

    def note(self, fact: Fact) -> None:
        with self._lock:
            self._held.append((self.attempt, now(), fact))
            if self.opened:
                self._write()

    def open(self) -> None:
        """From now on facts go to the disk, first the facts in memory."""
        with self._lock:
            if not self.opened:
                self.opened = True
                self._write()

    def _write(self) -> None:
        try:
            if self._journal is None:
                self._journal = Journal(self._path, self.attempt)
            while self._held:
                # The journal keeps what it fails to write, so a fact is handed over once.
                self._journal.attempt, at, fact = self._held.pop(0)
                self._journal.append(fact, at=at)
        except (OSError, RunDirectoryError) as error:
            if not self._complained:
                self._say(f"the journal {self._path} cannot be written ({error}); the run goes on without it")
            self._complained = True
        else:
            self._complained = False

    def close(self) -> None:
        with self._lock:
            if self._journal is not None:
                with contextlib.suppress(OSError):  # what could not be written has been said
                    self._journal.close()
                self._journal = None
            self.opened = False  # what a thread still has to say has come too late
