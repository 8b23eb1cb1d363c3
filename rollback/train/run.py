"""The run that a guard has attached to: its paths, its ranks, and its record at the start."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rollback.checkpoints.format.manifest import Manifest
from rollback.config import Settings
from rollback.environment import ENV_SUPERVISOR
from rollback.errors import UsageError
from rollback.facts.history import History
from rollback.rundir.lock import RunLock
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder

_attached: set[tuple[int, Path]] = set()
"""Processes in which a guard has attached to a run, and its directory: this one, and any that it was forked from."""


def supervised() -> bool:
    """Whether `rollback launch` started this process."""
    return bool(os.environ.get(ENV_SUPERVISOR))


def require_first(paths: RunPaths) -> None:
    """Raise UsageError where a guard of this very process has attached to a run before.

    A launch has one run directory. A second guard would take the first one's checkpoints for its own: it would put the
    first training's weights into its model, and train nothing.
    """
    if any(process == os.getpid() for process, _ in _attached):
        raise UsageError(
            f"a second guard in one job: {paths.root} is the run directory of the first one's training",
            hint="make one guard, in front of all loops (while, folds, seeds). For several trainings, call "
            "`rollback launch --run DIR` once for each. Where the first one ran out of memory and a decorator begins "
            "anew with smaller batches (accelerate's find_executable_batch_size), begin with batches that fit",
        )


def has_been_here(paths: RunPaths) -> bool:
    """Whether a guard of this very process has attached to this run before."""
    return (os.getpid(), paths.root) in _attached


class CheckpointAtStart(NamedTuple):
    """A checkpoint that is held when an attempt starts."""

    manifest: Manifest
    good: bool = False
    slot: int | None = None
    """The slot of the fast tier in which it lies on every host."""
    healthy: int = 0
    """The healthy verdicts that it has had in earlier attempts, on steps that this one does not train again."""
    in_ring: bool = True
    """Whether it is in the run directory."""


@dataclass
class AttachedRun:
    """The run that a guard has attached to: `attach` makes it. All ranks have the same, apart from `lock` and
    from what `ranks` says of this rank."""

    paths: RunPaths
    ranks: Ranks
    settings: Settings
    record: Recorder
    history: History
    """The history at the start of this attempt."""
    attempt: int = 1
    run_id: str = ""
    lock: RunLock | None = None
    """Rank 0 has it where no supervisor holds the run directory."""
    held: Sequence[CheckpointAtStart] = ()
    """The existing checkpoints, oldest first."""
    next_seq: int = 0
    """The number of the next checkpoint."""
    restored: Manifest | None = None
    """The checkpoint that this attempt goes on from; None: the run begins."""
    ranks_before: int | None = None
    """The number of ranks of that checkpoint, if it differs from the present number."""
    _process: int = field(default_factory=os.getpid)
    _left: bool = False

    def __post_init__(self) -> None:
        _attached.add((self._process, self.paths.root))

    def leave(self) -> bool:
        """Whether this rank leaves the run now. True once, and only in the process that attached.

        A forked loader worker inherits the exit handlers, and is not the rank.
        """
        leaves = not self._left and os.getpid() == self._process
        self._left |= leaves
        return leaves
