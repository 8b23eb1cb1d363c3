"""Buddy copies: what this host keeps in its memory of another host's slots (`--replicas 2`).

    BASE/rollback-UID/RUN_ID/buddy-00001-02/    of seat 1, from its slot 2: shards, and manifest.json while it is whole

Believed as little as a slot: without its manifest it means nothing. A host keeps one whole copy, of one seat, and for a
while a second one that arrives.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from rollback.checkpoints.fast_tier.slots import BUDDY_COPIES, SlotPaths, require_own
from rollback.checkpoints.format.manifest import Manifest, read_manifest
from rollback.errors import CheckpointDamaged
from rollback.rundir.paths import MANIFEST
from rollback.system import files
from rollback.system.durable import write_file

_NAME = re.compile(r"buddy-(\d{5,9})-(\d{2,4})")


@dataclass(frozen=True)
class BuddyCopy:
    """A whole copy: the shards of the ranks of one seat. slot: in which they lie on their own host."""

    seat: int
    slot: int
    manifest: Manifest
    directory: Path

    @property
    def shards(self) -> list[Path]:
        return [path for shard in self.manifest.shards if (path := self.directory / shard.file).exists()]


def newest(tier: SlotPaths, seat: int) -> BuddyCopy | None:
    """The newest whole copy of a seat that can be believed. Raises OSError."""
    found = []
    for path in tier.root.glob(BUDDY_COPIES):
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == seat:
            try:
                found.append(BuddyCopy(seat, int(match[2]), read_manifest(path, in_slot=True), path))
            except CheckpointDamaged:
                continue  # it is arriving, or leaving
    return max(found, key=lambda copy: copy.manifest.seq, default=None)


def prepare(tier: SlotPaths, seat: int, slot: int) -> Path:
    """An empty directory for a copy that arrives. Raises OSError, RunDirectoryError."""
    directory = tier.root / f"buddy-{seat:05d}-{slot:02d}"
    files.unlink(directory / MANIFEST)
    files.remove_directory(directory)
    directory.mkdir(0o700)
    require_own(directory)
    return directory


def keep(tier: SlotPaths, directory: Path, manifest: bytes) -> None:
    """A copy has arrived: it counts from now on, and all others are given up. Raises OSError."""
    write_file(directory / MANIFEST, manifest, durable=False)
    give_up(tier, all_but=directory)


def give_up(tier: SlotPaths, all_but: Path | None = None) -> None:
    """Give the memory of copies back. Raises OSError."""
    for directory in tier.root.glob(BUDDY_COPIES):
        if directory != all_but:
            files.unlink(directory / MANIFEST)
            files.remove_directory(directory)
