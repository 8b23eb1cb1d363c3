"""What is to be launched, and torchrun's command line for it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollback.config import Settings
from rollback.instructions import MODULE, program
from rollback.rundir.paths import RunPaths
from rollback.supervisor.diagnosis.hang import HangLimits
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
class LaunchOptions:
    paths: RunPaths
    job: LaunchedJob
    settings: Settings
    restart_budget: int
    """Restarts without progress."""
    grace: float
    """Seconds that the ranks have to stop and save when they are told to."""
    hang: HangLimits
    """How long the ranks may show no progress."""
    node_timeout: float
    """Seconds that the launch waits for missing nodes."""
    spare_nodes: int
    """Nodes that wait for the place of another one."""
    replicas: int
    """On how many hosts each snapshot is in memory, at most: 2 with a copy on another host."""
    preload: bool
    """Whether ranks are forked from a process that has imported torch (`rollback.agent.fork_server`)."""
    expects_guard: bool
    """Whether the launch is about a guard, so that the script must have one."""
    fetches: bool = True
    """Whether the run goes on from the ring's URL, where that has it."""


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
    script = [*job.runner, job.script, *job.arguments]
    if "--" not in job.arguments:  # of which torchrun takes the first one out
        script.insert(0, "--")  # else it would look among the script's options for its own, and call --run ambiguous
    return [*program(MODULE), *options, *job.other_flags, *script]


def threads_of_ranks(job: LaunchedJob, environment: Mapping[str, str]) -> dict[str, str]:
    """What torchrun adds to the environment of several ranks on a node. A preloaded process needs it earlier."""
    ranks = str(job.flags.get("nproc-per-node", ""))
    several = ranks.isdigit() and int(ranks) > 1
    return {"OMP_NUM_THREADS": "1"} if several and "OMP_NUM_THREADS" not in environment else {}
