"""Which file system a path is on."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_ESCAPED = re.compile(r"\\([0-7]{3})")
"""How the kernel spells a blank, a tab, a line's end and a backslash in a name. All else stands as it is."""


@dataclass(frozen=True)
class Mount:
    point: str
    kind: str
    """Its type: `ext4`, `nfs4`, ..."""
    source: str
    """Its device or server."""


def mount_of(path: Path, table: str | None = None) -> Mount:
    """The file system of a path, whose links are resolved; of the type `unknown` where that cannot be told.

    table: the text of /proc/self/mountinfo. The last mount on a point is the one in force.
    """
    best = Mount("/", "unknown", "unknown")
    for line in (os.fsdecode(Path("/proc/self/mountinfo").read_bytes()) if table is None else table).split("\n"):
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(rest) < 2:
            continue
        point = _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 8)), fields[4])
        if path.is_relative_to(point) and len(point) >= len(best.point):
            best = Mount(point, rest[0], rest[1])
    return best
