"""Pins: checkpoints that somebody wants to keep. A file for each, which only the operator's command writes.

Rank 0 looks at the pins when a checkpoint is about to leave the ring, and in no other place: which checkpoints the
ranks hold for a rollback is decided without them, alike on all ranks.
"""

import json
import os
from datetime import datetime, timezone

from rollback.errors import UsageError
from rollback.rundir.paths import CheckpointName, RunPaths
from rollback.system import files
from rollback.system.durable import sync_directory, write_file


def pin(paths: RunPaths, name: str) -> None:
    """Keep a checkpoint in the ring until `unpin`; a live run is not disturbed. Durable on return.

    Raises UsageError where there is no such checkpoint, also where it leaves the ring at this very moment, and OSError.
    """
    _require_in_ring(paths, name)
    files.make_directory(paths.pins)
    sync_directory(paths.root)
    write_file(paths.pin(name), json.dumps({"at": datetime.now(timezone.utc).isoformat(timespec="seconds")}).encode())
    try:
        # Rank 0 looks for the pin after it has taken the checkpoint out of sight: if it is still in sight, rank 0 will
        # find the pin and put it back.
        _require_in_ring(paths, name)
    except UsageError:
        unpin(paths, name)
        raise


def unpin(paths: RunPaths, name: str) -> None:
    """Let a checkpoint leave the ring when its time comes. Raises UsageError where it is not pinned, and OSError."""
    if CheckpointName.parse(name) is None or not is_pinned(paths, name):
        raise UsageError(f"{name} is not pinned", hint=f"pinned: {', '.join(pinned(paths)) or 'none'}")
    files.unlink(paths.pin(name))
    sync_directory(paths.pins)


def is_pinned(paths: RunPaths, name: str) -> bool:
    """Whether a checkpoint is pinned. Raises OSError where that cannot be told: the checkpoint must stay then."""
    try:
        os.lstat(paths.pin(name))
    except FileNotFoundError:
        return False
    return True


def pinned(paths: RunPaths) -> list[CheckpointName]:
    """Names of all pinned checkpoints, oldest first, whether or not they are in the ring. Raises OSError."""
    try:
        found = os.listdir(paths.pins)
    except FileNotFoundError:
        return []
    return CheckpointName.sorted(found)


def _require_in_ring(paths: RunPaths, name: str) -> None:
    if CheckpointName.parse(name) is None or not paths.checkpoint(name).is_dir():
        raise UsageError(
            f"there is no checkpoint {name} in {paths.ring}", hint="`rollback ring list` shows those that there are"
        )
