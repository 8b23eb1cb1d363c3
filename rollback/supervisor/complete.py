"""Whether a complete run has anything left to start.

For the command that completed the run, nothing is left, and torchrun is not started. With another command the ranks
decide: they go on from the end if the script asks for more.
"""

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from rollback.checkpoints import ring
from rollback.config import Settings
from rollback.errors import RollbackError
from rollback.facts.training import Finished, RunEnded
from rollback.ring.url.fetch import require_same_run
from rollback.ring.url.index import checkpoint_key, read_indexes
from rollback.ring.url.record import download_beginning_with
from rollback.ring.url.store import Store
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Inbox
from rollback.supervisor.claim import EarlierAttempts, read_past
from rollback.supervisor.torchrun.command import LaunchedJob, LaunchOptions
from rollback.supervisor.torchrun.redaction import redacted
from rollback.supervisor.torchrun.start_conditions import conditions_of, differences, job_digest, script_digest


def nothing_left(options: LaunchOptions, past: EarlierAttempts, say: Callable[[str], None]) -> str | None:
    """The reason in words why nothing is started; None: an attempt may start. Says what differs on a complete run."""
    paths = options.paths
    end = _completed(paths, past, lambda name: ring.is_complete(paths.checkpoint(name)))
    if end is None:
        return None
    told, different = _in_words(end), _difference(past, options.job, options.settings)
    if different is not None:
        say(f"{told}. What differs now: {different}; the ranks go on from there if that is more")
        return None
    say(
        f"{told}; this command has nothing left to do. To go on, ask for more steps or epochs, by an argument or in "
        "the script. What an environment variable or an imported file asks for is not seen here: then change a setting "
        "too (--keep 7), and the ranks start and look"
    )
    return told


def nothing_left_at(store: Store, options: LaunchOptions, begun: int, say: Callable[[str], None]) -> str | None:
    """As `nothing_left`, by the record at the ring's URL: for a node that meets nobody. None also where that record
    cannot be read, or is not all there is, and where the command is another one.

    In this node's run directory there may be requests. begun: the last attempt that this node knows of.
    """
    own = options.paths
    with contextlib.suppress(RollbackError, OSError), tempfile.TemporaryDirectory(prefix="rollback-ring-") as made:
        paths = RunPaths(Path(made))
        if indexes := read_indexes(store):
            if (identity := read_identity(own)) is not None:
                require_same_run(store.url, indexes[0], own, identity.run_id)
            download_beginning_with(store, indexes[0], ("run.json", "journal/"), paths.root)
            past = read_past(paths)
            end = _completed(own, past, lambda name: store.size(checkpoint_key(name)) is not None)
            if end is not None and past.last_attempt >= begun and _runs_the_same(past, options.job):
                say(f"{(told := _in_words(end))}; no other host is there, and this command has nothing left to do")
                return told
    return None


def _in_words(end: Finished) -> str:
    return f"the run is complete: trained to step {end.step}, final state {end.checkpoint}"


def _completed(paths: RunPaths, past: EarlierAttempts, is_there: Callable[[str], bool]) -> Finished | None:
    """The end of a run that a supervisor saw; None where something happened after it, or a request is open.

    paths: where requests are. is_there: whether there is a checkpoint of that name.
    """
    history = past.train.history
    last = past.supervisor[-1] if past.supervisor else None
    if last is None or not isinstance(last.fact, RunEnded) or last.fact.exit_code != 0 or history.final is None:
        return None
    later = history.last_attempt > last.attempt
    if later or not is_there(history.final) or Inbox(paths, history.answers).open(now=True):
        return None
    return history.finished


def _difference(past: EarlierAttempts, job: LaunchedJob, settings: Settings) -> str | None:
    """How the order differs from the one that completed the run; None: it does not."""
    started = past.last_start
    if started is None:
        return "another command"
    conditions = conditions_of(job, {}, started.salt)
    if started.job == job_digest(job, settings, started.salt) and started.script == conditions["script"]:
        return None  # a module's file is no word of the command
    now = started.model_copy(update={**conditions, "environment": started.environment})
    return "; ".join(differences(started, now)) or "another command, another setting, or a file that is not what it was"


def _runs_the_same(past: EarlierAttempts, job: LaunchedJob) -> bool:
    """Whether script and arguments are those that completed the run, by what is the same on all hosts: their flags of
    torchrun are not, nor are the times of their files."""
    own, started = redacted([job.script, *job.arguments], job.secret_args), past.last_start
    return started is not None and started.script == script_digest(job) and [*started.command[-len(own) :]] == [*own]
