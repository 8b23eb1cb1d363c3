"""The stacks of a hanging attempt: processes at the same place are one group. The suspect comes first."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rollback.inspect.why.why import ProcessStacks

_FRAMES = 8
_OTHER_FRAMES = 4
_STATES = {"T": "stopped", "t": "stopped", "D": "uninterruptible", "Z": "ended", "R": "running", "S": "waiting"}
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_LIBRARY = re.compile(r".*/(site-packages|dist-packages|python3\.\d+)/")
# From this frame outwards the frames show how a rank was forked, not its script.
_BIRTH = re.compile(r"rollback/agent/fork_server\.py:\d+ in (_run|run_script)$")  # `_run` in older runs


@dataclass(frozen=True)
class Group:
    """Processes that stand at the same place."""

    title: str
    """Which processes, and in which state."""
    lines: tuple[str, ...]
    """The place, innermost frame first."""


def groups(processes: Sequence[ProcessStacks], suspect: int | None) -> Iterator[Group]:
    """The groups: the suspect and its loader workers, then the other ranks, then their loader workers."""
    alike: dict[tuple[bool, bool, str, tuple[str, ...]], list[ProcessStacks]] = {}
    for process in sorted(processes, key=lambda item: (item.rank != suspect, not item.is_rank)):
        own = process.rank == suspect
        place = _where(process, _FRAMES if own else _OTHER_FRAMES)
        alike.setdefault((not own, not process.is_rank, _state(process), place), []).append(process)
    for (_, _, state, place), members in sorted(alike.items(), key=lambda item: item[0][:2]):
        yield Group(f"{_who(members)}: {state}", place)


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 5`."""
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _who(members: Sequence[ProcessStacks]) -> str:
    ranks = ranges(item.rank for item in members)
    plural = "s" if len({item.rank for item in members}) > 1 else ""
    if members[0].is_rank:
        return f"rank{plural} {ranks}" + ("" if plural else f", pid {members[0].pid}")
    if len(members) == 1:
        return f"below rank {ranks}, pid {members[0].pid} ({members[0].command})"
    return f"{len(members)} processes below rank{plural} {ranks} ({members[0].command})"


def _state(process: ProcessStacks) -> str:
    return _STATES.get(process.state or "", "state unknown")


def _where(process: ProcessStacks, limit: int) -> tuple[str, ...]:
    if process.stacks is None:
        return (f"no stacks: {process.why_none}",)
    frames = [_short(frame) for frame in _signalled_thread(process.stacks)]
    if any(frame.endswith("in get") and after.endswith("in _worker_loop") for frame, after in pairwise(frames)):
        return ("waits for the next batch to read",)
    born = next((place for place, frame in enumerate(frames) if _BIRTH.search(frame)), len(frames))
    frames = frames[:born]
    more = (f"... {len(frames) - limit} more: --json has them",) if len(frames) > limit else ()
    return (*frames[:limit], *more)


def _short(frame: str) -> str:
    """A frame as `file:line in function`; the path to the library is left out."""
    match = _FRAME.search(frame)
    return f"{_LIBRARY.sub('', match['file'])}:{match['line']} in {match['function']}" if match else frame


def _signalled_thread(stacks: str) -> list[str]:
    """The frames of the thread that handled the signal (the main thread); of the last thread, if none is marked."""
    threads: list[tuple[str, list[str]]] = []
    for line in stacks.splitlines():
        if line.startswith(("Current thread", "Thread")):
            threads.append((line, []))
        elif threads and line.strip():
            threads[-1][1].append(line.strip())
    marked = [frames for title, frames in threads if title.startswith("Current")]
    return (marked or [frames for _, frames in threads] or [[]])[-1]
