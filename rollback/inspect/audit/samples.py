"""The table of skipped samples: one row for each data set sample that a rank skipped, with the reason.

Joined with the data set on `sample`, it shows which data to check. The rows come one at a time from the skip records of
the ranks, so memory does not grow with the number of samples. Only batch numbers are kept, to know which of two lines
about the same batch counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rollback.facts.fact import by_whom
from rollback.facts.history import Case, History, fold
from rollback.facts.training import Incident, JournalEntry, PassedOver, ScreenedOut, Window
from rollback.inspect.audit.contents import ranks_with_skips
from rollback.inspect.audit.passings import CONDITIONS, WindowIndex, counts, passings
from rollback.inspect.record.reading import read_records, readable, require_run_directory
from rollback.rundir.journal.journal import of_kind, of_kinds
from rollback.rundir.skip_records import SkippedBatch, read_skipped

ColumnType = Literal["integer", "number", "text", "flag", "integers"]


class Column(NamedTuple):
    """A column of the table. Every value may be null, except where `says` gives no reason for it."""

    name: str
    type: ColumnType
    says: str


COLUMNS: tuple[Column, ...] = (
    Column("batch", "integer", "position in the data stream"),
    Column("rank", "integer", "the rank that would have read it"),
    Column("sample", "integer", "data set index; null where the data has none (drawn or iterated data)"),
    Column("place", "integer", "position in that rank's batch; null with `sample`"),
    Column("epoch", "integer", "epoch of the batch"),
    Column("offset", "integer", "position of the batch in its epoch"),
    Column("timeline", "integer", "restores that the run had executed when it was passed over"),
    Column("attempt", "integer", "attempt that passed it over; null where a crash took the journal's line"),
    Column("step", "integer", "update in progress then; null as above"),
    Column("at", "text", "when the journal says so, UTC; null as above"),
    Column("by_user", "flag", "whether a window that the user gave contains the batch"),
    Column("incident", "integer", "the latest incident whose window contains it; null where only the user's does"),
    Column("incidents", "integers", "all incidents whose windows contain it"),
    Column("window_first", "integer", "its first batch; without an incident, of the window that was added"),
    Column("window_last", "integer", "its last batch, included"),
    Column("reason", "text", "why: the plan's words, or who gave the window and why"),
    Column("verdict", "text", "of the incident, as are all that follow; null without one"),
    Column("cause", "text", "what was seen to go bad: loss, grad_norm"),
    Column("rule", "text", "the sentinel's rule that fired"),
    Column("value", "number", "what the rule looked at"),
    Column("threshold", "number", "what it was compared with"),
    Column("onset_step", "integer", "first step of the trouble"),
    Column("onset_batch", "integer", "its first batch"),
    Column("detection_step", "integer", "step in which it was called"),
    Column("detection_batch", "integer", "its last batch"),
    Column("escalation", "integer", "rollbacks already spent on this trouble"),
    Column("checkpoint", "text", "what was restored; null where that has not happened"),
    Column("restored_step", "integer", "its step; null as above"),
    Column("outcome", "text", "how the incident ended; `open` until it has"),
)

Row = tuple[Any, ...]
"""Values in the order of COLUMNS."""


@dataclass
class SampleTable:
    """Rows by rank, then in the order of its record."""

    rows: Iterator[Row]
    notices: list[str] = field(default_factory=list)
    """What could not be read. The list is complete after the last row."""


def read_samples(root: Path) -> SampleTable:
    """The table of a run. A batch that was skipped twice, because of a crash, has the rows of its last record, and none
    of ranks that there were only before.

    Raises UsageError, RunDirectoryError or JournalDamaged before the first row; nothing is written.
    """
    paths = require_run_directory(root)
    notices: list[str] = []
    records = read_records(paths, notices)
    history = fold(records)
    reasons = _Reasons(history)
    times, conditions = _Times(records), of_kinds(records, CONDITIONS)

    def rows() -> Iterator[Row]:
        recorded: set[int] = set()
        for rank in sorted(ranks_with_skips(paths, notices)):
            path = paths.skip_record(rank)
            lines: dict[int, int] = {}
            for number, line in enumerate(readable(path, read_skipped, notices)):
                lines[line.batch] = number  # the last line of a batch counts
            last_passed = passings(conditions, sorted(lines))
            recorded.update(lines)
            for number, line in enumerate(readable(path, read_skipped, [])):
                if lines.get(line.batch) == number and counts(last_passed, line.batch, rank):
                    yield from _rows(line, rank, times, reasons)
        told = sum(map(len, times.windows))
        unknown = told - sum(Window.holding(times.windows, batch) is not None for batch in recorded)
        if unknown > 0:
            notices.append(f"{unknown} of {told} batches passed over left no record of what they held: no row for them")

    return SampleTable(rows(), notices)


def _rows(line: SkippedBatch, rank: int, times: "_Times", reasons: "_Reasons") -> Iterator[Row]:
    when, why = times.of(line), reasons.of(line.batch)
    places: Iterable[tuple[int | None, int | None]] = (
        [(None, None)] if line.indices is None else ((sample, place) for place, sample in enumerate(line.indices))
    )
    for sample, place in places:
        yield (line.batch, rank, sample, place, line.epoch, line.offset, line.timeline, *when, *why)


class _Times:
    """When batches were skipped, by the journal: the columns `attempt`, `step` and `at`."""

    def __init__(self, records: Iterable[JournalEntry]) -> None:
        windows: dict[int, list[Window]] = defaultdict(list)
        self._told: dict[int, list[Row]] = defaultdict(list)
        for record, fact in of_kind(records, PassedOver):
            windows[fact.timeline].append(fact.window)
            self._told[fact.timeline].append((record.attempt, fact.step, record.at))
        self._indexes = {timeline: WindowIndex(own) for timeline, own in windows.items()}
        self.windows = Window.merged(window for own in windows.values() for window in own)

    def of(self, line: SkippedBatch) -> Row:
        index = self._indexes.get(line.timeline)
        found = index.holding(line.batch) if index is not None else []
        return self._told[line.timeline][found[-1]] if found else (None, None, None)


class _Reasons:
    """Why a batch was skipped: the columns from `by_user` on."""

    def __init__(self, history: History) -> None:
        skips = [(case, place, window) for case in history.cases for place, window in enumerate(case.skips)]
        self._added, self._in_added = history.added, WindowIndex(fact.window for fact in history.added)
        self._in_skips = WindowIndex(window for _, _, window in skips)
        self._skips = [(case.incident.incident, _of_skip(case, place, window)) for case, place, window in skips]

    def of(self, batch: int) -> Row:
        added = [self._added[place] for place in self._in_added.holding(batch)]
        by_user = any(not fact.by_supervisor for fact in added)
        skips = [self._skips[place] for place in self._in_skips.holding(batch)]
        if skips:
            number, row = skips[-1]
            return (by_user, number, [each for each, _ in skips], *row)
        window: Row = (None, None, None)
        if added:
            fact = added[-1]
            window = (fact.window.first, fact.window.last, by_whom(fact.who, fact.why))
        return (by_user, None, [], *window, *[None] * _OF_INCIDENT)


_OF_INCIDENT = len(COLUMNS) - 1 - next(place for place, column in enumerate(COLUMNS) if column.name == "reason")


def _of_skip(case: Case, place: int, window: Window) -> Row:
    """The columns from `window_first` on, for one of the skips of an incident. What was screened out has a verdict of
    its own."""
    fact, plan, restored = case.incident, case.plan, case.restored
    assert plan is not None
    told: Incident | ScreenedOut = fact if window == plan.skip else case.screened_out[place - bool(plan.skip)]
    reason = plan.reason if told is fact else told.explanation
    return (
        window.first, window.last, reason, told.verdict, told.cause, told.rule, told.value, told.threshold,
        fact.onset_step, fact.onset_batch, fact.detection_step, fact.detection_batch, plan.escalation,
        restored.checkpoint if restored else None, restored.step if restored else None,
        case.outcome.outcome if case.outcome else "open",
    )  # fmt: skip
