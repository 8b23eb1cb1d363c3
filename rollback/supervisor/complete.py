"""Whether a complete run has anything left to start.

For the command that completed the run, nothing is left, and torchrun is not started. With another command the ranks
decide: they go on from the end if the script asks for more.
"""

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from rollback.checkpoints import ring
from rollback.config import Settings
from rollback.errors import RollbackError
from rollback.facts.training import Finished, RunEnded
from rollback.instructions import ADOPTING, LOGS_SPECS, MODULE
from rollback.ring.url.fetch import require_same_run
from rollback.ring.url.index import checkpoint_key, read_indexes
from rollback.ring.url.record import download_beginning_with
from rollback.ring.url.store import Store
from rollback.rundir.identity import read_identity
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Inbox
from rollback.supervisor.claim import EarlierAttempts, read_past
from rollback.supervisor.torchrun.command import LaunchedJob, torchrun_command
from rollback.supervisor.torchrun.redaction import redacted
from rollback.supervisor.torchrun.start_conditions import digest

_ASKED = ("module", "no-python", "nproc-per-node", "nnodes")  # of torchrun's flags; others say how to get there
_READ = 1 << 20  # bytes: a larger file that a command line names is data, and is known by its size and time


def fingerprint(job: LaunchedJob, settings: Settings, salt: str | None) -> str:
    """A hash over script, arguments, settings, and the content of the files that they name.

    salt: the run's, for secret values.
    """
    words = [job.script, *job.arguments]
    flags = {name: value for name, value in job.flags.items() if name in _ASKED}
    asked = [redacted(words, job.secret_args, salt), flags, settings.model_dump(mode="json", exclude_unset=True)]
    found = xxhash.xxh3_128(json.dumps(asked, sort_keys=True).encode())
    for word in words:
        found.update(_content(Path(word.rpartition("=")[2])))
    return found.hexdigest()


def _content(path: Path) -> bytes:
    try:
        status = os.stat(path)
        if path.is_file() and status.st_size <= _READ:
            return path.read_bytes()
        return f"{status.st_size} {status.st_mtime_ns}".encode() if path.is_file() else b""
    except OSError:
        return b""


def nothing_left(
    paths: RunPaths,
    past: EarlierAttempts,
    job: LaunchedJob,
    settings: Settings,
    say: Callable[[str], None],
) -> str | None:
    """The reason in words why nothing is started; None: an attempt may start. Says what differs on a complete run."""
    end = _completed(paths, past, lambda name: ring.is_complete(paths.checkpoint(name)))
    if end is None:
        return None
    told, different = _in_words(end), _difference(past, job, settings)
    if different is not None:
        say(f"{told}. Asked for now: {different}; the ranks go on from there if that is more")
        return None
    say(
        f"{told}; this command has nothing left to do. To go on, ask for more steps or epochs, by an argument or in "
        "the script. Where a variable or an imported file asks for them, which is not looked at here, change a setting "
        "too (--keep 7): then the ranks start, and they know"
    )
    return told


def nothing_left_at(
    store: Store, own: RunPaths, begun: int, job: LaunchedJob, say: Callable[[str], None]
) -> str | None:
    """As `nothing_left`, by the record at the ring's URL: for a node that meets nobody. None also where that record
    cannot be read, or is not all there is, and where the command is another one.

    own: this node's run directory, in which there may be requests. begun: the last attempt that this node knows of.
    """
    with contextlib.suppress(RollbackError, OSError), tempfile.TemporaryDirectory(prefix="rollback-ring-") as made:
        paths = RunPaths(Path(made))
        if indexes := read_indexes(store):
            if (identity := read_identity(own)) is not None:
                require_same_run(store.url, indexes[0], own, identity.run_id)
            download_beginning_with(store, indexes[0], ("run.json", "journal/"), paths.root)
            past = read_past(paths)
            end = _completed(own, past, lambda name: store.size(checkpoint_key(name)) is not None)
            if end is not None and past.last_attempt >= begun and _runs_the_same(past, job):
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
    same = started is not None and started.job == fingerprint(job, settings, started.salt)
    if started and same and started.script == digest(job):  # a module's file is no word of the command
        return None
    return change_in_words(started.command if started else (), redacted(torchrun_command(job), job.secret_args))


def _runs_the_same(past: EarlierAttempts, job: LaunchedJob) -> bool:
    """Whether script and arguments are those that completed the run, by what is the same on all hosts: their flags of
    torchrun are not, nor are the times of their files."""
    own, started = redacted([job.script, *job.arguments], job.secret_args), past.last_start
    return started is not None and started.script == digest(job) and [*started.command[-len(own) :]] == [*own]


def change_in_words(before: Sequence[str], now: Sequence[str]) -> str:
    """What the user asked for otherwise, by torchrun's command lines."""
    (flags_before, before), (flags_now, now) = _flags_and_script(before), _flags_and_script(now)
    gone, new = ([*one - other] for one, other in ((flags_before, flags_now), (flags_now, flags_before)))
    if before != now[: len(before)] and now != before[: len(now)]:  # whole, since a value is nothing without its name
        return f"{shlex.join([*sorted(new), *now])} instead of {shlex.join([*sorted(gone), *before])}"
    new, gone = [*sorted(new), *now[len(before) :]], [*sorted(gone), *before[len(now) :]]
    if gone and new:
        return f"{shlex.join(new)} instead of {shlex.join(gone)}"
    if gone or new:
        return f"the same, {'with' if new else 'without'} {shlex.join(new or gone)}"
    return "the same, with another setting, or with a file that is not what it was"


def _flags_and_script(command: Sequence[str]) -> tuple[set[str], list[str]]:
    """The user's part of torchrun's command line: flags, and the script with its arguments."""
    words = _words(command)
    start = next((place for place, word in enumerate(words) if not word.startswith("-")), len(words))
    flags, script = set(words[:start]), words[start:]
    if script and Path(script[0]).match(ADOPTING):  # `--adopt` put it there, and the word behind it
        return {*flags, f"--adopt={script[1]}"}, script[2:]
    return flags, script


def _words(command: Sequence[str]) -> list[str]:
    words = list(command)
    words = words[words.index(MODULE) + 1 :] if MODULE in words else words
    if (ours := f"--logs-specs={LOGS_SPECS}") in words:  # behind it stands the directory of that attempt
        del words[words.index(ours) : words.index(ours) + 2]
    return words
