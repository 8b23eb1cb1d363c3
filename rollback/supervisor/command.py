"""What torchrun is called with, and what the ranks find in their environment. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollback.config import (
    ENV_ATTEMPT,
    ENV_HEARTBEATS,
    ENV_REFUSAL,
    ENV_RUN,
    ENV_SETTINGS,
    ENV_SUPERVISOR,
    Settings,
)
from rollback.instructions import ENV_PRELOAD, ENV_TORCHRUN, MODULE, Instructions
from rollback.supervisor.flags import names_a_rendezvous

LARGE_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x200000"}
"""glibc copies past the caches from this size on (2 MiB), half as fast again as through them. By itself it begins at a
share of the cache that the processor claims to have, which is hundreds of megabytes in many virtual machines."""


@dataclass(frozen=True)
class LaunchedJob:
    """What the user asked to be run.

    flags: torchrun's flags by name, a text for those that take a value, True for switches that are on; also those that
    torchrun's environment variables stand for. script: a path, or what --module and --no-python make of it. arguments:
    the script's own. other_flags: those that only the installed torchrun knows, as words of its command line.
    secret_args: options of the script whose values are written nowhere. runner: a script that runs it, with arguments.
    """

    flags: Mapping[str, str | bool]
    script: str
    arguments: Sequence[str]
    other_flags: Sequence[str] = ()
    secret_args: Sequence[str] = ()
    runner: Sequence[str] = ()

    @property
    def max_restarts(self) -> int:
        """Restarts of a script without a guard."""
        return int(self.flags.get("max-restarts", "0"))


def torchrun_command(job: LaunchedJob, nodes: int | None = None) -> list[str]:
    """The command line of an attempt. nodes: how many take part in it, where the job leaves that open.

    The number of restarts is there for the ranks to read: torchrun never restarts them itself. Two parties that restart
    the same job hide attempts from each other's budget.
    """
    flags = {"max-restarts": "0", **job.flags}
    if nodes is not None:
        flags["nnodes"] = str(nodes)
    if not names_a_rendezvous(flags):
        flags["standalone"] = True  # a free port instead of a fixed one: two jobs on one host do not meet
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    return [sys.executable, "-m", MODULE, *options, *job.other_flags, *job.runner, job.script, *job.arguments]


def rank_environment(
    environment: Mapping[str, str],
    *,
    run: Path,
    attempt: int,
    settings: Settings,
    supervisor: str,
    instructions: Instructions,
    preload: bool = False,
    heartbeats: str = "",
) -> dict[str, str]:
    """The environment of torchrun and, through it, of every rank.

    supervisor: as `name_process` names it. run: made absolute, since a script may change its working directory.
    instructions: for torchrun's process. preload: ranks are forked from a process that has imported torch. heartbeats:
    where the board for them is; nothing for none.
    """
    return {
        **LARGE_COPIES,
        **environment,
        ENV_RUN: str(run.absolute()),
        ENV_ATTEMPT: str(attempt),
        ENV_SETTINGS: settings.model_dump_json(exclude_unset=True),
        ENV_SUPERVISOR: supervisor,
        ENV_HEARTBEATS: heartbeats,
        ENV_REFUSAL: instructions.refusal,
        ENV_TORCHRUN: json.dumps(asdict(instructions)),
        **({ENV_PRELOAD: "1"} if preload else {}),
    }


def threads_of_ranks(job: LaunchedJob, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun adds to the environment of several ranks on a node; what is preloaded must find it there."""
    ranks = str(job.flags.get("nproc-per-node", ""))
    several = ranks.isdigit() and int(ranks) > 1
    return {"OMP_NUM_THREADS": "1"} if several and "OMP_NUM_THREADS" not in environment else {}
