"""A process beside the supervisor that tells trackers about the run: whatever a tracker does, training goes on.

It hears that the run is over when its standard input ends. The kernel sees to that also where the supervisor is killed,
so that none of it is left behind.
"""

import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from rollback.errors import RollbackError, message_of
from rollback.instructions import program
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.paths import RunPaths
from rollback.system.threads import start_thread

_ERROR = "rollback: error: "
_POLL = 0.1
_PATIENCE = 60.0  # seconds for the last of it to be written, or sent


@contextmanager
def trackers_beside(
    run: Path, flags: Sequence[str], say: Callable[[str], None], told_to_stop: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """`rollback track RUN` runs with these flags meanwhile; without any, nothing does. say: a line for people.
    told_to_stop: how often we were, until now; once more while they end, and they are not waited for any longer."""
    if not flags:
        yield
        return
    again = f"`{shlex.join(['rollback', 'track', str(run), *flags])}` tells them all"
    left = threading.Event()
    with ExitStack() as ends:
        try:
            # Not those that are on record already: the launch that made them has told of them.
            before = fold_journal(RunPaths(run).train_journal).history.last_attempt
            own = ["--until-eof", f"--after-attempt={before}"]
            command = [*program("rollback.__main__"), "track", str(run), *own, *flags]
            errors = ends.enter_context(tempfile.TemporaryFile())
            # A session of its own: a Ctrl-C in the terminal is the supervisor's to act on.
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            # A thread of its own: of a run that takes weeks nobody should learn at its end that it is in no tracker.
            tell = (process, errors, again, say, left)
            told = threading.Thread(target=_tell, args=tell, name="trackers", daemon=True)
            try:
                start_thread(told)
            except RollbackError:
                process.kill()
                process.wait()
                raise
        except (OSError, RollbackError) as error:
            why = getattr(error, "strerror", None) or message_of(error)
            say(f"the trackers cannot be started ({why}); {again}")
        else:
            ends.callback(_let_end, process, told, left, again, say, told_to_stop)
        yield


def _tell(
    process: subprocess.Popen[bytes], errors: IO[bytes], again: str, say: Callable[[str], None], left: threading.Event
) -> None:
    """Say how it ended, as soon as it has, if that was not well and it was not left."""
    status = process.wait()
    if status and not left.is_set():
        errors.seek(0)
        words = _last_words(errors.read().decode(errors="replace")) or f"status {status}"
        say(f"the trackers failed ({words}); the run is not touched; {again}")


def _let_end(
    process: subprocess.Popen[bytes],
    told: threading.Thread,
    left: threading.Event,
    again: str,
    say: Callable[[str], None],
    told_to_stop: Callable[[], int],
) -> None:
    """Tell it that the run is over, and give it time for the last of it."""
    assert process.stdin is not None
    process.stdin.close()
    before, until = told_to_stop(), time.monotonic() + _PATIENCE
    told.join(_POLL)
    while told.is_alive():
        if told_to_stop() == before and time.monotonic() < until:
            told.join(_POLL)
            continue
        left.set()
        process.kill()
        told.join()
        why = f"within {_PATIENCE:.0f} s" if told_to_stop() == before else "when one more stop signal came"
        say(f"the trackers had not ended {why}; {again}")


def _last_words(stderr: str) -> str:
    """The error that the command ended with, without its hint; of a traceback the last line, which has the reason."""
    lines = stderr.strip().splitlines()
    error = next((line.removeprefix(_ERROR) for line in reversed(lines) if line.startswith(_ERROR)), None)
    return error or (lines[-1].strip() if lines else "")
