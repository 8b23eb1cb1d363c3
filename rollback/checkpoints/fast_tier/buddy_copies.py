"""Buddy copies: what this host keeps in its memory of another host's slots (`--replicas 2`).

    BASE/rollback-UID/RUN_ID/buddy-00001-02-c000007-s00000140/    a whole copy with manifest: of seat 1, from its slot 2
    BASE/rollback-UID/RUN_ID/arriving-copy/                       one that arrives: means nothing to a reader
    BASE/rollback-UID/RUN_ID/arriving-slot/                       likewise, one that will be a slot of this host

Whatever arrives has a name that nothing else matches, and gets its own by one rename, whole and verified. So a copy
that breaks off costs nothing that was there. A host keeps one copy, of one seat, and for a while a second that arrives.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollback.checkpoints.fast_tier.mark_copies import CopiedMarks
from rollback.checkpoints.fast_tier.slots import BUDDY_COPIES, COPIED_MARKS, SlotPaths, give_back, require_own
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.errors import CheckpointUnusable
from rollback.rundir.paths import MANIFEST
from rollback.system import files
from rollback.system.durable import write_file

_NAME = re.compile(r"buddy-(\d{5,9})-(\d{2,4})-c\d+-s\d+")


@dataclass(frozen=True)
class BuddyCopy:
    """A whole copy: the shards of the ranks of one seat. slot: in which they lie on their own host."""

    seat: int
    slot: int
    manifest: Manifest
    directory: Path


def copies_of(tier: SlotPaths, seat: int) -> list[BuddyCopy]:
    """The copies of a seat that can be believed: one, or two where this host was about to remove the older. And its
    part of a last snapshot that was made here, of its end marks. Raises OSError."""
    found = []
    made_here = CopiedMarks(tier, seat).slots
    for number in made_here.numbers() if made_here.root.exists() else ():
        with contextlib.suppress(CheckpointUnusable):
            directory = made_here.slot(number)
            found.append(BuddyCopy(seat, number, read_manifest(directory, in_slot=True), directory))
    for path in tier.root.glob(BUDDY_COPIES):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == seat:
            with contextlib.suppress(CheckpointUnusable):  # it is leaving
                found.append(BuddyCopy(seat, int(match[2]), read_manifest(path, in_slot=True), path))
    return found


@contextlib.contextmanager
def arriving(tier: SlotPaths, what: Literal["copy", "slot"]) -> Iterator[Path]:
    """An empty directory for shards that arrive. It is removed, unless it has got another name by then. One of each at
    a time. Raises OSError, RunDirectoryError."""
    directory = tier.root / f"arriving-{what}"
    files.remove_directory(directory)  # of a process that was killed
    directory.mkdir(0o700)
    require_own(directory)
    try:
        yield directory
    finally:
        files.remove_directory(directory)


def keep(tier: SlotPaths, arrived: Path, seat: int, slot: int, name: str, manifest: bytes) -> None:
    """The shards of a copy have arrived: it counts from now on, and all others are given up. Raises OSError."""
    write_file(arrived / MANIFEST, manifest, durable=False)
    directory = tier.root / f"buddy-{seat:05d}-{slot:02d}-{name}"
    files.remove_directory(directory)  # one of that name whose manifest was not the same
    arrived.rename(directory)
    for other in (*tier.root.glob(BUDDY_COPIES), *tier.root.glob(f"{COPIED_MARKS}/slot-*")):
        if other != directory:
            give_back(other)
