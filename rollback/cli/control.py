"""`rollback rewind`, `rollback skip`, `rollback stop`: what an operator can ask of a run, live or not."""

from typing import TYPE_CHECKING, Annotated

import typer

from rollback.cli.answers import JsonOption, RunArgument, answering
from rollback.cli.options.values import parse_window
from rollback.errors import UsageError
from rollback.terminal.messages import say

if TYPE_CHECKING:
    from rollback.control.asking import PreparedRequest

CONTROL_CODES = (
    "Exit codes: 0 carried out, or handed in with --no-wait or to a run that is not running; 1 refused by the ranks, "
    "or not carried out in time; 2 it makes no sense now, and nothing was handed in; 65 no checkpoint to go back to; "
    "74 I/O, also of the answer: then the message says what became of the order."
)
_Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="For the record.", show_default=False)]
_Who = Annotated[str | None, typer.Option("--who", metavar="NAME", help="For the record (default: USER@HOST).")]
_Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the ranks have answered.")]
_Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0.0, help="Wait no longer than this.")]


def rewind(
    run: RunArgument,
    to: Annotated[int, typer.Option("--to", metavar="STEP", min=0, help="Go back to this step.", show_default=False)],
    skip: Annotated[
        str | None, typer.Option("--skip", metavar="A:B", help="Then pass over these batches, both included.")
    ] = None,
    why: _Why = "",
    who: _Who = None,
    json: JsonOption = False,
    wait: _Wait = True,
    timeout: _Timeout = 300.0,
) -> None:
    """Send a run back to the newest checkpoint at or before a step.

    All ranks of a running job do it at the end of the same step; a job that is not running does it at its next start.
    What lies beyond the checkpoint is discarded, as in a rollback.
    """
    from rollback.control.asking import default_who, rewind_request

    window = parse_window(skip, "--skip") if skip is not None else None
    _finish(rewind_request(run, to, window, who or default_who(), why), json, wait, timeout)


def skip(
    run: RunArgument,
    window: Annotated[
        str | None, typer.Argument(metavar="A:B", help="Batches, both included.", show_default=False)
    ] = None,
    sample: Annotated[
        list[int] | None,
        typer.Option("--sample", metavar="INDEX", min=0, help="Leave out this data set sample instead (repeatable)."),
    ] = None,
    release: Annotated[bool, typer.Option("--release", help="Take the samples in again.")] = False,
    why: _Why = "",
    who: _Who = None,
    json: JsonOption = False,
    wait: _Wait = True,
    timeout: _Timeout = 300.0,
) -> None:
    """Have a run pass over batches that are still to come. Those that it has consumed need a `rollback rewind`.

    With --sample, have it leave data set samples out of all batches to come; a neighbour takes the place of each.
    """
    from rollback.control.asking import default_who, samples_request, skip_request

    if (window is None) == (not sample):
        raise UsageError("name either batches or samples", hint="A:B, both included, or --sample INDEX")
    if sample:
        prepared = samples_request(run, sample, release, who or default_who(), why)
    elif window is None or release:
        raise UsageError("--release takes samples in again; batches that were skipped need a `rollback rewind`")
    else:
        prepared = skip_request(run, parse_window(window, "A:B"), who or default_who(), why)
    _finish(prepared, json, wait, timeout)


def stop(
    run: RunArgument,
    why: _Why = "",
    who: _Who = None,
    json: JsonOption = False,
    wait: _Wait = True,
    timeout: _Timeout = 300.0,
) -> None:
    """Have a running job save and stop, resumably: as SIGTERM to `rollback launch` does, from any host."""
    from rollback.control.asking import default_who, stop_request

    _finish(stop_request(run, who or default_who(), why), json, wait, timeout)


def _finish(prepared: "PreparedRequest", json: bool, wait: bool, timeout: float) -> None:
    from rollback.control.asking import wait_for_answer, without_waiting

    if prepared.notice:
        say(prepared.notice)
    asked = prepared.hand_in()
    reply = wait_for_answer(asked, timeout) if wait and asked.live else without_waiting(asked)
    told = f"request {reply.request}: {reply.text}"
    if json:
        with answering(told if reply.state == "refused" else f"the order stands: {told}"):
            print(reply.to_json())
    else:
        say(told)
    raise typer.Exit(reply.exit_code)
