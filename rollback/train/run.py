"""The run that a guard has attached to: where it lies, who takes part in it, and how its record stood at the start."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from rollback.checkpoints.manifest import Manifest
from rollback.config import Settings
from rollback.facts.history import History
from rollback.rundir.lock import RunLock
from rollback.rundir.paths import RunPaths
from rollback.train.comm.ranks import Ranks
from rollback.train.comm.recorder import Recorder


@dataclass
class AttachedRun:
    """Made by `rollback.train.attach.attach`; what works for a run is given it whole. The same on all ranks, but for
    what `ranks` says of this one and for `lock`, which rank 0 has where no supervisor holds it.

    history: as at the start of this attempt. manifests: of the checkpoints that are held, oldest first. slots: in use,
    by checkpoint. next_seq: of the next checkpoint. restored: the checkpoint that this attempt goes on from, None where
    it begins anew. ranks_before: how many ranks that one is of, if it is another number than now.
    """

    paths: RunPaths
    ranks: Ranks
    settings: Settings
    record: Recorder
    history: History
    attempt: int = 1
    run_id: str = ""
    lock: RunLock | None = None
    manifests: list[Manifest] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    next_seq: int = 0
    restored: Manifest | None = None
    ranks_before: int | None = None
    _process: int = field(default_factory=os.getpid)
    _left: bool = False

    def leave(self) -> bool:
        """Whether this rank leaves the run now: once, and in the process that has attached to it.

        A loader worker, forked with all that is to be done at exit, is not the rank that ends.
        """
        leaves = not self._left and os.getpid() == self._process
        self._left |= leaves
        return leaves
