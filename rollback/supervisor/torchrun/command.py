"""The command line of torchrun, and the environment of the ranks. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rollback.config import Settings, settings_as_environment
from rollback.environment import (
    ENV_APART,
    ENV_ATTEMPT,
    ENV_HEARTBEATS,
    ENV_PRELOAD,
    ENV_REFUSAL,
    ENV_RUN,
    ENV_SUPERVISOR,
    ENV_TORCHRUN,
)
from rollback.instructions import MODULE, Instructions, program
from rollback.supervisor.torchrun.flags import names_a_rendezvous

LARGE_COPIES = {"GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x200000"}
"""From this size on (2 MiB) glibc copies without the caches, which is 1.5 times as fast. Its default is a share of the
cache size that the processor reports: hundreds of megabytes in many virtual machines."""


@dataclass(frozen=True)
class LaunchedJob:
    """The job that the user wants to run."""

    flags: Mapping[str, str | bool]
    """torchrun's flags by name: a text for a flag that takes a value, True for a switch that is on. Flags that come
    from torchrun's environment variables are among them."""
    script: str
    """A path, or what --module and --no-python make of it."""
    arguments: Sequence[str]
    """The script's own arguments."""
    other_flags: Sequence[str] = ()
    """Flags that only the installed torchrun knows, as words of its command line."""
    secret_args: Sequence[str] = ()
    """Options of the script whose values are written nowhere."""
    runner: Sequence[str] = ()
    """A script that runs it, with arguments of its own."""

    @property
    def max_restarts(self) -> int:
        """Restarts of a script without a guard."""
        return int(self.flags.get("max-restarts", "0"))


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of an attempt, as their leader has gathered them."""

    count: int
    rank: int
    """This node's rank among them."""
    master: str
    """HOST:PORT of a store on the node of rank 0, at which torchrun's processes and the ranks meet."""


def torchrun_command(job: LaunchedJob, group: NodeGroup | None = None) -> list[str]:
    """The command line of an attempt. group: the nodes in it, where the flags do not say so.

    torchrun passes the number of restarts on to the ranks and never restarts them itself: the supervisor's budget must
    count all attempts.
    """
    flags = {"max-restarts": "0", **job.flags}
    if group is not None:
        flags["nnodes"] = str(group.count)
        host, _, port = group.master.rpartition(":")
        flags.pop("standalone", None)
        # Each of them, since torchrun takes what is not given from the environment.
        flags |= {"rdzv-backend": "static", "rdzv-endpoint": group.master, "node-rank": str(group.rank)}
        flags |= {"master-addr": host, "master-port": port}
    if not names_a_rendezvous(flags):
        flags["standalone"] = True  # a free port, so that two jobs on one host do not collide
    options = [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]
    return [*program(MODULE), *options, *job.other_flags, *job.runner, job.script, *job.arguments]


def rank_environment(
    environment: Mapping[str, str],
    *,
    run: Path,
    attempt: int,
    settings: Settings,
    supervisor: str,
    instructions: Instructions,
    preload: bool = False,
    heartbeats: str,
    apart: bool = False,
) -> dict[str, str]:
    """The environment of torchrun, which passes it on to all ranks.

    run: becomes absolute, since a script may change its working directory. supervisor: its name from `name_process`.
    instructions: for torchrun's process. preload: ranks are forked from a process that has imported torch. heartbeats:
    the path of the heartbeat board; empty: there is none. apart: every host has a run directory of its own.
    """
    return {
        **LARGE_COPIES,
        **environment,
        ENV_RUN: str(run.absolute()),
        ENV_ATTEMPT: str(attempt),
        **settings_as_environment(settings),
        ENV_SUPERVISOR: supervisor,
        ENV_HEARTBEATS: heartbeats,
        ENV_REFUSAL: instructions.refusal,
        ENV_TORCHRUN: json.dumps(asdict(instructions)),
        **({ENV_PRELOAD: "1"} if preload else {}),
        **({ENV_APART: "1"} if apart else {}),
    }


def threads_of_ranks(job: LaunchedJob, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun adds to the environment of several ranks on a node. A preloaded process needs it earlier."""
    ranks = str(job.flags.get("nproc-per-node", ""))
    several = ranks.isdigit() and int(ranks) > 1
    return {"OMP_NUM_THREADS": "1"} if several and "OMP_NUM_THREADS" not in environment else {}
