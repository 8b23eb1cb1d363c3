"""The command line: one thin file per command. Nothing here imports torch, so help is there at once."""

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from rollback import __version__
from rollback.cli.adopt import adopt
from rollback.cli.answers import Command, CommandGroup, answering
from rollback.cli.audit import AUDIT_CODES, audit
from rollback.cli.backtest import backtest
from rollback.cli.control import CONTROL_CODES, rewind, skip, stop
from rollback.cli.doctor import DOCTOR_CODES, doctor
from rollback.cli.drill import DRILL_CODES, drill
from rollback.cli.launch import launch
from rollback.cli.options.parameters import LAUNCH_CONTEXT
from rollback.cli.options.spelling import LaunchCommand
from rollback.cli.report import report
from rollback.cli.ring import ring
from rollback.cli.status import status
from rollback.cli.track import track
from rollback.cli.why import why
from rollback.errors import RollbackError
from rollback.rundir.seal import use
from rollback.system.processes import be_told_of_children, cleaning_up_when_told_to_end
from rollback.terminal.messages import bear_any_character, occupy_standard_streams, show_error

app = typer.Typer(
    cls=CommandGroup,
    help="Fault-tolerant checkpoint-and-rollback for PyTorch training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXIT_CODES = (
    "Exit codes: 0 done; 1 failed; 2 usage; 65 no usable checkpoint; 73 run directory in use; 74 I/O; "
    "75 stopped early and resumable; 76 structural divergence; 78 the run directory does not fit this job."
)
app.command(cls=LaunchCommand, context_settings=LAUNCH_CONTEXT, epilog=_EXIT_CODES)(launch)
app.command(epilog=AUDIT_CODES)(audit)
app.command(cls=LaunchCommand, context_settings=LAUNCH_CONTEXT, epilog=DRILL_CODES)(drill)
app.command(cls=LaunchCommand, context_settings=LAUNCH_CONTEXT, epilog=DOCTOR_CODES)(doctor)
for _command in (adopt, status, why, report, backtest, track):
    app.command()(_command)
for _request in (rewind, skip, stop):
    app.command(epilog=CONTROL_CODES)(_request)
app.add_typer(ring, name="ring")
for _registered in (*app.registered_commands, *ring.registered_commands):
    # typer fills the lines of a docstring's first paragraph alone; the others would break where ours do.
    _registered.cls = Command if _registered.cls is TyperCommand else _registered.cls
    _registered.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(_registered.callback) or "")


def _show_version(wanted: bool) -> None:
    if wanted:
        with answering():
            print(f"rollback {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option("--seal", metavar="KEYFILE", help="Verify sealed runs with this key (also: ROLLBACK_SEAL)."),
    ] = None,
) -> None:
    if key is not None:
        use(key)


def main() -> None:
    """Entry point of `rollback` and `python -m rollback`: exits with a code of `rollback.errors.ExitCode`."""
    occupy_standard_streams()
    bear_any_character()
    be_told_of_children()
    try:
        with cleaning_up_when_told_to_end():
            app()
    except RollbackError as error:
        show_error(error)
        sys.exit(error.exit_code)
