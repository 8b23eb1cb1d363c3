"""The report's tables of attempts, checkpoints, skip windows and messages. Pure but for the stacks, which it reads."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollback.facts.ring import Drained
from rollback.facts.supervisor import Hung
from rollback.facts.training import JournalEntry
from rollback.inspect.audit.report import AttemptEntry, AuditReport, CheckpointEntry
from rollback.inspect.audit.requests import asked_in_words, fate_in_words
from rollback.inspect.why.why import read_process_stacks
from rollback.rundir.journal.journal import of_kind
from rollback.rundir.paths import RunPaths
from rollback.terminal.quantities import at_least, duration, number

_MOST = 200  # rows of a table
_STACK = 1 << 15  # characters of the stacks of one process
_STACKS = 12


@dataclass(frozen=True)
class Block:
    """A section of the page: a table and texts below it. numbers: headings of the columns that hold numbers."""

    anchor: str
    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    count: str
    note: str
    numbers: Sequence[str] = ()
    texts: Sequence[tuple[str, str]] = ()


def blocks(audit: AuditReport, records: Sequence[JournalEntry], paths: RunPaths) -> Iterator[Block]:
    """All sections that have something to say."""
    yield _attempts(audit, records, paths)
    drained = {fact.checkpoint: fact for _, fact in of_kind(records, Drained)}
    yield _checkpoints(audit.checkpoints, drained, paths)
    if audit.user_windows or audit.requests:
        yield _asked(audit)
    if audit.noticed or audit.probes or audit.phases or audit.scaler_skipped:
        yield _left_alone(audit)
    messages = [("advice", m) for m in audit.advice] + [("trouble", m) for m in audit.troubles]
    if messages:
        rows = [[kind, m.subject, m.text, str(m.attempt)] for kind, m in messages]
        yield _cut("advice", "Advice and troubles", ["kind", "about", "what", "attempt"], rows, numbers=["attempt"])


def _cut(
    anchor: str, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, count: int | None = None,
    note: str = "", **more: Any,
) -> Block:  # fmt: skip
    """A block whose table is not longer than people read. count: of what it is about; None: each has a row."""
    if len(rows) > _MOST:
        note = f"{note} The last {_MOST} of {len(rows):,}; rollback audit --json has all of them.".strip()
    return Block(anchor, title, heads, rows[-_MOST:], f"{len(rows) if count is None else count:,}", note, **more)


def _attempts(audit: AuditReport, records: Sequence[JournalEntry], paths: RunPaths) -> Block:
    hung = dict.fromkeys(record.attempt for record, _ in of_kind(records, Hung))
    texts = [text for attempt in list(hung)[-5:] for text in _stacks(paths, attempt)]
    return _cut(
        "attempts",
        "Attempts",
        ["attempt", "started", "steps", "how it ended", "undone", "what followed"],
        [_attempt(entry) for entry in audit.attempts],
        numbers=["attempt"],
        texts=texts[:_STACKS],
    )


def _attempt(entry: AttemptEntry) -> list[str]:
    reached = "unknown" if entry.reached is None else at_least(f"{entry.reached:,}", entry.at_least)
    begins = "-" if entry.begins is None else f"{entry.begins.step:,} to {reached}"
    ended = entry.ended.replace("_", " ") + (f": {entry.cause}" if entry.cause else "")
    ended += f"; {entry.last_snapshot}" if entry.last_snapshot else ""
    steps = at_least(f"{entry.steps_lost or 0:,} step{'' if entry.steps_lost == 1 else 's'}", entry.at_least)
    lost = f"{steps}, {duration(entry.seconds_lost)}" if entry.steps_lost else ""
    followed = ""
    if entry.restart_delay is not None:
        followed = f"restarted after {duration(entry.restart_delay)}: {entry.restart_reason}"
    return [str(entry.attempt), entry.started[:19].replace("T", " "), begins, ended, lost, followed]


def _stacks(paths: RunPaths, attempt: int) -> Iterator[tuple[str, str]]:
    """The stacks of a hanging attempt's processes."""
    for process in read_process_stacks(paths, attempt, []):
        if process.stacks is not None:
            what = "rank" if process.is_rank else f"{process.command}, below rank"
            title = f"Attempt {attempt}: stacks of {what} {process.rank} (pid {process.pid})"
            yield title, process.stacks[:_STACK]


def _checkpoints(entries: Sequence[CheckpointEntry], drained: Mapping[str, Drained], paths: RunPaths) -> Block:
    """Those that are there, and of the others those that did not leave by age. drained: to the durable ring."""
    fates = Counter(entry.status for entry in entries)
    shown = [entry for entry in entries if entry.status != "evicted"]
    counts = ", ".join(f"{count:,} {fate}" for fate, count in fates.most_common())
    note = f"{counts}. Those that were evicted when newer ones came are not listed." if entries else "None was taken."
    if drained:
        last = max(drained.values(), key=lambda fact: fact.step)
        place = paths.place_of_ring(last.place)
        note += f" {len(drained):,} were copied to the durable ring, {place}: the last one of step {last.step:,}."
    return _cut(
        "checkpoints",
        "Checkpoints",
        ["checkpoint", "step", "batch", "fate", "taken", "size", "seconds", "why"],
        [_checkpoint(entry, entry.checkpoint in drained) for entry in shown],
        numbers=["step", "batch", "size", "seconds"],
        count=len(entries),
        note=note,
    )


def _checkpoint(entry: CheckpointEntry, drained: bool) -> list[str]:
    size = "" if entry.bytes is None else f"{entry.bytes / 2**20:,.1f} MiB"
    seconds = "" if entry.seconds is None else f"{entry.seconds:.2f}"
    step, batch = ("-" if value is None else f"{value:,}" for value in (entry.step, entry.batch))
    taken = entry.at[:19].replace("T", " ")
    fate = f"{entry.status}, drained" if drained else entry.status
    return [entry.checkpoint, step, batch, fate, taken, size, seconds, entry.reason or ""]


def _asked(audit: AuditReport) -> Block:
    rows = [
        [f"skip {w.span.in_words()}", w.who, w.why, f"{w.span.passed_over:,} passed over"] for w in audit.user_windows
    ]
    rows += [[asked_in_words(e), e.who or "", e.why or "", fate_in_words(e)] for e in audit.requests]
    title = "What people asked for, and what the supervisor skipped"
    return _cut("asked", title, ["what", "who", "why", "what became of it"], rows)


def _left_alone(audit: AuditReport) -> Block:
    rows = [
        [
            f"{e.first_step:,}" + (f" to {e.last_step:,}" if e.last_step > e.first_step else ""),
            e.rule,
            f"peak {number(e.peak)}, threshold {number(e.threshold)}",
            e.fate,
        ]
        for e in audit.noticed
    ]
    rows += [[f"{p.step:,}", "probe", p.explanation, p.finding or "not asked"] for p in audit.probes]
    rows += [[f"{p.step:,}", "announced", p.phase or "", "the sentinel learns afresh"] for p in audit.phases]
    if audit.scaler_skipped:
        steps = ", ".join(f"{point.step:,}" for point in audit.scaler_skipped[-12:])
        dropped = f"{len(audit.scaler_skipped):,} updates dropped by the gradient scaler"
        rows.append([steps, "scaler", dropped, "no incident"])
    return _cut("noticed", "Seen and left alone", ["steps", "rule", "what", "what became of it"], rows)
