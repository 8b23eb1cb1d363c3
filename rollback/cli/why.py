"""`rollback why`: what ended an attempt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollback.terminal.messages import say


def why(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    attempt: Annotated[
        int | None, typer.Option(help="Which attempt.", show_default="the last one that failed", min=1)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the account as JSON (top-level `schema`: 1).")] = False,
) -> None:
    """Show why a run died: which rank, what, where, its traceback or stacks, what followed, and what was done.

    Works on a running, dead or finished run, and writes nothing into it.
    """
    from rollback.inspect.why.text import print_account
    from rollback.inspect.why.why import read_account
    from rollback.terminal.escape import console_for

    account = read_account(run, attempt)
    if json:
        print(account.to_json())
    else:
        print_account(console_for(sys.stdout), account)
    for notice in account.notices:
        say(f"notice: {notice}")
