"""`rollback launch`: from a command line to a supervised run."""

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from rollback.cli.options.parameters import GRACE, LAUNCH_PARAMETERS, declares
from rollback.cli.options.settings import hang_limits, read_settings, restart_budget_of
from rollback.config import option
from rollback.errors import ExitCode, RollbackError, ScriptRefused, UsageError
from rollback.live.screen import Screen
from rollback.rundir.paths import RunPaths
from rollback.rundir.seal import ENV_SEAL, use
from rollback.supervisor import preflight
from rollback.supervisor.nodes.membership import NODE_TIMEOUT
from rollback.supervisor.nodes.protocol import RunResult
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.supervise import supervise
from rollback.supervisor.torchrun.command import LaunchedJob, LaunchOptions
from rollback.supervisor.torchrun.flags import FLAGS, endpoint_of, read_flags
from rollback.supervisor.torchrun.redaction import redacted
from rollback.terminal.messages import line_for, say
from rollback.trackers.process import trackers_beside


@declares(LAUNCH_PARAMETERS)
def launch(
    *,
    script: str,
    arguments: list[str] | None,
    run: Path | None,
    adopt: str | None,
    skips_of: Path | None,
    tensorboard: str | None,
    wandb: str | None,
    restart_budget: int | None,
    grace: float | None,
    hang_after: str | None,
    stall_after: str | None,
    node_timeout: float | None,
    spare_nodes: int | None,
    replicas: int | None,
    no_hangup: bool,
    secret_args: list[str] | None,
    seal: Path | None,
    preload: bool | None,
    torchrun_flag: list[str] | None,
    **given: Any,
) -> None:
    """Run a training job under torchrun, and keep it going.

    Write `rollback launch` where `torchrun` stood and leave the rest. The same command again resumes the run."""
    preflight.require_folder()
    preflight.require_temporary_folder()
    flags = read_flags({flag.parameter: given.pop(flag.parameter) for flag in FLAGS}, os.environ)
    preflight.require_script(script, flags)
    preflight.require_files(flags)
    endpoint_of(flags)  # else each attempt would find that it is none, or wait
    paths = RunPaths(run if run is not None else preflight.default_run(script, flags))
    if key := seal or os.environ.get(ENV_SEAL):
        use(Path(key), paths.root)
    settings = read_settings(given, skips_of)
    budget = restart_budget_of(restart_budget, flags.get("max-restarts"))
    limits = hang_limits(hang_after, stall_after)
    names = [name for listed in secret_args or [] for name in listed.split(",") if name]
    if secret_args and not names:
        raise UsageError("--secret-args names no option of the script", hint="for example --secret-args wandb-key")
    runner = preflight.adopting_runner(adopt, flags)
    job = LaunchedJob(flags, script, arguments or [], torchrun_flag or (), names, runner)
    trackers = _tracker_flags(tensorboard, wandb, paths.root)
    expects_guard = any(
        [run is not None, restart_budget is not None, settings.model_fields_set, trackers, seal, adopt == "strict"]
    )
    options = LaunchOptions(
        paths, job, settings, budget, GRACE if grace is None else grace, limits, node_timeout or NODE_TIMEOUT,
        spare_nodes or 0, preflight.require_replicas(replicas, settings), preload=preload is not False,
        expects_guard=expects_guard,
    )  # fmt: skip
    if no_hangup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals(str(flags.get("signals-to-handle", ""))) as signals, signals.ignored_from_its_end_on():
        result = _run(options, trackers, signals, unprotected_if_refused=adopt == "notice")
        say(closing_line(result, paths.root, redacted(["rollback", *sys.argv[1:]], names)))
        raise typer.Exit(result.exit_code)


def _run(
    options: LaunchOptions, trackers: Sequence[str], signals: StopSignals, *, unprotected_if_refused: bool
) -> RunResult:
    root = options.paths.root
    with _audience(root) as screen, trackers_beside(root, trackers, screen.say, lambda: len(signals.received)):
        if (notice := preflight.notice_of_spawn(options.job.script, options.job.flags)) is not None:
            screen.say(notice)
        try:
            return supervise(options, screen, signals)
        except ScriptRefused as error:
            if not unprotected_if_refused:
                raise
            screen.say(f"not protected: {error}")
            if signals.received:
                raise RollbackError(
                    "told to stop before the script was started without protection",
                    hint="the same command starts it", exit_code=ExitCode.RESUMABLE,
                ) from None  # fmt: skip
            screen.say("starting the script as torchrun would")
            return supervise(_unprotected(options), screen, signals)


def _unprotected(options: LaunchOptions) -> LaunchOptions:
    """The same job without a guard. The record that a guard may have begun, in the run directory and at the ring's URL,
    is not its: what becomes of this job would be the end of that run."""
    paths = RunPaths(options.paths.root.with_name(f"{options.paths.root.name}-unprotected"))
    return replace(options, paths=paths, job=replace(options.job, runner=()), expects_guard=False, fetches=False)


def _tracker_flags(tensorboard: str | None, wandb: str | None, run: Path) -> list[str]:
    """What `rollback track` is called with. Raises UsageError where a tracker cannot be had, before anything starts."""
    given = {"tensorboard": tensorboard, "wandb": wandb}
    flags = [f"{option(name)}={value}" for name, value in given.items() if value is not None]
    if flags:
        from rollback.trackers.follow import require_trackers

        require_trackers(tensorboard, wandb, run)
    return flags


def _audience(run: Path) -> Screen:
    """The panel where there is a terminal for it, else plain lines, without the panel's imports."""
    if sys.stderr is None or not sys.stderr.isatty():
        return Screen(line_for)
    from rollback.live.panel_screen import PanelScreen, terminal

    console = terminal(sys.stderr)
    return Screen(line_for) if console is None else PanelScreen(line_for, run, console)


def closing_line(result: RunResult, run: Path, command: Sequence[str]) -> str:
    """What to do next."""
    record, goes_on = result.record, f"go on with `{shlex.join(command)}`"
    if record is None and result.exit_code == ExitCode.RESUMABLE:  # before any rank could make a guard
        return f"stopped, resumable ({result.reason}); {goes_on}"
    if record is None and result.exit_code != ExitCode.DONE:  # perhaps on the way to its guard
        return f"failed: {result.reason}; no rank had made a rollback.Guard, so nothing was recorded"
    if record is None:
        return "done, without protection: no rank made a rollback.Guard, so nothing was recorded"
    audit = f"`rollback audit {shlex.quote(record.directory or str(run))}`" + (f" on {record.host}" * bool(record.host))
    match result.exit_code:
        case ExitCode.DONE if not result.protected:  # a flag or an earlier run has announced a guard
            return f"done, without protection: no rank made a rollback.Guard, so nothing was saved; see also {audit}"
        case ExitCode.DONE if record.url:
            found = f"`rollback ring list {shlex.quote(record.url)}` shows its checkpoints"
            return f"done; this host has no record of the run, the one at {record.url} says so: {found}"
        case ExitCode.DONE:
            return f"done; {audit} tells what happened on the way"
        case ExitCode.RESUMABLE:
            then = result.hint or goes_on
            return f"stopped, resumable ({result.reason}); {then}; {audit} tells what happened so far"
        case ExitCode.STRUCTURAL:
            return f"stopped, structural divergence: {result.reason}\n{audit} has the whole account"
        case ExitCode.NO_CHECKPOINT:
            return f"stopped, no usable checkpoint: {result.reason}\n{audit} has the whole account"
        case _:
            then = result.hint or f"once that is mended, {goes_on}"
            return f"failed: {result.reason}; {then}; see also {audit}"
