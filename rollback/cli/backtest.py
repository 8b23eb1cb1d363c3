"""`rollback backtest`: what the sentinel and the policy would have done on logs that exist already."""

import json as json_format
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rollback.cli.answers import answering
from rollback.config import Objective, PresetName, Sensitivity
from rollback.errors import ExitCode, UsageError
from rollback.terminal.files import require_place
from rollback.terminal.messages import printable_lines, show_error


def backtest(
    logs: Annotated[list[Path], typer.Argument(help="Logs to replay.", show_default=False)],
    loss: Annotated[str | None, typer.Option(help="Column of the training loss.", show_default="guessed")] = None,
    grad_norm: Annotated[str | None, typer.Option(help="Column of the gradient norm.", show_default="guessed")] = None,
    step: Annotated[str | None, typer.Option(help="Column of the step.", show_default="guessed")] = None,
    lr: Annotated[str | None, typer.Option(help="Column of the learning rate.", show_default="guessed")] = None,
    sensitivity: Annotated[Sensitivity, typer.Option(help="How readily a spike is called.")] = "normal",
    objective: Annotated[Objective, typer.Option(help="What the loss is of (docs/sentinel.md).")] = "auto",
    policy: Annotated[PresetName, typer.Option(help="Preset for what would be restored and skipped.")] = "balanced",
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per log (`schema`: 1).")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture of the log here.", show_default=False)] = None,
) -> None:
    """Replay logs through the sentinel, with no training and no run directory.

    Reads CSV, TSV, JSON lines (also metrics/train.jsonl of a run), Hugging Face trainer_state.json, TensorBoard event
    files and npz. Logs that have a line every few steps only work too.
    """
    from rollback.backtest.columns import Overrides
    from rollback.backtest.picture import draw
    from rollback.backtest.replay import replay_all
    from rollback.backtest.text import describe
    from rollback.config import Settings

    if plot is not None and len(logs) > 1:
        raise UsageError(f"--plot draws one log, and {len(logs)} were given", hint="name one log")
    if plot is not None:
        require_place(plot, None)
    overrides = Overrides(loss=loss, step=step, grad_norm=grad_norm, lr=lr)
    # A log does not tell how long the run was to be, so no share of it can be held against what would be skipped.
    settings = Settings(sensitivity=sensitivity, objective=objective, policy=policy, max_skipped="100%")
    failed = False
    for path, result in zip(logs, replay_all(logs, overrides, settings), strict=True):
        if isinstance(result, UsageError):
            failed = True
            show_error(result)
            if json and len(logs) > 1:
                with answering():
                    print(json_format.dumps({"schema": 1, "log": str(path), "error": result.message}))
            continue
        with answering():
            if json:
                print(json_format.dumps(result.to_json(), allow_nan=False))
            else:
                print(printable_lines(describe(result, shutil.get_terminal_size().columns)) + "\n")
        if plot is not None:
            draw(result, plot)
    if failed:
        raise typer.Exit(ExitCode.USAGE)
