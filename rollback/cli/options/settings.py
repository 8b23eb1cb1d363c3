"""Settings and limits of a launch, from its command line. What a flag says wrongly is a UsageError that names it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollback.cli.options.parameters import RESTART_BUDGET
from rollback.cli.options.values import parse_samples, parse_window, together
from rollback.config import Settings, explain
from rollback.errors import UsageError, reporting
from rollback.facts.fact import SamplesFrom, Window
from rollback.facts.history import History, passed_over_by
from rollback.facts.training import PassedOver
from rollback.rundir.journal.folded_journal import fold_journal
from rollback.rundir.journal.journal import read_journal
from rollback.rundir.paths import RunPaths
from rollback.rundir.skip_records import read_skipped
from rollback.supervisor.diagnosis.hang import HangLimits

_HANG_HINT = "auto reckons with the length of the steps, and never less than 5 minutes"


def read_settings(given: Mapping[str, Any], skips_of: Path | None) -> Settings:
    """Settings with only those fields set that the command line names. Raises UsageError naming the flag at fault."""
    values = {name: value for name, value in given.items() if value is not None}
    if "skip" in values or skips_of is not None:
        windows = [parse_window(text, "--skip") for text in values.get("skip", [])]
        values["skip"] = Window.merged(windows + (_passed_over_by(skips_of) if skips_of is not None else []))
    if "skip_samples" in values or skips_of is not None:
        own = [[parse_samples(text)] for text in values.get("skip_samples", [])]
        others = _history_of(skips_of).quarantine if skips_of is not None else []
        values["skip_samples"] = together(*own, [SamplesFrom(batch=it.batch, samples=it.samples) for it in others])
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


def restart_budget_of(own: int | None, torchruns: str | bool | None) -> int:
    """Restarts without progress. What --max-restarts says of a script without a guard, it says of one with a guard too,
    unless --restart-budget says something else."""
    if torchruns is not None and not re.fullmatch(r"\d+", str(torchruns)):
        raise UsageError(f"--max-restarts: {torchruns!r} is not a number of restarts")
    if own is not None:
        return own
    return RESTART_BUDGET if torchruns is None else int(torchruns)


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
        raise UsageError(f"{flag}: {text!r} is neither {words} nor a number of seconds above 0", hint=hint) from error
    return seconds
