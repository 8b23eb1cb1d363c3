"""`rollback launch`: from a command line to a supervised run."""

import importlib.util
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from rollback.checkpoints.tiers import base_of
from rollback.cli.launch_options import GRACE, LAUNCH_PARAMETERS, RESTART_BUDGET, declares
from rollback.cli.windows import cumulative, parse_samples, parse_window, together
from rollback.config import Settings, explain, option
from rollback.errors import ExitCode, RollbackError, ScriptRefused, UsageError, reporting
from rollback.facts.fact import SamplesFrom, Window
from rollback.facts.history import History, merge_windows, passed_over_by
from rollback.facts.training import PassedOver
from rollback.instructions import ADOPTING, path_of
from rollback.live.screen import Screen
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.seal import ENV_SEAL, use
from rollback.rundir.skip_records import read_skipped
from rollback.source.own_ranks import line_of_spawn
from rollback.supervisor.attempts import LaunchOrder
from rollback.supervisor.diagnosis.hang import HangLimits
from rollback.supervisor.nodes.membership import NODE_TIMEOUT
from rollback.supervisor.nodes.protocol import RunResult
from rollback.supervisor.signals import StopSignals
from rollback.supervisor.supervise import supervise
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.flags import FLAGS, read_flags
from rollback.supervisor.torchrun.redaction import redacted
from rollback.terminal.messages import line_for, say
from rollback.trackers.process import trackers_beside

# Files that must be open at once, at the least: by supervisor and torchrun, and for each rank.
_FILES, _FILES_OF_A_RANK = 32, 4


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
    _require_folder()
    _require_temporary_folder()
    flags = read_flags({flag.parameter: given.pop(flag.parameter) for flag in FLAGS}, os.environ)
    require_script(script, flags)
    _require_files(flags)
    paths = RunPaths(run if run is not None else default_run(script, flags))
    if key := seal or os.environ.get(ENV_SEAL):
        use(Path(key), paths.root)
    settings = read_settings(given, skips_of)
    budget = _restart_budget(restart_budget, flags.get("max-restarts"))
    limits = hang_limits(hang_after, stall_after)
    names = [name for listed in secret_args or [] for name in listed.split(",") if name]
    job = LaunchedJob(flags, script, arguments or [], torchrun_flag or (), names, _runner(adopt, flags))
    trackers = _tracker_flags(tensorboard, wandb, paths.root)
    expects_guard = any(
        [run is not None, restart_budget is not None, settings.model_fields_set, trackers, seal, adopt == "strict"]
    )
    order = LaunchOrder(
        paths, job, settings, budget, GRACE if grace is None else grace, limits, node_timeout or NODE_TIMEOUT,
        spare_nodes or 0, _replicas(replicas, settings), preload=preload is not False, expects_guard=expects_guard,
    )  # fmt: skip
    if no_hangup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignals(str(flags.get("signals-to-handle", ""))) as signals, signals.ignored_from_its_end_on():
        result = _run(order, trackers, signals, unprotected_if_refused=adopt == "notice")
        say(closing_line(result, paths.root, redacted(["rollback", *sys.argv[1:]], names)))
        raise typer.Exit(result.exit_code)


def _run(
    order: LaunchOrder, trackers: Sequence[str], signals: StopSignals, *, unprotected_if_refused: bool
) -> RunResult:
    script, root = order.job.script, order.paths.root
    with _audience(root) as screen, trackers_beside(root, trackers, screen.say, lambda: len(signals.received)):
        if (line := _starts_ranks_at(script, order.job.flags)) is not None:
            screen.say(_STARTS_RANKS.format(script=script, line=line))
        try:
            return supervise(order, screen, signals)
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
            return supervise(_unprotected(order), screen, signals)


def _replicas(given: int | None, settings: Settings) -> int:
    """Raises UsageError for more copies than can be made, or for copies of what is in no memory."""
    if given is not None and given > 2:
        raise UsageError(f"--replicas {given}: a snapshot is kept by its own host, and by one more at most (2)")
    if given == 2 and base_of(settings.fast_tier) is None:
        raise UsageError(
            "--replicas 2 copies snapshots from one host's memory to another's, and --fast-tier is off",
            hint="leave one of the two out",
        )
    return given or 1


def _runner(adopt: str | None, flags: Mapping[str, str | bool]) -> list[str]:
    """What runs the script in the ranks in place of Python alone. Raises UsageError for what cannot be adopted."""
    if adopt is None:
        return []
    if adopt not in ("notice", "strict"):
        raise UsageError(f"--adopt={adopt}: it is --adopt or --adopt=strict")
    if taken := [name for name in ("module", "no-python") if flags.get(name)]:
        raise UsageError(
            f"--adopt takes a Python script, and --{taken[0]} says that this is none",
            hint="for a module, a script will do with: runpy.run_module('NAME', run_name='__main__')",
        )
    return [path_of(ADOPTING), adopt]


def _unprotected(order: LaunchOrder) -> LaunchOrder:
    """The same job without a guard. The record that a guard may have begun, in the run directory and at the ring's URL,
    is not its: what becomes of this job would be the end of that run."""
    paths = RunPaths(order.paths.root.with_name(f"{order.paths.root.name}-unprotected"))
    return replace(order, paths=paths, job=replace(order.job, runner=()), expects_guard=False, fetches=False)


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


def _require_folder() -> None:
    """Raise UsageError where the working directory has been removed: all would fail, each thing in words of its own."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory {os.environ.get('PWD', '')} is not there any more ({error.strerror})",
            hint="change to one that is: cd ... (one of the same name may have been made anew since)",
        ) from error


def _require_temporary_folder() -> None:
    """Raise UsageError where no temporary file can be made: the supervisor, torchrun and many a script need some.

    Where one can be made, Python asks once in a process: all that comes after gets the same answer."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UsageError(
            f"no temporary file can be made ({error.strerror}): each of these is full, read-only or not there",
            hint="make room there, or set TMPDIR to a directory that can be written: TMPDIR=DIR rollback launch ...",
        ) from error


def _require_files(flags: Mapping[str, str | bool]) -> None:
    """Raise UsageError where fewer files may be open than the supervisor and torchrun need to start anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = str(flags.get("nproc-per-node", "1"))
    needed = _FILES + _FILES_OF_A_RANK * (int(ranks) if ranks.isdecimal() else 1)
    if soft not in (resource.RLIM_INFINITY, -1) and soft < needed:
        may = hard in (resource.RLIM_INFINITY, -1) or hard >= needed
        raise UsageError(
            f"a process may have {soft} files open here, and starting {ranks} ranks takes at least {needed}",
            hint="ulimit -n 4096" if may else f"have the hard limit raised, which is {hard}, then: ulimit -n 4096",
        )


_LAUNCHERS = {
    "program": ("torchrun", "accelerate", "accelerate-launch", "deepspeed"),
    "module": ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
}
"""What starts ranks of its own: of these the supervisor knows none, so it could not tell which died, nor end them."""


def require_script(script: str, flags: Mapping[str, str | bool]) -> None:
    """Raise UsageError unless there is something to run. Imports nothing."""
    as_file = bool(flags.get("run-path"))
    is_module = bool(flags.get("module")) and not as_file
    if script in _LAUNCHERS["module" if is_module else "program"] and (is_module or not Path(script).exists()):
        raise UsageError(
            f"{script} starts processes of its own, in whose place rollback launch stands",
            hint=f"leave {script} and its flags out: rollback launch --nproc N train.py [ARGUMENTS OF train.py]",
        )
    if flags.get("module") and not as_file:
        if flags.get("no-python"):
            raise UsageError("--module and --no-python exclude each other: a module is run by python")
        top = script.partition(".")[0]
        other_python = "PYTHON_EXEC" in os.environ  # its modules are not ours to look for
        found = other_python or PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
        if not found:
            raise UsageError(f"there is no module {top!r}", hint="the name after -m is that of a module, without .py")
        return
    if flags.get("no-python") and not as_file and os.sep not in script:
        if shutil.which(script) is None:
            raise UsageError(f"there is no program {script!r} on PATH")
        return
    path = Path(script)
    with reporting(UsageError, f"looking for the training script {script}"):
        if path.is_dir() and (flags.get("no-python") or not (path / "__main__.py").is_file()):
            raise UsageError(f"{script} is a directory without a __main__.py, not a training script")
        if not path.exists():
            raise UsageError(
                f"there is no training script {script!r}",
                hint="flags come before the script: rollback launch [FLAGS] train.py [ARGUMENTS OF train.py]",
            )


_STARTS_RANKS = (
    "notice: {script}, line {line}, starts processes by torch.multiprocessing.spawn: what they train is not protected. "
    "Unless they meet over file://, they wait for each other in vain where a rank comes to that line, under torchrun "
    "too. Instead, --nproc N starts the ranks, and each calls the function "
    'itself, as in main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), with MASTER_ADDR and MASTER_PORT as '
    "they are"
)


def _starts_ranks_at(script: str, flags: Mapping[str, str | bool]) -> int | None:
    """The line in which a Python script starts ranks by itself."""
    if flags.get("module") or flags.get("no-python"):
        return None
    try:
        return line_of_spawn(Path(script).read_bytes())
    except OSError:
        return None  # a folder or an archive, or its rank will say what is wrong with it


def default_run(script: str, flags: Mapping[str, str | bool]) -> Path:
    return Path("runs") / (script if flags.get("module") else Path(script).stem or Path(script).resolve().name)


def read_settings(given: Mapping[str, Any], skips_of: Path | None) -> Settings:
    """Settings with only those fields set that the command line names. Raises UsageError naming the flag at fault."""
    values = {name: value for name, value in given.items() if value is not None}
    if "skip" in values or skips_of is not None:
        windows = [parse_window(text, "--skip") for text in values.get("skip", [])]
        values["skip"] = merge_windows(windows + (_passed_over_by(skips_of) if skips_of is not None else []))
    if "skip_samples" in values or skips_of is not None:
        own = cumulative([parse_samples(text) for text in values.get("skip_samples", [])])
        others = _history_of(skips_of).quarantine if skips_of is not None else []
        values["skip_samples"] = together(own, [SamplesFrom(batch=it.batch, samples=it.samples) for it in others])
    try:
        return Settings(**values)
    except ValidationError as error:
        raise UsageError(explain(error, values)) from error


def _passed_over_by(run: Path) -> list[Window]:
    history, paths = _history_of(run), RunPaths(run)
    if not history.skip_list:
        return []
    with reporting(UsageError, f"--skips-of: reading {run}"):
        facts = [entry.fact for entry in read_journal(paths.train_journal).records]
        passed = [Window(first=fact.first, last=fact.last) for fact in facts if isinstance(fact, PassedOver)]
        # A crash may have kept the journal's line from being written.
        damaged: list[str] = []
        try:
            skipped = list(read_skipped(paths.skip_record(0), damaged))
        except ValueError as error:
            skipped, damaged = [], [str(error)]
    if damaged:
        raise UsageError(
            f"--skips-of: {damaged[0]}: what was skipped there is not known",
            hint=f"take that line out, and see in `rollback audit {run}` whether another --skip is to make up for it",
        )
    passed += [Window(first=one.batch, last=one.batch) for one in skipped]
    return passed_over_by(history, passed)


def _history_of(run: Path) -> History:
    paths = RunPaths(run)
    with reporting(UsageError, f"--skips-of: reading {run}"):
        found = paths.train_journal.is_file()
    if not found:
        raise UsageError(f"--skips-of: {run} is not a run directory (it has no journal of its ranks)")
    return fold_journal(paths.train_journal).history


def _restart_budget(own: int | None, torchruns: str | bool | None) -> int:
    """Restarts without progress. What --max-restarts says of a script without a guard, it says of one with a guard too,
    unless --restart-budget says something else."""
    if torchruns is not None and not re.fullmatch(r"\d+", str(torchruns)):
        raise UsageError(f"--max-restarts: {torchruns!r} is not a number of restarts")
    if own is not None:
        return own
    return RESTART_BUDGET if torchruns is None else int(torchruns)


_HANG_HINT = "auto reckons with the length of the steps, and never less than 5 minutes"


def hang_limits(after: str | None, stall: str | None) -> HangLimits:
    """Raises UsageError for what is neither one of their words nor a positive number of seconds."""
    limit = None if stall in (None, "off") else _seconds("--stall-after", stall, "off", None)
    if after in (None, "auto"):
        return HangLimits("auto", limit)
    return HangLimits(None if after == "off" else _seconds("--hang-after", after, "auto, off,", _HANG_HINT), limit)


def _seconds(flag: str, text: str, words: str, hint: str | None) -> float:
    try:
        seconds = float(text)
        if not 0 < seconds < float("inf"):
            raise ValueError("not positive")
    except ValueError as error:
        raise UsageError(f"{flag}: {text!r} is neither {words} nor a number of seconds", hint=hint) from error
    return seconds


def closing_line(result: RunResult, run: Path, command: Sequence[str]) -> str:
    """What to do next."""
    again = shlex.join(command)
    if not result.recorded and result.exit_code == ExitCode.RESUMABLE:  # before any rank could make a guard
        return f"stopped, resumable ({result.reason}); go on with `{again}`"
    if not result.recorded:
        how = "done" if result.exit_code == ExitCode.DONE else f"failed: {result.reason}"
        return f"{how}, without protection: no rank made a rollback.Guard, so nothing was recorded"
    host, directory = result.record or (None, str(run))
    audit = f"`rollback audit {shlex.quote(directory)}`" + (f" on {host}" if host else "")
    match result.exit_code:
        case ExitCode.DONE if not result.guarded:  # a flag or an earlier run has announced one
            return f"done, without protection: no rank made a rollback.Guard, so nothing was saved; see also {audit}"
        case ExitCode.DONE if result.record_at is not None:
            found = f"`rollback ring list {shlex.quote(result.record_at)}` shows its checkpoints"
            return f"done; this host has no record of the run, the one at {result.record_at} says so: {found}"
        case ExitCode.DONE:
            return f"done; {audit} tells what happened on the way"
        case ExitCode.RESUMABLE:
            where = result.reason.removeprefix("resumable ")  # "at step 40 of 59: the last save failed because ..."
            where = f"({where})" if where == result.reason else where
            then = "" if _says_how(result) else f"go on with `{again}`; "
            return f"stopped, resumable {where}; {then}{audit} tells what happened so far"
        case ExitCode.STRUCTURAL:
            return f"stopped, structural divergence: {result.reason}\n{audit} has the whole account"
        case ExitCode.NO_CHECKPOINT:
            return f"stopped, no usable checkpoint: {result.reason}\n{audit} has the whole account"
        case _:
            then = "" if _says_how(result) else f"once that is mended, go on with `{again}`; "
            return f"failed: {result.reason}; {then}see also {audit}"


def _says_how(result: RunResult) -> bool:
    """Whether the reason says already how to go on, and not by the same command."""
    return result.hint is not None and result.hint in result.reason
