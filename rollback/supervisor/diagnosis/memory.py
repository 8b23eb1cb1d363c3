"""Whether the kernel's OOM killer struck: the counters of the memory cgroups in which an attempt's processes live.

A process that it kills has got signal 9, which says nothing. The kernel counts each in the victim's cgroup: `oom_kill`
in memory.events (cgroup v2, ancestors included) or memory.oom_control (v1, that group alone), also where the whole host
was short of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rollback.system.cgroups import ROOT, memory_groups

_PROC = Path("/proc")


def counter_files(membership: str, root: Path = ROOT) -> list[Path]:
    """Files that may hold the counter, best first, for a process whose /proc/PID/cgroup reads `membership`.

    In a container the path that the kernel states need not exist below `root`; the mounted root is then its own group.
    """
    found: list[Path] = []
    for group in memory_groups(membership, root):
        if group.unified:
            beside_v1 = root / "unified" / group.directory.relative_to(root)
            found += [base / "memory.events" for base in (group.directory, beside_v1, root)]
        else:
            found += [base / "memory.oom_control" for base in (group.directory, group.home)]
    return found


def parse_counter(text: str) -> int | None:
    """The value of `oom_kill` in memory.events or memory.oom_control; None where it is not there."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


class OomCounters:
    """Counts OOM kills since each process's cgroup was first looked at. Where that cannot be read, none are counted."""

    def __init__(self, root: Path = ROOT, proc: Path = _PROC) -> None:
        self._root, self._proc = root, proc
        self._before: dict[Path, int] = {}
        self._watched: set[int | str] = set()

    def watch(self, pids: Iterable[int | str] = ("self",)) -> None:
        """Look at the cgroups of these processes, once each."""
        for pid in pids:
            if pid in self._watched:
                continue
            self._watched.add(pid)
            try:
                files = counter_files((self._proc / str(pid) / "cgroup").read_text(), self._root)
            except (OSError, ValueError):
                continue
            for path in files:
                if (count := _read(path)) is not None:
                    self._before.setdefault(path, count)
                    break

    def kills(self) -> int:
        """OOM kills since then."""
        return sum(max(0, (_read(path) or 0) - before) for path, before in self._before.items())


def _read(path: Path) -> int | None:
    try:
        return parse_counter(path.read_text())
    except OSError:
        return None
