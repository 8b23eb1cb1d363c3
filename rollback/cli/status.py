"""`rollback status`: what a run is doing now."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import JsonOption, RunArgument, answering, say_notices, show
from rollback.errors import UsageError
from rollback.system.collector import no_collection


def status(
    run: RunArgument,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until the run has ended, or until `q`.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="With --watch: lines instead of a panel.")] = False,
) -> None:
    """Show what a run is doing: step, loss, last good checkpoint, incidents, and whether its processes are alive.

    Reads the run directory and writes nothing into it; a running run is not disturbed.
    """
    if watch and json:
        raise UsageError("--watch and --json exclude each other", hint="call `rollback status --json` now and then")
    if watch:
        _watch(run, plain)
        return
    from rollback.inspect.status.status import read_status
    from rollback.inspect.status.text import print_status

    with no_collection():
        found = read_status(run)
        say_notices(found.notices)
        show(found, print_status, json=json)


def _watch(run: Path, plain: bool) -> None:
    """The panel on stdout where that is a terminal, else lines."""
    from rollback.inspect.record.reading import require_run_directory
    from rollback.live.panel_screen import terminal
    from rollback.live.watch import watch_lines, watch_panel

    require_run_directory(run)
    console = None if plain else terminal(sys.stdout)
    with answering():
        if console is None:
            watch_lines(run, sys.stdout)
        else:
            watch_panel(run, console)
