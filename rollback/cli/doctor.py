"""`rollback doctor`: can this machine keep the promises?"""

from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import JsonOption, show
from rollback.cli.options.parameters import GRACE
from rollback.cli.options.values import parse_size
from rollback.supervisor.preflight import default_run, require_folder, require_script
from rollback.terminal.messages import say

DOCTOR_CODES = "Exit codes: 0 nothing fails (there may be warnings); 1 something does; 2 usage."


def doctor(
    script: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT", help="Training script: names the run directory as rollback launch would."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own; nothing is made of them.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory; it need not exist.", show_default=False, readable=False)
    ] = None,
    ring: Annotated[str | None, typer.Option(metavar="URL", help="Ring elsewhere.", show_default=False)] = None,
    state_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of a checkpoint, as 12GiB; default: as in the run directory.", show_default=False
        ),
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks on this host.", show_default=False)] = None,
    keep: Annotated[int | None, typer.Option(min=3, help="Checkpoints in the ring.", show_default="6")] = None,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that a preempted job has.")] = GRACE,
    json: JsonOption = False,
) -> None:
    """Check whether this machine is fit for rollback: memory, disks, a ring elsewhere, torch, cores, limits, clock.

    Flags come before the script and its arguments, as for rollback launch; nothing of the script is run.
    Takes some seconds. What is written to be measured is removed again; a run directory is not made.
    """
    from rollback.doctor.examine import examine
    from rollback.doctor.text import print_report

    require_folder()
    if script is not None:
        require_script(script, {})
    chosen = run or (default_run(script, {}) if script else Path("runs"))
    wanted = None if state_bytes is None else parse_size(state_bytes, "--state-bytes")
    report = examine(
        chosen, ring=ring, state_bytes=wanted, ranks=nproc, keep=keep, grace=grace,
        tell=lambda what: say(f"looking at {what}"),
    )  # fmt: skip
    show(report, print_report, json=json)
    raise typer.Exit(report.exit_code)
