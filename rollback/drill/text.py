"""The table of a drill, for people. What it quotes comes from a job's record and is shown, never obeyed."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollback.drill.drill import DrillReport
from rollback.drill.judge import DrillRow
from rollback.terminal.escape import quoted
from rollback.wording import counted


def print_report(console: Console, report: DrillReport) -> None:
    ranks = counted(report.ranks, "rank")
    head = f"drill of {report.script}: {ranks}, {report.steps} updates a run, struck at update {report.strike}"
    console.print(quoted(head, style="bold"))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("fault", "", "caught after", "bitwise", "replayed", "skipped", "run"):
        table.add_column(name, no_wrap=True)
    for row in report.rows:
        again = "-" if row.steps_replayed is None else str(row.steps_replayed)
        skipped = "-" if row.batches_skipped is None else str(row.batches_skipped)
        seconds = "-" if row.seconds is None else f"{row.seconds:.0f} s"
        table.add_row(row.fault, _result(row), _after(row), row.bitwise, again, skipped, seconds)
    console.print(table)
    console.print(Text("(replayed: steps; skipped: batches; run: seconds of all of it)", style="dim"))
    for row in report.rows:
        console.print(Text(f"\n{row.fault}", style="bold") + quoted(f": {row.says}", style="not bold"))
        for title, words in (("struck", row.struck), ("caught", row.caught), ("then", row.recovered)):
            if words:
                console.print(quoted(f"  {title:6}  {words}"))
        if row.why:
            console.print(
                quoted(f"  {'note' if row.passed else 'FAILED':6}  {row.why}", style="" if row.passed else "red")
            )
    console.print()
    for notice in report.notices:
        console.print(quoted(f"  notice: {notice}", style="yellow"))
    failed = sum(not row.passed for row in report.rows)
    verdict = "all passed" if not failed else f"{failed} of {len(report.rows)} failed"
    console.print(quoted(f"{verdict}; {report.seconds:.0f} s in all; the runs are in {report.scratch}"))


def _result(row: DrillRow) -> Text:
    if row.skipped:
        return Text("n/a", style="cyan")
    return Text("ok", style="green") if row.passed else Text("FAILED", style="bold red")


def _after(row: DrillRow) -> str:
    steps = None if row.caught_after_steps is None else f"{row.caught_after_steps} steps"
    seconds = None if row.caught_after_seconds is None else f"{row.caught_after_seconds:.1f} s"
    return ", ".join(part for part in (steps, seconds) if part) or ("-" if row.passed else "not caught")
