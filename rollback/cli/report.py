"""`rollback report`: a run as a page."""

import time
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import RunArgument
from rollback.system.collector import no_collection
from rollback.terminal.messages import say


@no_collection()
def report(
    run: RunArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("report.html"),
) -> None:
    """Make one HTML file of a run: its curve, incidents with their evidence, checkpoints, and where the time went.

    The file needs no network and no other file. Reads the run directory and writes nothing into it; a running run is
    not disturbed.
    """
    from rollback.report.page import make_page
    from rollback.terminal.files import replacing

    began = time.monotonic()
    page = make_page(run).encode()
    with replacing(output, run) as path:
        path.write_bytes(page)
    say(f"{output}: {len(page) / 1e6:.2f} MB, made in {time.monotonic() - began:.1f} s")
