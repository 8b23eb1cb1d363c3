"""A process beside the supervisor that tells trackers about the run: whatever a tracker does, training goes on.

It hears that the run is over when its standard input ends. The kernel sees to that also where the supervisor is killed,
so that none of it is left behind.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from rollback.rundir.journal import read_journal
from rollback.rundir.paths import RunPaths

_PATIENCE = 60.0  # seconds for the last of it to be written, or sent


class Beside:
    """While entered, `rollback track RUN` runs with these flags; without any, nothing does. say: a line for people."""

    def __init__(self, run: Path, flags: Sequence[str], say: Callable[[str], None]) -> None:
        self._run, self._flags, self._say = run, list(flags), say
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> Beside:
        if self._flags:
            # Not those that are on record already: the launch that made them has told of them.
            before = [record.attempt for record in read_journal(RunPaths(self._run).train_journal).records]
            own = ["--until-eof", f"--after-attempt={max(before, default=0)}"]
            command = [sys.executable, "-m", "rollback", "track", str(self._run), *own, *self._flags]
            self._errors = tempfile.TemporaryFile()
            # A session of its own: a Ctrl-C in the terminal is the supervisor's to act on.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._errors is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._say(
                f"the trackers took more than {_PATIENCE:.0f} s to end; `rollback track {self._run}` tells them all"
            )
            return
        if status:
            self._errors.seek(0)
            words = self._errors.read().decode(errors="replace").strip().splitlines()[-1:] or [f"status {status}"]
            self._say(f"the trackers failed ({words[0]}); the run did not; `rollback track {self._run}` tells them all")
        self._errors.close()
