"""Takes the stacks of ranks and loader workers, and the state of each process, before a hanging job is ended.

On a signal a rank writes its stacks into its own file (`rollback.train.process.heartbeat`); forked loader workers do
the same. The supervisor of the host writes processes.json beside these files: which part of a file belongs to which
process, and which stacks are missing and why. A stopped process does not handle the signal, and a process without the
handler would die of it, so these get no signal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import psutil

from rollback.environment import STACKS_SIGNAL
from rollback.rundir.paths import RunPaths
from rollback.rundir.stacks import ProcessSeen, write_processes
from rollback.system.files import size_of
from rollback.system.processes import state_of

_PATIENCE = 3.0  # for the ranks, and again for each round of their workers
_QUIET = 0.15  # seconds without growth after which a dump is complete
_ROUNDS = 16


def take_stacks(
    paths: RunPaths, attempt: int, ranks: Mapping[int, psutil.Process], node: str | None = None
) -> tuple[int, ...]:
    """Make the ranks of this host and the processes below them write their stacks. Returns the ranks that did.

    First all ranks write, then one process below each rank, and so on, since these share the rank's file. node: the
    node's name in a job on many nodes, where each node writes a record of its own. Raises OSError where the record
    cannot be written.
    """
    seen: list[ProcessSeen] = []
    families: dict[int, Sequence[psutil.Process]] = {
        rank: [process, *_below(process)][:_ROUNDS] for rank, process in ranks.items()
    }
    for place, turn in enumerate(zip_longest(*families.values())):
        processes = {rank: process for rank, process in zip(families, turn, strict=True) if process is not None}
        seen += _one_turn(paths, attempt, processes, are_ranks=place == 0)
    write_processes(
        paths.processes(attempt, node), sorted(seen, key=lambda item: (item.rank, not item.is_rank, item.pid))
    )
    return tuple(sorted(item.rank for item in seen if item.is_rank and item.size))


def _one_turn(
    paths: RunPaths, attempt: int, processes: Mapping[int, psutil.Process], *, are_ranks: bool
) -> list[ProcessSeen]:
    """Take the stacks of at most one process of each rank."""
    states = {rank: state_of(process.pid) for rank, process in processes.items()}
    reasons = {rank: _why_none(process.pid, states[rank]) for rank, process in processes.items()}
    files = {rank: paths.rank_stacks(attempt, rank) for rank in processes}
    before = {rank: size_of(file) for rank, file in files.items()}
    for rank, process in processes.items():
        if reasons[rank] is None:
            try:
                process.send_signal(STACKS_SIGNAL)
            except psutil.Error:
                reasons[rank] = "it ended"
    asked = [rank for rank, reason in reasons.items() if reason is None]
    _wait_until_quiet(lambda: [size_of(files[rank]) for rank in asked], [before[rank] for rank in asked])
    found = []
    for rank, process in processes.items():
        size = size_of(files[rank]) - before[rank]
        reason = reasons[rank] or (None if size else f"it did not answer within {_PATIENCE:.0f} s")
        found.append(
            ProcessSeen(
                rank=rank, pid=process.pid, command=_read(process.pid, "comm") or "?", is_rank=are_ranks,
                state=states[rank], waits_in=_waits_in(process.pid),
                offset=before[rank] if size else None, size=size, why_none=reason,
            )
        )  # fmt: skip
    return found


def _wait_until_quiet(sizes: Callable[[], list[int]], before: list[int]) -> None:
    """Wait until each file has grown and none grows any more, or until the time is over."""
    deadline, last, since = time.monotonic() + _PATIENCE, before, time.monotonic()
    while before and time.monotonic() < deadline:
        now = sizes()
        if now != last:
            last, since = now, time.monotonic()
        all_have_written = all(size > start for size, start in zip(now, before, strict=True))
        if all_have_written and time.monotonic() - since >= _QUIET:
            return
        time.sleep(0.02)


def _why_none(pid: int, state: str | None) -> str | None:
    """Why a process cannot write its stacks; None: it can."""
    if state is None:
        return "it is gone"
    if state in ("T", "t"):
        return "it is stopped: a stopped process cannot write its stacks"
    if state == "Z":
        return "it has ended"
    return None if _handles(pid) else "it has no handler for the signal: no Guard yet, or not a forked loader worker"


def _handles(pid: int) -> bool:
    """Whether a process handles STACKS_SIGNAL, which would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (int(STACKS_SIGNAL) - 1) & 1)


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _read(pid: int, name: str) -> str | None:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip() or None
    except OSError:
        return None


def _waits_in(pid: int) -> str | None:
    """The kernel's function; it says 0 of a process that waits in none, or that it tells nobody about."""
    found = _read(pid, "wchan")
    return None if found == "0" else found
