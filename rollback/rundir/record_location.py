"""record-elsewhere.json: in the run directory of a host that has no journals, since another host keeps the record."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import write_file
from rollback.system.small_json import read_json

_LIMIT = 1 << 16


class HandedOver(NamedTuple):
    """What the record has of this host's files, as far as somebody knows."""

    until: int = 0
    """What was written until then, in nanoseconds of the files' times."""
    ends: Mapping[str, int] = {}
    """Of each file that grows, by its path in the run directory: so many bytes of it."""


_NOTHING = HandedOver()


def write_record_location(
    paths: RunPaths, host: str, directory: str, say: Callable[[str], None], *, has: HandedOver = _NOTHING
) -> None:
    """Write down where the record is, and what it has of this host's files."""
    told = {"host": host, "directory": directory, "handed_over": has.until, "ends": dict(has.ends)}
    try:
        write_file(paths.record_location, json.dumps(told).encode(), durable=False)
    except OSError as error:
        say(f"writing {paths.record_location} failed ({error})")


def forget_record_location(paths: RunPaths) -> None:
    """The record is here from now on."""
    with contextlib.suppress(OSError):
        files.unlink(paths.record_location)


def read_record_location(paths: RunPaths) -> tuple[str, str] | None:
    """Host and directory of the record; None: it is here, or nobody knows.

    A host that followed after it had led has an old record, too. What is written to last counts.
    """
    if _written(paths.train_journal) > _written(paths.record_location):
        return None
    try:
        body = read_json(paths.record_location, _LIMIT)
        host, directory = str(body["host"])[:255], str(body["directory"])[:4096]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return (host, directory) if f"{host}{directory}".isprintable() else None


def read_handed_over(paths: RunPaths) -> HandedOver:
    """What the record has of this host's files."""
    try:
        body = read_json(paths.record_location, _LIMIT)
        ends = body.get("ends", {})
        return HandedOver(int(body.get("handed_over", 0)), {str(name): int(end) for name, end in ends.items()})
    except (OSError, ValueError, TypeError, AttributeError):
        return _NOTHING


def _written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
