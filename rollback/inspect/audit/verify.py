"""Checks that the record is what was written, and that it is consistent (`rollback audit --verify`).

First it checks the hash chains. Each journal line has a hash over itself and the chain before it. So the first line
that was changed, added, moved or lost is found, except at the end, where a crash may tear a line. The chain has no
secret in it: it cannot show that somebody has rewritten a journal from some line to its end.

Then it compares the skip records with the journal: every recorded batch must be in a window of the skip list, a batch
that was recorded twice under the same conditions must have the same samples, and every batch that the journal calls
skipped must be in the record of every rank. The lines of the metrics must be those of which their columns were made. No
checkpoint or metrics may be from behind the journal's end: a chain does not show that its end is missing.
"""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from rollback.checkpoints.tiers import locate
from rollback.errors import ExitCode, JournalDamaged, RunDirectoryError
from rollback.facts.history import History, fold
from rollback.facts.training import Attached, JournalEntry, PassedOver, Trouble, Window
from rollback.inspect.audit.passings import CONDITIONS, passings
from rollback.inspect.document import Document, ReportItem
from rollback.inspect.record.reading import lost_lines, merge, require_run_directory
from rollback.rundir import seal
from rollback.rundir.identity import read_identity
from rollback.rundir.journal.journal import examine_journal, of_kind, of_kinds
from rollback.rundir.metrics.column_file import read_blocks
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import WRITING, read_skipped
from rollback.system.durable import open_regular
from rollback.terminal.messages import printable

_Journal = Literal["train", "supervisor"]
_SHOWN = 20  # disagreements of one file; more say nothing new


class Broken(ReportItem):
    """The first line of a journal that is not what was written."""

    line: int = Field(description="from 1")
    byte: int = Field(description="where in the file that line begins")
    reason: str


class JournalState(ReportItem):
    journal: _Journal
    file: str
    lines: int = Field(description="sound ones, from the beginning")
    torn_bytes: int = Field(description="of a last line that a crash tore; no damage")
    chain: str = Field(description="the chain's value after the last sound line: note it, and a rewritten past shows")
    broken: Broken | None
    seal: Literal["none", "sealed", "verified"] = Field(description="of the sound lines; sealed: there is no key here")


class Integrity(Document):
    """Schema of `rollback audit --verify --format json`, version 1; conventions as in the audit."""

    directory: str
    journals: list[JournalState]
    disagreements: list[str] = Field(description="between records that are sound each for itself")

    @property
    def exit_code(self) -> ExitCode:
        """0: sound. 74: a journal is damaged. 1: the journals are sound, and something beside them does not agree."""
        if any(state.broken for state in self.journals):
            return ExitCode.IO
        return ExitCode.FAILED if self.disagreements else ExitCode.DONE


def check_integrity(root: Path) -> Integrity:
    """Check both journals and the skip records of a run. Changes nothing, and does not disturb a running run.

    Raises UsageError, RunDirectoryError, or JournalDamaged where a journal is no regular file.
    """
    paths = require_run_directory(root)
    states, records = [], []
    files: tuple[tuple[_Journal, Path], ...] = (
        ("train", paths.train_journal),
        ("supervisor", paths.supervisor_journal),
    )
    for journal, path in files:
        reading = examine_journal(path)
        damage = reading.damage
        broken = Broken(line=damage.line, byte=damage.byte, reason=damage.reason) if damage else None
        state = JournalState(
            journal=journal, file=str(path), lines=len(reading.records), torn_bytes=reading.torn_bytes,
            chain=reading.chain, broken=broken,
            seal="none" if not reading.seals else "verified" if seal.present() else "sealed",
        )  # fmt: skip
        states.append(state)
        records.append(reading.records)
    disagreements = list(_order(records[0], "train")) + list(_order(records[1], "supervisor"))
    if not any(state.broken for state in states):
        disagreements += _beside(paths, merge(*records))
        disagreements += _shorten(_columns(paths.metrics), "blocks")
    return Integrity(directory=str(root), journals=states, disagreements=disagreements)


def _order(records: list[JournalEntry], journal: str) -> Iterator[str]:
    """Faults in the order of attempts: their numbers may only grow."""
    for before, record in itertools.pairwise(records):
        if record.attempt < before.attempt:
            yield f"journal {journal}, line {record.seq + 1}: attempt {record.attempt} after attempt {before.attempt}"


def _beside(paths: RunPaths, records: list[JournalEntry]) -> list[str]:
    try:
        history = fold(records)
    except JournalDamaged as error:
        return [error.message]
    found = _skips(paths, records, history)
    with contextlib.suppress(OSError, RunDirectoryError):  # of a ring that cannot be read, others tell
        found += lost_lines(paths, history, [place.manifest for place in locate(paths)])
    return found


def _skips(paths: RunPaths, records: list[JournalEntry], history: History) -> list[str]:
    found: list[str] = []
    identity = read_identity(paths)
    passed = [(record.attempt, fact.window) for record, fact in of_kind(records, PassedOver)]
    told = Window.merged(window for _, window in passed)
    ranks_of = {record.attempt: fact.world_size for record, fact in of_kind(records, Attached)}
    listed, conditions = Window.merged(history.skip_list), of_kinds(records, CONDITIONS)
    for window in told:
        if not any(window.first in other and window.last in other for other in listed):
            found.append(f"the skip list does not have all that was passed over: {window.in_words()}")
    troubles = (fact.error for _, fact in of_kind(records, Trouble) if fact.doing == WRITING)
    refused = next(troubles, None)
    for rank in range(max([identity.job.world_size, *ranks_of.values()]) if identity else 0):
        # An attempt may have had fewer ranks than another.
        seen = Window.merged(window for attempt, window in passed if ranks_of.get(attempt, rank + 1) > rank)
        why = "" if refused is None else f" ({WRITING} failed{' on rank 0' if rank else ''}: {refused})"
        found += _shorten(_rank(paths.skip_record(rank), seen, listed, conditions, why), "of this rank")
    return found


def _rank(
    path: Path, told: list[Window], listed: list[Window], conditions: list[JournalEntry], why: str
) -> Iterator[str]:
    """why: the disk did not take a record of this run, as rank 0 alone can tell; empty: nothing is told."""
    known: dict[int, int] = {}
    differing: set[int] = set()
    damaged: list[str] = []
    try:
        for line in read_skipped(path, damaged):
            if Window.holding(listed, line.batch) is None:
                yield f"{path}: batch {line.batch} is in no window of the skip list"
            held = hash(None if line.indices is None else tuple(line.indices))
            if known.setdefault(line.batch, held) != held:
                differing.add(line.batch)
    except (OSError, ValueError) as error:
        yield f"{path}: {getattr(error, 'strerror', None) or error}"
    passed = passings(conditions, sorted(differing))
    for batch in sorted(differing):
        if batch not in passed or passed[batch].alike:
            yield f"{path}: batch {batch} is there twice, with different samples"
    yield from damaged
    seen = Window.merged(Window(first=batch, last=batch) for batch in sorted(known))
    for window in told:
        for gap in _gaps(window, seen):
            yield f"{path}: it does not have {gap.in_words()}, which the ranks passed over{why}"


def _columns(metrics: Path) -> Iterator[str]:
    """Where the metrics are not, byte for byte, the lines of which there are columns."""
    try:
        with open_regular(metrics) as file:
            for block in read_blocks(metrics):
                file.seek(block.start)
                if not block.is_of(file.read(block.length)):
                    last = block.start + block.length - 1
                    yield f"{metrics}: bytes {block.start} to {last} are not the lines of which there are columns"
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        yield f"{metrics}: {getattr(error, 'strerror', None) or error}"


def _gaps(window: Window, seen: list[Window]) -> Iterator[Window]:
    """The parts of a window that are in none of these sorted windows."""
    first = window.first
    for other in seen:
        if other.last < first or other.first > window.last:
            continue
        if other.first > first:
            yield Window(first=first, last=other.first - 1)
        first = other.last + 1
    if first <= window.last:
        yield Window(first=first, last=window.last)


def _shorten(found: Iterator[str], of: str) -> list[str]:
    lines = list(found)
    more = [f"and {len(lines) - _SHOWN} more {of}"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + more


_SEALS = {"none": "", "sealed": ", with a seal that is not verified without its key", "verified": ", seal verified"}


def in_words(found: Integrity) -> str:
    """The result for people. Control characters are escaped."""
    lines = []
    for state in found.journals:
        torn = f", then {state.torn_bytes} bytes of a line that a crash tore" if state.torn_bytes else ""
        lines.append(f"{state.file}: {state.lines} lines sound{_SEALS[state.seal]}{torn}; chain {state.chain}")
        if state.broken:
            where = f"line {state.broken.line} (byte {state.broken.byte})"
            lines.append(f"  BROKEN at {where}: {state.broken.reason}; nothing from there on can be believed")
    lines += [f"DISAGREES: {text}" for text in found.disagreements]
    match found.exit_code:
        case ExitCode.DONE:
            lines.append("sound: the journals are what was written, and the records beside them agree")
        case ExitCode.IO:
            lines.append("damaged: the skip records were not looked at")
        case _:
            lines.append("what is there of the journals was written so; what was recorded beside them does not agree")
    return "\n".join(map(printable, lines))
