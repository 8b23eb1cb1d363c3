"""Reads everything that the audit needs from a run directory. Changes nothing there."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from rollback.checkpoints.tiers import locate
from rollback.errors import RunDirectoryError
from rollback.facts.history import History, fold
from rollback.facts.training import Answered, Incident, JournalEntry
from rollback.inspect.record.last_judged import LINES
from rollback.inspect.record.reading import (
    lost_lines,
    read_progress,
    read_records,
    readable,
    require_run_directory,
)
from rollback.rundir.evidence import RankEvidence, read_evidence
from rollback.rundir.heartbeats import read_all_heartbeats
from rollback.rundir.identity import Identity, read_identity
from rollback.rundir.journal.journal import of_kind
from rollback.rundir.lock import is_holder_alive
from rollback.rundir.metrics.metric_lines import Metric, read_last_metrics
from rollback.rundir.paths import RunPaths
from rollback.rundir.requests import Request, handed_in
from rollback.rundir.skip_records import SkippedBatch, read_skipped
from rollback.system.collector import no_collection
from rollback.system.files import size_of
from rollback.system.processes import is_alive

_WITH_EVIDENCE = 500  # incidents
_SKIP_RECORD = re.compile(r"rank-([0-9]+)\.jsonl")
_SKIPS = 32 << 20  # bytes of skip records that are read into memory


@dataclass(frozen=True)
class RunContents:
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
    locked: bool = False
    """Whether somebody holds the run directory, or was killed while holding it."""
    abandoned: bool = False
    """Whether who holds the run directory was killed, and no rank is alive."""
    skipped_left_out: bool = False
    """Whether the skip records are too large to be read here."""
    handed_in: Sequence[tuple[str, Request]] = ()
    """Requests that the ranks have not answered, by name."""


@no_collection()
def read_run_contents(root: Path, progress: dict[int, tuple[int, int]] | None = None) -> RunContents:
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
    progress = read_progress(paths, notices) if progress is None else progress
    incidents = [fact.incident for _, fact in of_kind(records, Incident)]
    if len(incidents) > _WITH_EVIDENCE:
        notices.append(
            f"of {len(incidents):,} incidents, the evidence of the last {_WITH_EVIDENCE} is read; that of others is "
            f"in {paths.incidents}"
        )
    evidence = {number: _evidence(paths, number, notices) for number in incidents[-_WITH_EVIDENCE:]}
    answered = {fact.request for _, fact in of_kind(records, Answered)}
    return RunContents(
        str(root), identity, records, history, skipped, progress, notices, evidence,
        read_last_metrics(paths.metrics, LINES), paths.holder.exists(), _is_abandoned(paths), left_out,
        handed_in(paths, answered),
    )  # fmt: skip


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
