"""What supervisors saw of the processes of a hanging attempt: stacks/attempt-AAAA/processes*.json, one file for each
node."""

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field, TypeAdapter

from rollback.system import files
from rollback.system.durable import open_regular, write_file
from rollback.system.small_json import read_json

_LIMIT = 4 << 20
_STACK_LIMIT = 1 << 20


class ProcessSeen(BaseModel, frozen=True):
    """A rank, or a process below one, before it was killed."""

    rank: int
    pid: int
    command: str = Field(description="its name, as /proc has it")
    is_rank: bool
    state: str | None = Field(description="as in /proc: R, S, D, T, Z; null where it could not be read")
    waits_in: str | None = Field(description="the kernel function that it waits in, where that may be read")
    offset: int | None = Field(description="where its stacks begin in the rank's file; null where there are none")
    size: int = Field(description="of its stacks, in bytes")
    why_none: str | None = Field(description="why there are no stacks")


_LIST = TypeAdapter(list[ProcessSeen])


def write_processes(path: Path, seen: list[ProcessSeen]) -> None:
    """Write the records, durable on return. Raises OSError."""
    files.make_directory(path.parent)
    write_file(path, _LIST.dump_json(seen))


def read_processes(paths: Iterable[Path]) -> list[ProcessSeen]:
    """The records of all nodes, by rank. Raises OSError, or ValueError where one fails validation."""
    seen = [item for path in paths for item in _LIST.validate_python(read_json(path, _LIMIT))]
    return sorted(seen, key=lambda item: (item.rank, not item.is_rank, item.pid))


def read_stacks(path: Path, offset: int, size: int) -> str:
    """A part of a rank's stacks. Raises OSError or ValueError."""
    with open_regular(path) as file:
        file.seek(max(0, offset))
        return file.read(max(0, min(size, _STACK_LIMIT))).decode("utf-8", "replace")
