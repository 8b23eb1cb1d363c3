"""`rollback why`: what ended an attempt."""

from typing import Annotated

import typer

from rollback.cli.answers import JsonOption, RunArgument, say_notices, show
from rollback.system.collector import no_collection


@no_collection()
def why(
    run: RunArgument,
    attempt: Annotated[
        int | None, typer.Option(help="Which attempt.", show_default="the last one that failed", min=1)
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show why a run died: which rank, what, where, its traceback or stacks, what followed, and what was done.

    Works on a running, dead or finished run, and writes nothing into it.
    """
    from rollback.inspect.why.text import print_attempt_report
    from rollback.inspect.why.why import read_attempt_report

    report = read_attempt_report(run, attempt)
    say_notices(report.notices)
    show(report, print_attempt_report, json=json)
