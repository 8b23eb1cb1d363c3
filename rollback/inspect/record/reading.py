"""Reads the journals of a run for a reading command, and says what they lack. Changes nothing there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import beyond_the_record
from rollback.errors import RunDirectoryError, UsageError, reporting
from rollback.facts.history import History
from rollback.facts.training import Accepted, AttemptStarted, Fetched, JournalEntry, NoLastSnapshot, StuckAtExit
from rollback.ring.url.index import index_key
from rollback.rundir import seal
from rollback.rundir.identity import require_format
from rollback.rundir.journal.journal import of_kinds, read_journal
from rollback.rundir.lock import is_holder_alive
from rollback.rundir.metrics.metric_columns import last_steps, metric_pieces
from rollback.rundir.metrics.metric_lines import read_last_metrics
from rollback.rundir.paths import RunPaths
from rollback.rundir.record_location import read_record_location
from rollback.wording import first_few

REMARKS = (Accepted, NoLastSnapshot, Fetched, StuckAtExit)
"""Facts that reports tell of an attempt in words, besides those of how it began and how it ended."""
REMARKS_IN_WORDS = "in words: accepted changes of data or ranks, why there were no last snapshots, and the like"
NODES_IN_WORDS = (
    "in words: spares that took a node's place, what they got from another host's memory, and nodes whose snapshots "
    "were in no other host's memory"
)
_SHOWN = 3  # names
_Line = TypeVar("_Line")
_CLOSED = (
    "give the command as the user that runs the job: others may not read a run, unless it was started with a umask "
    "that lets their group write, such as 007"
)
_NO_URL = ". What is at a URL `rollback ring list` shows; a run that goes on from it has a run directory of its own"


def require_run_directory(root: Path) -> RunPaths:
    """Paths of a run directory. Raises UsageError where it is missing, RunDirectoryError where it holds no run, and
    RunDoesNotFit where another version of rollback wrote it: what that one records would be passed over in silence."""
    paths = RunPaths(root)
    with reporting(RunDirectoryError, f"opening the run directory {root}", if_forbidden=_CLOSED):
        if not root.exists():
            raise UsageError(
                f"there is no run directory {root}",
                hint="by default it is runs/<script>, where `rollback launch` was called"
                + (_NO_URL if root.parts[0].endswith(":") else ""),
            )
        if not root.is_dir():
            raise RunDirectoryError(f"{root} is not a directory", hint="give the run directory, not a file inside it")
        marks = (paths.identity, paths.train_journal, paths.supervisor_journal, paths.holder)
        if not any(path.exists() for path in marks):
            if any((root / index_key(generation)).exists() for generation in (0, 1)):
                raise RunDirectoryError(
                    f"{root} is not a run directory: it is where a ring lies that has a URL",
                    hint=f"name it by that: rollback ring list {root.absolute().as_uri()}",
                )
            raise RunDirectoryError(
                f"{root} is not a run directory: it has neither run.json nor a journal",
                hint="a run directory appears when a guarded job starts; look for runs/<script> where it was launched",
            )
        if (elsewhere := read_record_location(paths)) is not None:
            host, directory = elsewhere
            raise RunDirectoryError(
                f"{root} is what one host keeps of a run; its record is on {host}, in {directory}",
                hint=f"give the same command on {host}: rollback ... {directory}",
            )
    require_format(paths)
    return paths


def lost_lines(paths: RunPaths, history: History, taken: Sequence[Manifest]) -> list[str]:
    """A notice where there is what the ranks' journal must once have named, or none. taken: the checkpoints that are
    there. Nothing else would show that it lacks lines, since those that are left are sound."""
    if is_holder_alive(paths) not in (None, "no"):
        return []  # where its disk takes nothing, it has the lines in its memory
    beyond, last_attempt = beyond_the_record(history, taken), max(history.reached, default=0)
    judged = next(iter(read_last_metrics(paths.metrics, 1)), None)
    if not beyond and judged is not None and judged.attempt > last_attempt:
        beyond = [f"the metrics of attempt {judged.attempt}"]
    if not beyond:
        return []
    journal = paths.train_journal
    how = f"lacks lines: it ends in front of {first_few(beyond, _SHOWN)}"
    if not last_attempt:
        how = f"{'is empty' if journal.exists() else 'is missing'}, and there is {first_few(beyond, _SHOWN)}"
    return [
        f"{journal} {how}. Incidents, what was skipped, and which checkpoints are good are not known from there on. "
        "`rollback launch` goes on from the newest checkpoint as if they were nothing, and says "
        "so: if there is a copy of the journal, put it back before that"
    ]


def read_records(paths: RunPaths, notices: list[str]) -> list[JournalEntry]:
    """Facts of both journals in merged order; a torn tail becomes a notice. Raises as `read_journal`."""
    journals, seals = [], 0
    for path in (paths.train_journal, paths.supervisor_journal):
        reading = read_journal(path)
        if reading.torn_bytes:
            notices.append(torn_notice(path, reading.torn_bytes))
        seals += reading.seals
        journals.append(reading.records)
    notices += seal.in_words(seals)
    return merge(*journals)


def by_attempt(records: Iterable[JournalEntry]) -> dict[int, list[JournalEntry]]:
    found: dict[int, list[JournalEntry]] = {}
    for record in records:
        found.setdefault(record.attempt, []).append(record)
    return found


def torn_notice(path: Path, size: int) -> str:
    return (
        f"{path}: the last line is incomplete ({size} bytes): torn by a crash, or being written at this moment; it is "
        "left out"
    )


def merge(train: Sequence[JournalEntry], supervisor: Sequence[JournalEntry]) -> list[JournalEntry]:
    """Both journals in one order: by attempt; in it `attempt_started`, the ranks' facts, then the supervisor's."""
    started = of_kinds(supervisor, {AttemptStarted})
    others = [record for record in supervisor if type(record.fact) is not AttemptStarted]
    return sorted([*started, *train, *others], key=attrgetter("attempt"))


def read_progress(paths: RunPaths, notices: list[str]) -> dict[int, tuple[int, int]]:
    """By attempt, the timeline and step of its last judged step. notices: gets what could not be read."""
    return last_steps(readable(paths.metrics, metric_pieces, notices))


def readable(path: Path, read: Callable[[Path, list[str]], Iterator[_Line]], notices: list[str]) -> Iterator[_Line]:
    """The sound lines of a record beside the journal. Adds at most one notice about damaged lines, at the end."""
    damaged: list[str] = []
    try:
        yield from read(path, damaged)
    except (OSError, ValueError) as error:
        damaged.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    if damaged:
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        notices.append(f"{damaged[0]}{more}; what it held is missing here")
