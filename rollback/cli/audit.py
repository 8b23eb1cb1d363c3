"""`rollback audit`: what happened to a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.terminal import say


def audit(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the ledger as JSON (top-level `schema`: 1).")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every skipped batch and index in the text.")] = False,
) -> None:
    """Show incidents, what was skipped and why, and what it all cost.

    Reads the run directory and writes nothing into it; a running run is not disturbed.
    """
    from rollback.audit.compile import compile_ledger
    from rollback.audit.material import read_material
    from rollback.audit.terminal import console_for
    from rollback.audit.text import print_ledger

    ledger = compile_ledger(read_material(run))
    if json:
        print(ledger.to_json())
    else:
        print_ledger(console_for(sys.stdout), ledger, everything=everything)
    for notice in ledger.notices:
        say(f"notice: {notice}")
