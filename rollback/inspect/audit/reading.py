"""Reads everything that the audit needs from a run directory. Changes nothing there."""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rollback.checkpoints.format.manifest import Manifest
from rollback.checkpoints.resume import beyond_the_record
from rollback.checkpoints.tiers import locate
from rollback.errors import RunDirectoryError, UsageError, reporting
from rollback.facts.history import History, fold
from rollback.facts.training import (
    Accepted,
    Answered,
    AttemptStarted,
    Fetched,
    Incident,
    JournalEntry,
    NoLastSnapshot,
    StuckAtExit,
)
from rollback.inspect.audit.metrics import LINES
from rollback.inspect.audit.requests import handed_in
from rollback.rundir import seal
from rollback.rundir.elsewhere import read_elsewhere
from rollback.rundir.evidence import RankEvidence, read_evidence
from rollback.rundir.heartbeats import read_all_heartbeats
from rollback.rundir.identity import Identity, read_identity, require_format
from rollback.rundir.journal.journal import of_kind, of_kinds, read_journal
from rollback.rundir.lock import is_holder_alive
from rollback.rundir.metrics.metric_columns import last_steps, metric_pieces
from rollback.rundir.metrics.metric_lines import Metric, read_last_metrics
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request
from rollback.rundir.skip_records import SkippedBatch, read_skipped
from rollback.system.collector import no_collection
from rollback.system.files import size_of
from rollback.system.processes import is_alive
from rollback.wording import first_few

REMARKS = (Accepted, NoLastSnapshot, Fetched, StuckAtExit)
"""Facts that reports tell of an attempt in words, besides those of how it began and how it ended."""
_SHOWN = 3  # names
_WITH_EVIDENCE = 500  # incidents
_SKIP_RECORD = re.compile(r"rank-([0-9]+)\.jsonl")
_SKIPS = 32 << 20  # bytes of skip records that are read into memory
_Line = TypeVar("_Line")


@dataclass(frozen=True)
class Material:
    directory: str
    identity: Identity | None
    records: list[JournalEntry]
    """The facts of both journals in merged order."""
    history: History
    skipped: dict[int, list[SkippedBatch]] = field(default_factory=dict)
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By attempt, the timeline and step of its last judged step."""
    notices: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    evidence: dict[int, dict[int, RankEvidence]] = field(default_factory=dict)
    """The evidence of each incident, by rank."""
    last_metrics: list[Metric] = field(default_factory=list)
    held: bool = False
    """Whether somebody holds the run directory, or was killed while holding it."""
    abandoned: bool = False
    """Whether who holds the run directory was killed, and no rank is alive."""
    skipped_left_out: bool = False
    """Whether the skip records are too large to be read here."""
    handed_in: Sequence[tuple[str, Request]] = ()
    """Requests that the ranks have not answered, by name."""


_NO_URL = ". What is at a URL `rollback ring list` shows; a run that goes on from it has a run directory of its own"


def require_run_directory(root: Path) -> RunPaths:
    """Paths of a run directory. Raises UsageError where it is missing, RunDirectoryError where it holds no run, and
    RunDoesNotFit where another version of rollback wrote it: what that one records would be passed over in silence."""
    paths = RunPaths(root)
    with reporting(RunDirectoryError, f"opening the run directory {root}"):
        if not root.exists():
            raise UsageError(
                f"there is no run directory {root}",
                hint="`rollback launch` names it at start; by default runs/<script>"
                + (_NO_URL if root.parts[0].endswith(":") else ""),
            )
        if not root.is_dir():
            raise RunDirectoryError(f"{root} is not a directory", hint="give the run directory, not a file inside it")
        marks = (paths.identity, paths.train_journal, paths.supervisor_journal, paths.holder)
        if not any(path.exists() for path in marks):
            raise RunDirectoryError(
                f"{root} is not a run directory: it has neither run.json nor a journal",
                hint="a run directory appears when a guarded job starts; look for runs/<script> where it was launched",
            )
        if (elsewhere := read_elsewhere(paths)) is not None:
            host, directory = elsewhere
            raise RunDirectoryError(
                f"{root} is what one host keeps of a run; its record is on {host}, in {directory}",
                hint=f"give the same command on {host}: rollback ... {directory}",
            )
    require_format(paths)
    return paths


@dataclass(frozen=True)
class Progress:
    """How far each attempt came, by the metrics."""

    by_attempt: dict[int, tuple[int, int]]
    """The timeline and step of its last judged step."""
    notices: list[str]
    """What could not be read, in words."""


@no_collection()
def read_material(root: Path, progress: Progress | None = None) -> Material:
    """Read everything on record about a run, but for its curve. progress: if it is known already.

    Raises UsageError, RunDirectoryError, JournalDamaged, or RunDoesNotFit where another version of rollback wrote it.
    Damaged metrics and skip records become notices, since no run depends on them.
    """
    paths = require_run_directory(root)
    notices: list[str] = []
    records = read_records(paths, notices)
    history = fold(records)
    with contextlib.suppress(OSError, RunDirectoryError):  # of a ring that cannot be read, others tell
        notices += lost_lines(paths, history, [place.manifest for place in locate(paths)])
    identity = read_identity(paths)
    if identity is None:
        notices.append("there is no run.json: the ranks never agreed to start, or it was removed")
    skipped, left_out = _skipped(paths, notices)
    progress = progress or read_progress(paths)
    notices += progress.notices
    incidents = [fact.incident for _, fact in of_kind(records, Incident)]
    if len(incidents) > _WITH_EVIDENCE:
        notices.append(
            f"of {len(incidents):,} incidents, the evidence of the last {_WITH_EVIDENCE} is read; that of others is "
            f"in {paths.incidents}"
        )
    evidence = {number: _evidence(paths, number, notices) for number in incidents[-_WITH_EVIDENCE:]}
    return Material(
        str(root),
        identity,
        records,
        history,
        skipped,
        progress.by_attempt,
        notices,
        evidence,
        read_last_metrics(paths.metrics, LINES),
        paths.holder.exists(),
        _is_abandoned(paths),
        left_out,
        handed_in(paths, {fact.request for _, fact in of_kind(records, Answered)}),
    )


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


def _is_abandoned(paths: RunPaths) -> bool:
    """As far as this host can see: of processes elsewhere nothing is known, so they count as alive."""
    ranks = read_all_heartbeats(paths).values()
    return {is_holder_alive(paths), *(is_alive(rank.pid, rank.host, rank.start) for rank in ranks)} == {"no"}


def _skipped(paths: RunPaths, notices: list[str]) -> tuple[dict[int, list[SkippedBatch]], bool]:
    """The skip records by rank; of a run with many ranks and skips, none, and a notice."""
    ranks = sorted(ranks_with_skips(paths, notices))
    size = sum(size_of(paths.skip_record(rank)) for rank in ranks)
    if size > _SKIPS:
        notices.append(
            f"the skip records of {len(ranks):,} ranks have {size >> 20:,} MiB: which samples were skipped is left out "
            "here; `rollback audit RUN --format csv -o FILE` has them all"
        )
        return {}, True
    return {rank: list(readable(paths.skip_record(rank), read_skipped, notices)) for rank in ranks}, False


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


def read_progress(paths: RunPaths) -> Progress:
    notices: list[str] = []
    return Progress(last_steps(readable(paths.metrics, metric_pieces, notices)), notices)


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


def _evidence(paths: RunPaths, incident: int, notices: list[str]) -> dict[int, RankEvidence]:
    found: dict[int, RankEvidence] = {}
    folder = paths.incident(incident)
    try:
        files = sorted(folder.glob("rank-*.json")) if folder.is_dir() else []
    except OSError as error:
        notices.append(f"{folder}: {error.strerror or error}")
        return {}
    for path in files:
        try:
            evidence = read_evidence(path)
        except (OSError, ValueError) as error:
            what = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else str(error)
            notices.append(f"{path} cannot be read ({what}); what it held is missing here")
            continue
        if path == paths.evidence(incident, evidence.rank) and evidence.incident == incident:
            found[evidence.rank] = evidence
        else:
            notices.append(f"{path} is about another incident or rank; it is left out")
    return found


def ranks_with_skips(paths: RunPaths, notices: list[str]) -> list[int]:
    ranks = []
    try:
        for name in os.listdir(paths.skips) if paths.skips.is_dir() else []:
            if found := _SKIP_RECORD.fullmatch(name):
                ranks.append(int(found[1]))
    except OSError as error:
        notices.append(f"{paths.skips}: {error.strerror or error}")
    return ranks
