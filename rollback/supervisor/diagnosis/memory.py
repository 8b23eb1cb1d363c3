"""Whether the kernel's OOM killer struck, by the counters of the memory cgroups of an attempt's processes.

The killer sends signal 9, which does not tell the reason. The kernel counts each kill in the cgroup of the killed
process: `oom_kill` in memory.events (cgroup v2, ancestors included) or memory.oom_control (v1, that group alone). It
also counts where the whole host was short of memory.
"""

from collections.abc import Iterable
from pathlib import Path

from rollback.system.cgroups import ROOT, memory_groups

_PROC = Path("/proc")


def counter_files(membership: str, root: Path = ROOT) -> list[Path]:
    """Files that may hold the counter, best first. membership: the text of the process's /proc/PID/cgroup.

    In a container the kernel's path may be missing below `root`; the mounted root is then the group itself.
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
    """The value of `oom_kill` in memory.events or memory.oom_control; None: it is missing."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


class OomCounters:
    """Counts OOM kills since the first look at each process's cgroup. An unreadable cgroup counts none."""

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
        """OOM kills since the first look."""
        return sum(max(0, (_read(path) or 0) - before) for path, before in self._before.items())


def _read(path: Path) -> int | None:
    try:
        return parse_counter(path.read_text())
    except OSError:
        return None
