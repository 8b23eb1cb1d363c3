"""`rollback audit`: what happened to a run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from rollback.cli.answers import Answer, RunArgument, answering, say_notices
from rollback.errors import UsageError
from rollback.system.collector import no_collection

Format = Literal["text", "json", "jsonl", "csv", "parquet"]
AUDIT_CODES = (
    "Exit codes: 0 done. With --verify: 0 everything agrees; 1 the journals are sound, but what was recorded beside "
    "them does not agree; 74 a journal is damaged, or cannot be read."
)


@no_collection()
def audit(
    run: RunArgument,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    form: Annotated[
        Format | None,
        typer.Option(
            "--format",
            help="text, or json: the whole audit (top-level `schema`: 1). jsonl, csv, parquet: one row for each "
            "skipped data set sample.",
            show_default="text",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file, which is replaced.", show_default="stdout"),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show long lists in full in the text.")] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Show which data set samples are suspected or left out instead.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the journals' hash chains and the records beside them instead.")
    ] = False,
) -> None:
    """Show incidents, what was skipped and why, and what it all cost.

    Reads the run directory and writes nothing into it; a running run is not disturbed. In CSV, text that a spreadsheet
    would take for a formula begins with an apostrophe.
    """
    chosen = _choose(json, form, "--verify" if verify else "--samples" if samples else None)
    if verify and samples:
        raise UsageError("--verify and --samples are two questions", hint="leave one of them out")
    if verify:
        from rollback.inspect.audit.verify import check_integrity, in_words

        found = check_integrity(run)
        _write_answer(found, lambda file: print(in_words(found), file=file), run, chosen, output)
        raise typer.Exit(found.exit_code)
    if samples:
        _write_suspects(run, chosen, output)
    elif chosen in ("text", "json"):
        _write_audit(run, chosen, output, everything)
    else:
        _write_samples(run, chosen, output)


def _choose(json: bool, form: Format | None, question: str | None) -> Format:
    if json and form not in (None, "json"):
        raise UsageError(f"--json and --format {form} are two formats", hint="leave one of them out")
    chosen = "json" if json else form or "text"
    if question and chosen not in ("text", "json"):
        raise UsageError(f"{question} answers in text or json, not in {chosen}")
    return chosen


def _write_audit(run: Path, form: Format, output: Path | None, everything: bool) -> None:
    from rollback.inspect.audit.compile import compile_audit
    from rollback.inspect.audit.contents import read_run_contents
    from rollback.inspect.audit.text import print_audit
    from rollback.terminal.escape import console_for

    audit = compile_audit(read_run_contents(run))
    say_notices(audit.notices)
    _write_answer(audit, lambda file: print_audit(console_for(file), audit, everything=everything), run, form, output)


def _write_samples(run: Path, form: Format, output: Path | None) -> None:
    from rollback.inspect.audit.samples import read_samples
    from rollback.inspect.audit.tables import require_pyarrow, write_csv, write_jsonl, write_parquet
    from rollback.terminal.files import replacing

    if form == "parquet":
        if output is None:
            raise UsageError("Parquet needs a file: it is not printed", hint="name one: -o skipped.parquet")
        require_pyarrow()
        table = read_samples(run)
        with replacing(output, run) as path:
            write_parquet(table.rows, path)
    else:
        table = read_samples(run)
        write_rows = write_csv if form == "csv" else write_jsonl
        _write(run, output, lambda file: write_rows(table.rows, file))
    say_notices(table.notices)


def _write_suspects(run: Path, form: Format, output: Path | None) -> None:
    from rollback.inspect.audit.quarantine import in_words, read_sample_report

    report = read_sample_report(run)
    _write_answer(report, lambda file: print(in_words(report), file=file), run, form, output)
    say_notices(report.notices)


def _write_answer(
    answer: Answer, print_text: Callable[[TextIO], None], run: Path, form: Format, output: Path | None
) -> None:
    _write(run, output, print_text if form == "text" else lambda file: print(answer.to_json(), file=file))


def _write(run: Path, output: Path | None, write: Callable[[TextIO], None]) -> None:
    """To the file if one is named, else to stdout. Raises UsageError or OutputNotWritten."""
    from rollback.terminal.files import replacing

    if output is not None:
        with replacing(output, run) as path, open(path, "w", encoding="utf-8", newline="") as file:
            write(file)
        return
    with answering():
        write(sys.stdout)
