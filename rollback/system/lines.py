"""Files of JSON lines that a process appends to, and whose last line a crash may tear."""

import math
import os
from io import TextIOWrapper
from pathlib import Path

from rollback.system import files
from rollback.system.durable import end_of_lines

_LINE = 1 << 12  # bytes that a line has at most, amply


class LineWriter:
    """Appends JSON lines; buffered, so that a line a step costs microseconds. Opening truncates a torn tail.

    The constructor, `write` and `flush` raise OSError.
    """

    def __init__(self, path: Path) -> None:
        files.make_directory(path.parent)
        self.last = _cut_torn_tail(path)
        """The last line that was there; empty: none."""
        descriptor = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._file: TextIOWrapper = os.fdopen(descriptor, "a", encoding="utf-8", buffering=1 << 16)

    def write(self, line: str) -> None:
        self._file.write(line + "\n")

    def flush(self, *, durable: bool = False) -> None:
        self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _cut_torn_tail(path: Path) -> str:
    """Returns the last line that is whole."""
    if not path.exists():
        return ""
    with os.fdopen(files.open_file(path, os.O_RDWR), "rb+") as file:
        end = end_of_lines(file)
        file.truncate(end)
        file.seek(max(0, end - _LINE))
        return file.read().rstrip(b"\n").rpartition(b"\n")[2].decode("utf-8", "replace")


def json_number(value: float | None) -> float | str | None:
    """JSON has no number for what is not finite: a text stands for it."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
