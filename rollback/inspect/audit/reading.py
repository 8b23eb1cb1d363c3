"""Reads everything that the audit needs from a run directory. Changes nothing there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rollback.errors import RunDirectoryError, UsageError, reporting
from rollback.facts.training import AttemptStarted, Incident, JournalEntry
from rollback.inspect.audit.metrics import read_last_metrics
from rollback.rundir import seal
from rollback.rundir.elsewhere import read_elsewhere
from rollback.rundir.evidence import RankEvidence, read_evidence
from rollback.rundir.identity import Identity, read_identity
from rollback.rundir.journal import read_journal
from rollback.rundir.metric_columns import MetricColumns, last_steps, read_metric_columns
from rollback.rundir.paths import RunPaths
from rollback.rundir.records import Metric, SkippedBatch, read_skipped

_Line = TypeVar("_Line")


@dataclass(frozen=True)
class Material:
    """What the audit reads of a run directory."""

    directory: str
    identity: Identity | None
    records: list[JournalEntry]
    """The facts of both journals in merged order."""
    skipped: dict[int, list[SkippedBatch]] = field(default_factory=dict)
    """The skip records by rank."""
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By attempt, the timeline and step of its last judged step."""
    notices: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    evidence: dict[int, dict[int, RankEvidence]] = field(default_factory=dict)
    """The evidence of each incident, by rank."""
    metrics: MetricColumns | None = None
    """All judged steps."""
    last_metrics: list[Metric] = field(default_factory=list)
    """The last few judged steps."""
    held: bool = False
    """Whether somebody holds the run directory, or was killed while holding it."""


def require_run_directory(root: Path) -> RunPaths:
    """Paths of a run directory. Raises UsageError where it is missing, RunDirectoryError where it holds no run."""
    paths = RunPaths(root)
    with reporting(RunDirectoryError, f"opening the run directory {root}"):
        if not root.exists():
            raise UsageError(
                f"there is no run directory {root}",
                hint="`rollback launch` names it at start; by default runs/<script>",
            )
        if not root.is_dir():
            raise RunDirectoryError(f"{root} is not a directory", hint="give the run directory, not a file inside it")
        marks = (paths.identity, paths.train_journal, paths.supervisor_journal, paths.holder)
        if not any(path.exists() for path in marks):
            raise RunDirectoryError(
                f"{root} is not a run directory: it has neither run.json nor a journal",
                hint="a run directory appears when a guarded job starts; look for runs/<script> where it was launched",
            )
        if (elsewhere := read_elsewhere(paths)) is not None and not paths.train_journal.exists():
            host, directory = elsewhere
            raise RunDirectoryError(
                f"{root} is what one host keeps of a run; its record is on {host}, in {directory}",
                hint=f"give the same command on {host}: rollback ... {directory}",
            )
    return paths


def read_material(root: Path) -> Material:
    """Read everything on record about a run.

    Raises UsageError, RunDirectoryError, JournalDamaged, or RunDoesNotFit where another version of rollback wrote it.
    Damaged metrics and skip records become notices, since no run depends on them.
    """
    paths = require_run_directory(root)
    notices: list[str] = []
    records = read_records(paths, notices)
    identity = read_identity(paths)
    if identity is None:
        notices.append("there is no run.json: the ranks never agreed to start, or it was removed")
    skipped = {
        rank: list(readable(paths.skip_record(rank), read_skipped, notices))
        for rank in sorted(ranks_with_skips(paths, notices))
    }
    metrics = _metrics(paths, notices)
    incidents = [record.fact.incident for record in records if isinstance(record.fact, Incident)]
    evidence = {number: _evidence(paths, number, notices) for number in incidents}
    return Material(
        str(root),
        identity,
        records,
        skipped,
        last_steps(metrics),
        notices,
        evidence,
        metrics,
        read_last_metrics(paths),
        paths.holder.exists(),
    )


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
    """Journal entries by attempt."""
    found: dict[int, list[JournalEntry]] = {}
    for record in records:
        found.setdefault(record.attempt, []).append(record)
    return found


def torn_notice(path: Path, size: int) -> str:
    """The notice about a journal whose last line is incomplete."""
    return (
        f"{path}: the last line is incomplete ({size} bytes): torn by a crash, or being written at this moment; it is "
        "left out"
    )


def merge(train: Iterable[JournalEntry], supervisor: Iterable[JournalEntry]) -> list[JournalEntry]:
    """Both journals in one order: by attempt; in it `attempt_started`, the ranks' facts, then the supervisor's."""
    keyed = [((record.attempt, 1), record) for record in train]
    keyed += [((r.attempt, 0 if isinstance(r.fact, AttemptStarted) else 2), r) for r in supervisor]
    return [record for _, record in sorted(keyed, key=lambda pair: pair[0])]


def _metrics(paths: RunPaths, notices: list[str]) -> MetricColumns:
    damaged: list[str] = []
    try:
        metrics = read_metric_columns(paths.metrics, damaged)
    except (OSError, ValueError) as error:
        damaged.append(f"{paths.metrics}: {getattr(error, 'strerror', None) or error}")
        metrics = read_metric_columns(paths.root / "nothing", [])
    _note_damage(damaged, notices)
    return metrics


def readable(path: Path, read: Callable[[Path, list[str]], Iterator[_Line]], notices: list[str]) -> Iterator[_Line]:
    """The sound lines of a record beside the journal. Adds at most one notice about damaged lines, at the end."""
    damaged: list[str] = []
    try:
        yield from read(path, damaged)
    except (OSError, ValueError) as error:
        damaged.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    _note_damage(damaged, notices)


def _note_damage(damaged: list[str], notices: list[str]) -> None:
    """At most one notice about the damaged lines of a file."""
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
    """The ranks that have a skip record."""
    ranks = []
    try:
        for path in paths.skips.glob("rank-*.jsonl") if paths.skips.is_dir() else []:
            number = path.stem.removeprefix("rank-")
            if number.isdecimal():
                ranks.append(int(number))
    except OSError as error:
        notices.append(f"{paths.skips}: {error.strerror or error}")
    return ranks
