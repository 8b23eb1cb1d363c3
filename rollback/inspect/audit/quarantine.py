"""The data set samples that are suspected or left out, since when and why (`rollback audit --samples`)."""

from pathlib import Path

from rollback.facts.fact import by_whom
from rollback.facts.history import History, fold
from rollback.inspect.audit.report import SampleEntry
from rollback.inspect.document import Document, fields_of
from rollback.inspect.record.reading import read_records, require_run_directory
from rollback.suspects import suspects
from rollback.terminal.messages import printable


class SampleReport(Document):
    """Schema of `rollback audit --samples --format json`, version 1; conventions as in the audit."""

    directory: str
    samples: list[SampleEntry]
    notices: list[str]


def read_sample_report(root: Path) -> SampleReport:
    """Raises UsageError, RunDirectoryError or JournalDamaged; nothing is written."""
    notices: list[str] = []
    history = fold(read_records(require_run_directory(root), notices))
    return SampleReport(directory=str(root), samples=sample_entries(history), notices=notices)


def sample_entries(history: History) -> list[SampleEntry]:
    """All samples that are suspected or were ever left out, by index."""
    explained = suspects(case.incident for case in history.cases)
    present = {*history.quarantine[-1].samples} if history.quarantine else set()
    since, last = {}, {}
    for fact in history.quarantine:
        for sample in (*fact.added, *fact.released):
            last[sample] = fact
        for sample in fact.added:
            since[sample] = fact.batch
    return [
        SampleEntry(
            sample=sample,
            incidents=list(explained.get(sample, ())),
            in_quarantine=sample in present,
            since=since.get(sample),
            **fields_of(last.get(sample), "who", "why"),
        )
        for sample in sorted({*explained, *last})
    ]


def in_words(report: SampleReport) -> str:
    lines = [f"sample {entry.sample}: {sample_in_words(entry)}" for entry in report.samples]
    return "\n".join(map(printable, lines or ["no sample is suspected or left out"]))


def sample_in_words(entry: SampleEntry) -> str:
    """What is known of a sample. A suspect is no culprit: incidents may have a sample in common by chance."""
    incidents = ", ".join(map(str, entry.incidents))
    words = [f"suspect of incidents {incidents}"] if incidents else []
    if entry.in_quarantine:
        words.append(f"left out from batch {entry.since} on ({by_whom(entry.who, entry.why)})")
    elif entry.since is not None:
        words.append(f"was left out from batch {entry.since} on, and is no longer ({by_whom(entry.who, entry.why)})")
    else:
        words.append("not left out")
    return "; ".join(words)
