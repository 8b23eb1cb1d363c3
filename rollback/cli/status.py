"""`rollback status`: what a run is doing now."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.terminal import say


def status(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the status as JSON (top-level `schema`: 1).")] = False,
) -> None:
    """Show what a run is doing: step, loss, last good checkpoint, incidents, and whether its processes are alive.

    Reads the run directory and writes nothing into it; a running run is not disturbed.
    """
    from rollback.audit.status import read_status
    from rollback.audit.terminal import console_for
    from rollback.audit.text import print_status

    found = read_status(run)
    if json:
        print(found.to_json())
    else:
        print_status(console_for(sys.stdout), found)
    for notice in found.notices:
        say(f"notice: {notice}")
