"""Packs: files with several shards, where a checkpoint would else have too many files. Pure; docs/format.md, "Packs".

Nothing moves between hosts for it. Whoever has a shard writes it at its place, so each place follows from what all of
them know: the sizes of the shards.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollback.rundir import paths
from rollback.rundir.paths import pack_name, shard_name

PAGE = 1 << 16
"""The largest page of a kernel on which training runs (arm64's and POWER's; others have 4,096 bytes), and a multiple of
the blocks of `direct`."""


@dataclass(frozen=True)
class Place:
    """Where a shard lies: the file, and where it begins in a pack. None: it has the file to itself."""

    file: str
    start: int | None


def groups_in_run(ranks: int) -> list[range]:
    """The ranks that share a pack in the run directory: neighbours, as few as keep the number of files."""
    share = -(-ranks // (paths.MOST_FILES - 1))
    return [range(first, min(first + share, ranks)) for first in range(0, ranks, share)]


def places(sizes: Sequence[int] | Mapping[int, int], groups: Collection[Collection[int]]) -> dict[int, Place]:
    """The place of each rank of these groups in their packs, by the sizes of all shards: whole pages, so that each can
    be written past the page cache, and no two hosts write to one page, whatever kernel each has."""
    found = {}
    for group in filter(None, groups):
        file, start = pack_name(group), 0
        for rank in sorted(group):
            found[rank] = Place(file, start)
            start += -(-sizes[rank] // PAGE) * PAGE
    return found


def place_in_run(rank: int, sizes: Sequence[int] | None) -> Place:
    """The place of a rank's shard in the run directory. sizes: of all shards; None: there are no packs."""
    return Place(shard_name(rank), None) if sizes is None else places(sizes, groups_in_run(len(sizes)))[rank]
