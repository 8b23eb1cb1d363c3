"""SIGKILL for one rank of a job at a moment that nobody has chosen."""

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from rollback.rundir.heartbeats import read_heartbeats
from rollback.rundir.paths import RunPaths


def kill_a_rank(job: subprocess.Popen[str], run: Path, ranks: int, chance: random.Random, within: float = 1.5) -> None:
    """Within so many seconds from when all ranks have trained a step. Nothing where the job is over before."""
    pid = None
    while job.poll() is None and pid is None:
        beats = read_heartbeats(RunPaths(run).ranks)
        if len(beats) == ranks and min(beat.step for beat in beats.values()) > 0:
            pid = beats[chance.randrange(ranks)].pid
        time.sleep(0.002)
    time.sleep(chance.uniform(0, within))
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
