"""The findings for people."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollback.doctor.findings import DoctorReport
from rollback.terminal.escape import quoted

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def print_report(console: Console, report: DoctorReport) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        words = quoted(finding.found)
        if finding.fix:
            words.append_text(Text("\n→ ", style="bold")).append_text(quoted(finding.fix))
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(finding.topic), words)
    console.print(table)
    counts = {level: sum(finding.level == level for finding in report.findings) for level in ("fail", "warn")}
    verdict = ", ".join(f"{count} {level}" for level, count in counts.items() if count) or "all ok"
    console.print(quoted(f"{report.host}: {verdict}"))
