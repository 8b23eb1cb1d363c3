"""Whether a job has many nodes, which node this is, and the lock that makes it unique."""

import contextlib
import hashlib
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata

import filelock

import rollback
from rollback.config import Settings
from rollback.errors import RollbackError, RunDirectoryError, RunInUse, UsageError, reporting
from rollback.instructions import MeetingPoint
from rollback.rundir.paths import RunPaths
from rollback.supervisor.buddy.buddy import Buddy
from rollback.supervisor.patience import patiently
from rollback.supervisor.torchrun.command import LaunchedJob
from rollback.supervisor.torchrun.flags import endpoint_of
from rollback.supervisor.torchrun.start_conditions import conditions_of
from rollback.system import files
from rollback.system.processes import name_process

NODE_TIMEOUT = 600.0
_LAST_CALL = 30.0  # torchrun's own


@dataclass(frozen=True)
class NodePlace:
    """This node among the nodes of a job."""

    least: int
    """The fewest nodes with which an attempt begins."""
    most: int
    """The most nodes. Where it is larger than `least`, an attempt begins `last_call` seconds after enough nodes
    have come."""
    name: str
    """The name of this node; the same at each launch where the number of nodes is fixed."""
    launch: str
    """A unique name of this supervisor process."""
    host: str
    pid: int
    timeout: float
    """Seconds that missing nodes have to come, or to come back."""
    last_call: float = _LAST_CALL
    endpoint: MeetingPoint | None = None
    """Where hosts without a shared run directory meet; None: the rendezvous has no store of torch's."""
    spares: int = 0
    """Nodes that wait for the place of another one."""
    address: str = ""
    """Where other hosts reach this one."""
    command: Mapping[str, str] = field(default_factory=dict)
    """What this node would run, as `command_of`."""

    @property
    def seated(self) -> bool:
        """Whether the leader gives the nodes their ranks. Else torchrun's flags do."""
        return self.least < self.most or self.spares > 0

    def new_master(self, say: Callable[[str], None], interrupted: Callable[[], bool] = lambda: False) -> str:
        """HOST:PORT on this host at which the ranks of one attempt can meet: no key of an earlier one is there. What
        the system refuses is tried again for some seconds, as by `patiently`. Raises RollbackError."""
        return f"{self.address}:{patiently(_free_port, say, interrupted)}"


def _free_port() -> int:
    with reporting(RollbackError, "looking for a free port, at which ranks can meet"), socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class OwnNode:
    """What a supervisor of many has here, whether it leads or follows."""

    paths: RunPaths
    place: NodePlace
    say: Callable[[str], None]
    """Takes a line for people."""
    ring: str | None = None
    """The URL of the job's ring."""
    buddy: Buddy | None = None
    """None: no snapshots are copied to or from this host."""


def place_among_nodes(
    flags: Mapping[str, str | bool],
    timeout: float = NODE_TIMEOUT,
    spares: int = 0,
    command: Mapping[str, str] | None = None,
) -> NodePlace | None:
    """This node's place; None: the job has one node. flags: torchrun's, by name. command: as `command_of`.

    Raises UsageError where --nnodes is no number and no range, and where --node-rank names a node too many.
    """
    least, most = _range(str(flags.get("nnodes", "1")))
    if most + spares == 1:
        return None
    rank = str(flags.get("node-rank", ""))
    if spares and rank.isdecimal() and int(rank) >= most + spares:
        raise UsageError(
            f"--node-rank {rank}: with --nnodes {most} and --spare-nodes {spares} it is 0 to {most + spares - 1}",
            hint="give each node a number of its own; which of them wait is decided when they meet",
        )
    host, pid = socket.gethostname(), os.getpid()
    # Where a range is allowed, nobody waits for a certain node, and several nodes may be on one host.
    own = f"{host}-{pid}" if least < most else host
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"node-{flags.get('node-rank', own)}")
    launch = f"{host}:{name_process(pid)}"
    configuration = _configuration(flags)
    endpoint = _endpoint(flags, configuration)
    return NodePlace(
        least, most, name, launch, host, pid, timeout, _last_call(configuration), endpoint, spares,
        str(flags.get("local-addr", "")) or own_address(endpoint), command or {},
    )  # fmt: skip


def own_address(endpoint: MeetingPoint | None) -> str:
    """Where other hosts reach this one: by the interface by which this host reaches the endpoint, else by its name."""
    if endpoint is not None:
        with contextlib.suppress(OSError):
            (family, *_, there), *_ = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_DGRAM)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(there)  # of datagrams: nothing is sent
                return str(probe.getsockname()[0])
    return socket.getfqdn()


def command_of(job: LaunchedJob, settings: Settings, options: Mapping[str, int]) -> dict[str, str]:
    """What a node would run, by part: digests and versions, so that nodes can be compared. Secrets are not in it.

    options: of the launch, by name, on which the nodes of a job must agree."""
    conditions = conditions_of(job, {})
    told = {"arguments": conditions["arguments"], "settings": settings.model_dump(mode="json", exclude_unset=True)}
    digests = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32] for name, value in told.items()}
    versions = {"Python": platform.python_version(), "rollback": rollback.__version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torch"] = metadata.version("torch")
    least, most = _range(str(job.flags.get("nnodes", "1")))
    ranks = str(job.flags.get("nproc-per-node", "1"))
    numbers = {"--nnodes": f"{least}:{most}", "--nproc": str(int(ranks)) if ranks.isdecimal() else ranks}
    numbers |= {name: str(value) for name, value in options.items()}
    return {"script": conditions["script"] or "", **digests, **versions, **numbers}


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The parts of this node's command that another node's has otherwise; empty: there are none."""
    return ", ".join(name for name in sorted(own) if own[name] != other.get(name))


def _range(nnodes: str) -> tuple[int, int]:
    least, _, most = nnodes.partition(":")
    if not re.fullmatch(r"\d+(:\d+)?", nnodes) or not 0 < int(least) <= int(most or least):
        raise UsageError(f"--nnodes {nnodes}: neither a number of nodes nor a range MIN:MAX")
    return int(least), int(most or least)


def _configuration(flags: Mapping[str, str | bool]) -> dict[str, str]:
    """--rdzv-conf. torchrun itself refuses wrong values."""
    return dict(pair.split("=", 1) for pair in str(flags.get("rdzv-conf", "")).split(",") if "=" in pair)


def _endpoint(flags: Mapping[str, str | bool], configuration: Mapping[str, str]) -> MeetingPoint | None:
    """The endpoint at which hosts can meet, with the host that torchrun's store would be on."""
    found = endpoint_of(flags)
    if found is None or found[1] == 0:
        return None
    if flags.get("rdzv-backend", "static") == "static":
        is_host = str(flags["node-rank"]) == "0" if "node-rank" in flags else None
    else:
        is_host = {"1": True, "true": True, "0": False, "false": False}.get(configuration.get("is_host", "").lower())
    keys = f"rollback/{flags.get('rdzv-id', 'none')}"
    return MeetingPoint(*found, is_host, keys)


def _last_call(configuration: Mapping[str, str]) -> float:
    """`last_call_timeout` in --rdzv-conf."""
    try:
        return float(configuration.get("last_call_timeout", _LAST_CALL))
    except ValueError:
        return _LAST_CALL


@contextmanager
def membership(paths: RunPaths, place: NodePlace) -> Iterator[None]:
    """The lock of this node in the run. A supervisor holds it while it leads or follows.

    Raises RunInUse where another supervisor is this node, RunDirectoryError where the lock cannot be taken.
    """
    path = paths.node_lock(place.name)
    lock = filelock.FileLock(path, timeout=0, mode=files.file_mode(), thread_local=False)
    with reporting(RunDirectoryError, f"taking the lock {path}", "the run directory must be writable"):
        files.make_directory(path.parent)
        files.require_ours(path)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise RunInUse(
                f"{place.name} of the run {paths.root} is there already: another supervisor holds {path}",
                hint="each node has a --node-rank of its own; without it, nodes are told apart by their host's name",
            ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what lies there says nothing: the lock itself counts
            files.unlink(path)
        lock.release()
        with contextlib.suppress(OSError):  # other nodes are still there
            paths.nodes.rmdir()
