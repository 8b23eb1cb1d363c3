"""record-elsewhere.json: in the run directory of a host that has no journals, since another host keeps the record."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import read_json

_LIMIT = 1 << 14


def write_elsewhere(
    paths: RunPaths, host: str, directory: str, say: Callable[[str], None], *, handed_over: int = 0
) -> None:
    """Write down where the record is, and what it has of this host's files: see `read_handed_over`."""
    told = {"host": host, "directory": directory, "handed_over": handed_over}
    try:
        write_file(paths.record_elsewhere, json.dumps(told).encode(), durable=False)
    except OSError as error:
        say(f"writing {paths.record_elsewhere} failed ({error})")


def forget_elsewhere(paths: RunPaths) -> None:
    """The record is here from now on."""
    with contextlib.suppress(OSError):
        files.unlink(paths.record_elsewhere)


def read_elsewhere(paths: RunPaths) -> tuple[str, str] | None:
    """Host and directory of the record; None: it is here, or nobody knows.

    A host that followed after it had led has an old record, too. What is written to last counts.
    """
    if _written(paths.train_journal) > _written(paths.record_elsewhere):
        return None
    try:
        body = read_json(paths.record_elsewhere, _LIMIT)
        host, directory = str(body["host"])[:255], str(body["directory"])[:4096]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (host, directory) if f"{host}{directory}".isprintable() else None


def read_handed_over(paths: RunPaths) -> int:
    """The record has what was written here until then, in nanoseconds of the files' times; 0: nobody knows of any."""
    try:
        return int(read_json(paths.record_elsewhere, _LIMIT).get("handed_over", 0))
    except (OSError, ValueError, TypeError, AttributeError):
        return 0


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
