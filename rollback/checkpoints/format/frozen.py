"""frozen/<hash>.safetensors: weights that nothing trains, stored once in a run. docs/format.md, "Frozen weights".

Nothing here knows torch. Rank 0 alone writes and removes these files; a fetch adds some before the ranks start.
"""

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import xxhash

from rollback.checkpoints.format.manifest import FrozenRecord, read_manifest
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, hash_shard, write_shard
from rollback.errors import CheckpointUnusable
from rollback.rundir.paths import RunPaths
from rollback.system import files
from rollback.system.durable import sync_directory
from rollback.system.small_json import parse_json

METADATA = "frozen"
"""Key of a shard's metadata."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"\.?[0-9a-f]{32}\.safetensors(\.[\w-]{1,64})?")


def digest_of(data: memoryview) -> str:
    """Of the bytes of one tensor."""
    return xxhash.xxh3_128_hexdigest(data)


def write_digests(digests: Mapping[str, str]) -> str:
    """The text for a shard's metadata."""
    return json.dumps(digests, separators=(",", ":"))


def read_digests(metadata: Mapping[str, str]) -> dict[str, str]:
    """The names of the frozen weights of a checkpoint, each with its digest. Raises ValueError where they are none."""
    body = parse_json(metadata.get(METADATA, "{}"))
    if not isinstance(body, dict) or not all(isinstance(it, str) and _DIGEST.fullmatch(it) for it in body.values()):
        raise ValueError("the frozen weights are not names with digests")
    return body


def describe(pieces: Sequence[ShardPiece]) -> FrozenRecord:
    """The file that these weights make."""
    written = hash_shard(pieces)
    return FrozenRecord(size=written.size, hash=written.digest)


def is_there(paths: RunPaths, record: FrozenRecord) -> bool:
    """Whether the file is in the run directory, as far as a look without reading it can tell."""
    return files.size_of(paths.frozen / record.file) == record.size


def store(paths: RunPaths, record: FrozenRecord, pieces: Sequence[ShardPiece]) -> bool:
    """Write the file; when this returns it is durable. False: the weights are not those of the record any more.

    Raises OSError. In both cases no file is left.
    """
    files.make_directory(paths.frozen)
    arriving = arriving_at(paths, record)
    if write_shard(arriving, pieces, {}) != record.written:
        files.unlink(arriving)
        return False
    settle(paths, record)
    return True


def arriving_at(paths: RunPaths, record: FrozenRecord) -> Path:
    """Where the file is written before it has its name, without what a crash may have left there."""
    arriving = paths.frozen / f".{record.file}.tmp"
    files.unlink(arriving)
    return arriving


def settle(paths: RunPaths, record: FrozenRecord) -> None:
    """Give the file its name: all of it is written, synced and what it should be."""
    files.rename(paths.frozen / f".{record.file}.tmp", paths.frozen / record.file)
    sync_directory(paths.frozen)
    sync_directory(paths.root)


def sweep(paths: RunPaths, named: Collection[str]) -> None:
    """Remove the files that no checkpoint names. named: by the checkpoints in ring and slots; what is in quarantine is
    looked up. Rank 0 only, when an attempt begins. Raises OSError, and CheckpointUnusable, having removed nothing,
    where it cannot be told what a checkpoint in quarantine names."""
    if not paths.frozen.is_dir():
        return
    keep = {*named}
    for directory in paths.quarantine.glob("c*"):
        if (record := read_manifest(directory).frozen) is not None:
            keep.add(record.file)
    for name in os.listdir(paths.frozen):
        if name not in keep and _OURS.fullmatch(name):
            files.unlink(paths.frozen / name)


def read_frozen(paths: RunPaths, record: FrozenRecord, *, hashed: bool = False) -> ShardReader:
    """The file, open and verified as a shard is (see `ShardReader`). Raises CheckpointDamaged, CheckpointUnreadable."""
    return ShardReader(paths.frozen / record.file, record.written, hashed=hashed)


class FrozenFiles:
    """The frozen weights of many checkpoints: each file is verified once. Use as a context manager."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._found: dict[str, ShardReader | CheckpointUnusable] = {}
        self._opened = ExitStack()

    def open(self, record: FrozenRecord | None) -> ShardReader | None:
        """Raises CheckpointUnusable, the same each time."""
        if record is None:
            return None
        if record.hash not in self._found:
            try:
                self._found[record.hash] = self._opened.enter_context(read_frozen(self._paths, record))
            except CheckpointUnusable as error:
                self._found[record.hash] = error
        found = self._found[record.hash]
        if isinstance(found, CheckpointUnusable):
            raise found
        return found

    def __enter__(self) -> "FrozenFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
