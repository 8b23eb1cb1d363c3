"""`rollback track`: a run in TensorBoard or Weights & Biases."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import RunArgument
from rollback.errors import OutputNotWritten, UsageError
from rollback.system.threads import start_thread
from rollback.terminal.messages import say


def track(
    run: RunArgument,
    tensorboard: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write event files below this directory.", show_default=False)
    ] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to this project of W&B.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the run does, until Ctrl-C.")] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
    after: Annotated[int, typer.Option("--after-attempt", hidden=True)] = 0,
) -> None:
    """Show a run in TensorBoard or Weights & Biases: the curve of the steps that count, incidents, skip windows.

    Reads the run directory and writes nothing into it; training does not wait. `rollback launch --tensorboard DIR` does
    the same while the run goes on.
    """
    from rollback.inspect.record.reading import require_run_directory
    from rollback.trackers.follow import Tracker, group_of, name_of, require_trackers
    from rollback.trackers.follow import follow as tell_on
    from rollback.trackers.tensorboard import TensorBoard
    from rollback.trackers.wandb import WeightsAndBiases

    if tensorboard is None and wandb is None:
        raise UsageError("no tracker is named", hint="--tensorboard DIR, --wandb PROJECT, or both")
    if not until_eof:
        require_run_directory(run)  # beside a supervisor it may not be there yet
    require_trackers(tensorboard, wandb, run)
    trackers: list[Tracker] = []
    if tensorboard is not None:
        trackers.append(TensorBoard(Path(tensorboard), name_of(run)))
    if wandb is not None:
        trackers.append(WeightsAndBiases(wandb, lambda: group_of(run)))
    over = _end_of_stdin() if until_eof else (lambda: not follow)
    try:
        tell_on(run, trackers, after=after, over=over)
    except KeyboardInterrupt:
        raise typer.Exit from None
    except OSError as error:
        raise OutputNotWritten(
            f"telling the trackers of {run}: {error}",
            hint="name a directory in which you can write files",
        ) from error
    if tensorboard is not None and not until_eof:
        say(f"tensorboard --logdir {tensorboard}")


def _end_of_stdin() -> Callable[[], bool]:
    """Becomes true when nobody holds the other end of our standard input any more."""
    ended, stdin = threading.Event(), sys.stdin.fileno()

    def wait() -> None:
        # Not by sys.stdin: this thread would hold its lock, and Python aborts where it cannot have that at its end.
        while os.read(stdin, 1 << 12):
            pass
        ended.set()

    start_thread(threading.Thread(target=wait, name="end of input", daemon=True))
    return ended.is_set
