"""What the kernel's control groups say of a process: in which it is, and how many processors they grant."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryGroup:
    """A control group that counts memory. It need not be there: in a container the kernel states a path that is that of
    the host."""

    unified: bool
    """Of cgroup v2."""
    home: Path
    """Where its hierarchy is mounted; in a container often the group itself."""
    directory: Path


def memory_groups(membership: str, root: Path) -> list[MemoryGroup]:
    """Of a process whose /proc/PID/cgroup reads `membership`."""
    found: list[MemoryGroup] = []
    for _, controllers, where in (line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2):
        if not controllers:
            found.append(MemoryGroup(True, root, root / where.lstrip("/")))
        elif "memory" in controllers.split(","):
            found.append(MemoryGroup(False, root / "memory", root / "memory" / where.lstrip("/")))
    return found


def usable_cores() -> float:
    """Processors that this process, and with it the others of its host, may use: its affinity, and the quota of a
    container."""
    affinity = float(len(os.sched_getaffinity(0)))
    try:
        granted, period = (ROOT / "cpu.max").read_text().split()
        return min(affinity, int(granted) / int(period))
    except (OSError, ValueError):  # there is no such group, or no limit ("max")
        return affinity


def cores_here() -> int:
    """As `usable_cores`, whole ones, and at least one."""
    return max(1, int(usable_cores()))
