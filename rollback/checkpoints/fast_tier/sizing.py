"""How much memory the fast tier may take: decided by `slots_that_fit`, from what `free_memory` measures."""

import contextlib
import os
from pathlib import Path

import psutil

from rollback.system import cgroups

LEAST_SLOTS = 4
"""One to write into, and three that never leave: the newest good checkpoint, the next good one, the newest."""

_UNLIMITED = 1 << 60


def slots_that_fit(slot_bytes: int, free: int, keep: int) -> int:
    """How many slots a host gives a run that keeps so many checkpoints: 0 where the ranks should write to disk instead.

    slot_bytes: what all ranks of this host store of one checkpoint. free: bytes that could be had, `free_memory` and
    what the run's tier holds already. At most half of that is taken: the rest is the training's.
    """
    fitting = min(keep + 1, free // 2 // max(slot_bytes, 1))
    return fitting if fitting >= LEAST_SLOTS else 0


def free_memory(base: Path) -> int:
    """Bytes that files under `base` could take: free in that file system, available on this host and to our cgroup.

    Raises OSError where there is no such file system.
    """
    status = os.statvfs(base)
    return min(status.f_bavail * status.f_frsize, psutil.virtual_memory().available, _free_in_cgroups())


def bytes_of_tier(root: Path) -> int:
    """Bytes that a fast tier takes now, copies of another host's slots included: else what was enough for the slots of
    one attempt would not be for those of the next. What vanishes meanwhile takes nothing: copies arrive and leave."""
    taken = 0
    for directory, _, names in [*os.walk(root)][1:]:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                taken += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return taken


def _free_in_cgroups() -> int:
    """What the tightest of our memory cgroups leaves; a very large number where there is none."""
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:
        return _UNLIMITED
    free = _UNLIMITED
    for group in cgroups.memory_groups(membership, cgroups.ROOT):
        limit, used = ("max", "current") if group.unified else ("limit_in_bytes", "usage_in_bytes")
        for directory in (group.directory, *group.directory.parents):
            if not directory.is_relative_to(group.home):
                break
            free = min(free, _left(directory, f"memory.{limit}", f"memory.{used}"))
    return free


def _left(group: Path, limit: str, used: str) -> int:
    try:
        allowed, taken = int((group / limit).read_text()), int((group / used).read_text())
        stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return _UNLIMITED
    cached = sum(int(stat.get(key, 0)) for key in ("inactive_file", "active_file"))  # is given up when asked for
    return max(0, allowed - taken + cached)
