"""`rollback drill`: planned faults on the user's own job, before weeks are bet on it."""

import os
from pathlib import Path
from typing import Any

import typer

from rollback.cli.answers import answering, show
from rollback.cli.options.parameters import LAUNCH_PARAMETERS, as_arguments, declares, flag, parameter, switch
from rollback.cli.options.settings import read_settings
from rollback.config import Settings
from rollback.errors import ExitCode, UsageError
from rollback.supervisor.preflight import require_script
from rollback.supervisor.torchrun.flags import FLAGS, endpoint_of, read_flags
from rollback.terminal.messages import say

_PANEL = "The drill"
_RUN = ("arguments", "restart_budget", "grace", "hang_after", "secret_args", "preload", "torchrun_flag")
# Of launch's parameters those that a drill hands on. Others (the run directory, the trackers, the ring at a URL) are
# the real run's, and so is a ring that the script names.
_OF_THE_REAL_RING = {"ring", "checkpoint_every", "keep_durable"}
_PASSED_ON = {*_RUN, *(Settings.model_fields.keys() - _OF_THE_REAL_RING), *(flag.parameter for flag in FLAGS)}
_NO_RING = "--ring="
DRILL_CODES = "Exit codes: 0 all rows passed; 1 a row failed, or the job does not run by itself; 2 usage."

DRILL_PARAMETERS = (
    parameter("script", str | None, typer.Argument(metavar="SCRIPT", help="training script, as for rollback launch")),
    flag("only", list[str], "FAULT", "this fault only; several times for several", panel=_PANEL),
    switch("listed", _PANEL, "list the faults and exit", name="--list"),
    flag("steps", int, "N", "updates of each run (default: by pace)", panel=_PANEL, least=60),
    flag("scratch", Path, "DIR", "new directory for the runs", panel=_PANEL),
    switch("json", _PANEL, "print the report as JSON (top-level `schema`: 1)"),
    *(given for given in LAUNCH_PARAMETERS if given.name in _PASSED_ON),
)


@declares(DRILL_PARAMETERS)
def drill(
    *,
    script: str | None,
    arguments: list[str] | None,
    only: list[str] | None,
    listed: bool,
    steps: int | None,
    scratch: Path | None,
    json: bool,
    **given: Any,
) -> None:
    """Let planned faults strike short runs of a job, and see what becomes of it.

    Flags, script and arguments as for rollback launch, but for flags of the real run (--run, --ring, trackers and the
    like): leave these out. Each run has a run directory of its own below --scratch; the job's real one is not touched.
    Runs are ended in the guard, so what stands behind the script's loop is not reached; what the script writes by
    itself on the way, it writes."""
    from rollback.drill.drill import Drill, scratch_for
    from rollback.drill.faults import FAULTS, choose
    from rollback.drill.text import print_report
    from rollback.drill.trials import DrillStage

    if listed:
        with answering():
            for fault in FAULTS:
                print(f"{fault.name:15} {fault.says}; expected: {fault.expected.value}")
        return
    if script is None:
        raise UsageError("there is nothing to drill", hint="rollback drill [FLAGS] train.py [ARGUMENTS OF train.py]")
    faults = choose(only)
    flags = read_flags(given, os.environ)
    require_script(script, flags)
    endpoint_of(flags)
    if flags.get("nnodes", "1") not in ("1", "1:1"):
        raise UsageError("--nnodes: a drill runs on one node", hint="what a lost node does is not drilled")
    settings = {name: given[name] for name in Settings.model_fields if name in given}
    read_settings(settings, None)  # a setting that cannot be is refused before anything is started
    stage = DrillStage(scratch_for(script, scratch), [*as_arguments(given), _NO_RING], [script, *(arguments or [])])
    own_hang_limit = given["hang_after"] is not None
    report = Drill(script, stage, faults, steps, settings, say, own_hang_limit).run()
    show(report, print_report, json=json)
    raise typer.Exit(ExitCode.DONE if report.passed else ExitCode.FAILED)
