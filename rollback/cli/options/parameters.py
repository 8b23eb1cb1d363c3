"""The command line of `rollback launch`, from which typer makes its parser and its help.

torchrun's flags come from their table and the guard's settings from their model, so that none of them can drift.
"""

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from rollback.cli.options.spelling import OTHER_FLAG
from rollback.config import EMPTY, Settings, option
from rollback.supervisor.nodes.membership import NODE_TIMEOUT
from rollback.supervisor.torchrun.flags import FLAGS, Flag

LAUNCH_CONTEXT = {
    "allow_interspersed_args": False,  # what follows the script is the script's
    "help_option_names": ["-h", "--help"],
}
RESTART_BUDGET = 10
GRACE = 60.0
_PANEL = "The run"
# What is switched off by saying so; of a torchrun switch, not saying it is off.
_SWITCHED_OFF = {"preload", *(name for name, field in Settings.model_fields.items() if field.annotation is bool)}


def declares(parameters: Sequence[inspect.Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the parameters of a table in place of its written signature, which is where typer looks."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def as_arguments(given: Mapping[str, Any]) -> list[str]:
    """The flags that say what these values of a command's parameters say; what was not given says nothing."""
    arguments = []
    for name, value in given.items():
        match value:
            case None:
                continue
            case False if name not in _SWITCHED_OFF:
                continue
            case bool():
                arguments.append(option(name) if value else option(f"no_{name}"))
            case list() | tuple():
                arguments += [f"{option(name)}={item}" for item in value]
            case _:
                arguments.append(f"{option(name)}={value}")
    return arguments


def parameter(name: str, kind: Any, declaration: Any, default: Any = None) -> inspect.Parameter:
    annotation = Annotated[kind, declaration]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag(
    field: str, kind: Any, metavar: str | None, text: str, *names: str, panel: str, least: float | None = None
) -> inspect.Parameter:
    """A flag that is not given is None. names: its spellings; by default that of the field."""
    spelt = names or (option(field),)
    parser = _path if kind is Path else None
    declared = typer.Option(*spelt, metavar=metavar, help=text, min=least, parser=parser, rich_help_panel=panel)
    return parameter(field, kind | None, declared)


def _path(text: str) -> Path:
    """Of an empty one Python would make the working directory, where a run would then be made. One that may not be read
    is told of by who reads it, with an exit code that says so; to typer it would be wrong use."""
    if not text:
        raise typer.BadParameter(EMPTY)
    return Path(text)


def switch(field: str, panel: str, text: str, *, name: str | None = None) -> inspect.Parameter:
    """A switch that is not given is off."""
    return parameter(field, bool, typer.Option(name or option(field), help=text, rich_help_panel=panel), False)


def _torchrun_parameter(row: Flag) -> inspect.Parameter:
    names = [row.option, *([f"-{row.short}"] if row.short else [])]
    if row.name == "nproc-per-node":
        names.append("--nproc")
    panel = "torchrun's flags"
    if row.metavar is None:
        return parameter(row.parameter, bool, typer.Option(*names, help=row.help, rich_help_panel=panel), False)
    return flag(row.parameter, str, row.metavar, row.help, *names, panel=panel)


def _setting_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The flag of a setting. Values stay text: the settings' model is what checks and converts them."""
    standard = "" if field.default in (None, ()) else f" (default: {_show(field.default)})"
    text = f"{field.description}{standard}"
    panel = "Settings of the guard, over those of the script"
    if field.annotation is bool:
        return flag(name, bool, None, text, f"{option(name)}/{option('no_' + name)}", panel=panel)
    kind = list[str] if name in ("skip", "skip_samples") else str
    own = field.json_schema_extra
    metavar = str(own["metavar"]) if isinstance(own, dict) else _metavar(field.annotation)
    return flag(name, kind, metavar, text, panel=panel)


def _show(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _metavar(kind: Any) -> str:
    """How a value is written, from the type of a setting: `N`, `low | normal | high`, `N | auto`, `A:B`. Between the
    blanks the help may break its lines."""
    if get_origin(kind) is Annotated:
        return _metavar(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " | ".join(get_args(kind))
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(_metavar(part) for part in get_args(kind) if part is not type(None))
    return {int: "N", float: "X", str: "DIR"}.get(kind, "A:B")


_run_flag = partial(flag, panel=_PANEL)

LAUNCH_PARAMETERS: tuple[inspect.Parameter, ...] = (
    parameter(
        "script",
        str,
        typer.Argument(metavar="SCRIPT", help="training script, or what --module and --no-python make of it"),
        inspect.Parameter.empty,
    ),
    parameter("arguments", list[str] | None, typer.Argument(metavar="ARGUMENTS", help="the script's own")),
    _run_flag("run", Path, "DIR", "run directory (default: runs/NAME OF SCRIPT)"),
    _run_flag(
        "adopt",
        str,
        "[=strict]",
        "protect a script that has no guard: what it makes and calls is watched. Where that cannot be exact it runs "
        "unprotected, with a notice; with =strict it is refused",
    ),
    _run_flag("skips_of", Path, "RUN", "pass over what is passed over in another run"),
    _run_flag("tensorboard", str, "DIR", "show the run in TensorBoard: event files below this directory"),
    _run_flag("wandb", str, "PROJECT", "show the run in this project of Weights & Biases"),
    _run_flag(
        "restart_budget",
        int,
        "N",
        f"restarts without progress; progress refills it (default: {RESTART_BUDGET})",
        least=0,
    ),
    _run_flag(
        "grace",
        float,
        "SECONDS",
        f"time that ranks have to stop and save when told to (default: {GRACE:g})",
        least=0.0,
    ),
    _run_flag(
        "hang_after",
        str,
        "auto|SECONDS|off",
        "end and restart a job of which no rank shows a sign of progress for so long; with SECONDS start-up counts too "
        "(default: auto, from the length of the steps and at least 5 minutes)",
    ),
    _run_flag(
        "stall_after",
        str,
        "SECONDS|off",
        "the same for a job that runs and finishes no batch: start-up, compilation and evaluation count (default: off)",
    ),
    _run_flag(
        "node_timeout",
        float,
        "SECONDS",
        f"many nodes: how long one that is missing or lost is waited for (default: {NODE_TIMEOUT:g})",
        least=1.0,
    ),
    _run_flag(
        "spare_nodes",
        int,
        "N",
        "many nodes: so many more than --nnodes says are started, with the same command, and wait to take the place of "
        "one that is lost or fails again and again (default: 0)",
        least=0,
    ),
    _run_flag(
        "replicas",
        int,
        "1|2",
        "many nodes: with 2, each node sends its part of each snapshot, and its ranks' end marks, to the memory of "
        "another one, where the host that replaces a lost one gets them; takes as much memory again, and network "
        "(default: 1)",
        least=1,
    ),
    switch("no_hangup", _PANEL, "go on when the terminal is gone, as under nohup"),
    _run_flag("seal", Path, "KEYFILE", "sign the record and the checkpoints with this key, and restore no others"),
    _run_flag(
        "secret_args",
        list[str],
        "NAME[,NAME]",
        "options of the script whose values are secret too: they are written nowhere",
    ),
    _run_flag(
        "preload",
        bool,
        None,
        "fork ranks from a process that has imported torch, and keep the next one ready: restarts are seconds faster "
        "(default: on)",
        "--preload/--no-preload",
    ),
    *(_setting_parameter(name, field) for name, field in Settings.model_fields.items()),
    *map(_torchrun_parameter, FLAGS),
    parameter("torchrun_flag", list[str] | None, typer.Option(OTHER_FLAG, hidden=True)),
)
