"""Whether a job has many nodes, which of them this is, and that no other supervisor is the same one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import filelock
import psutil

from rollback.errors import RunDirectoryError, RunInUse, UsageError
from rollback.rundir.paths import RunPaths
from rollback.supervisor.flags import value_of
from rollback.supervisor.processes import name_process

NODE_TIMEOUT = 600.0


@dataclass(frozen=True)
class Place:
    """This node among those of a job.

    count: number of nodes. name: this one's, the same each time it is launched. launch: names this supervisor process
    as no other. timeout: seconds that missing nodes have to come, or to come back.
    """

    count: int
    name: str
    launch: str
    host: str
    pid: int
    timeout: float


def place_among_nodes(
    flags: Mapping[str, str | bool], environment: Mapping[str, str], timeout: float = NODE_TIMEOUT
) -> Place | None:
    """This node's place; None for a job on one node. Raises UsageError for a number of nodes that is not fixed."""
    count = _count(str(value_of("nnodes", flags, environment) or "1"))
    if count == 1:
        return None
    host, process = socket.gethostname(), psutil.Process()
    rank = value_of("node-rank", flags, environment)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"node-{host if rank is None else rank}")
    return Place(count, name, f"{host}:{name_process(process)}", host, process.pid, timeout)


def _count(nnodes: str) -> int:
    least, _, most = nnodes.partition(":")
    if not least.isdigit() or int(least) == 0 or (most and most != least):
        raise UsageError(
            f"--nnodes {nnodes}: a run has a fixed number of nodes",
            hint="give one number; a node that is lost is waited for, and the others go on when it is back",
        )
    return int(least)


class Membership:
    """Held by the supervisor of a node while it leads or follows: no second one may be this node of the run.

    Raises RunInUse, or RunDirectoryError where the lock cannot be taken, on entering.
    """

    def __init__(self, paths: RunPaths, place: Place) -> None:
        self._paths, self._place = paths, place
        self._lock = filelock.FileLock(paths.node_lock(place.name), timeout=0, thread_local=False)

    def __enter__(self) -> Membership:
        path = self._paths.node_lock(self._place.name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except filelock.Timeout as error:
            raise RunInUse(
                f"{self._place.name} of the run {self._paths.root} is there already: another supervisor holds {path}",
                hint="each node has a --node-rank of its own; without it, nodes are told apart by their host's name",
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"taking the lock {path}: {error.strerror or error}", hint="the run directory must be writable"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._paths.node_lock(self._place.name).unlink(missing_ok=True)
        self._lock.release()
        try:
            self._paths.nodes.rmdir()
        except OSError:
            return  # other nodes are still there


def file_system_of(directory: os.PathLike[str] | str) -> str:
    """Type of the file system that a directory lies on, as in /proc/mounts; `unknown` where that cannot be told."""
    best, found = -1, "unknown"
    real = os.path.realpath(directory)
    for partition in psutil.disk_partitions(all=True):
        mount = partition.mountpoint.rstrip("/")
        if (real == mount or real.startswith(mount + "/")) and len(mount) > best:
            best, found = len(mount), partition.fstype
    return found
