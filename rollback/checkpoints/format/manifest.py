"""manifest.json: the record that makes a directory of shards a checkpoint. Written last, believed only if it checks."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from rollback.checkpoints.format import packs
from rollback.checkpoints.format.shard import Written
from rollback.errors import CheckpointDamaged, once_more_if_unreadable, reading_checkpoint
from rollback.rundir import seal
from rollback.rundir.paths import (
    FORMAT,
    FORMAT_OF_PACKS,
    FORMATS,
    MANIFEST,
    READS,
    CheckpointName,
    has_packs,
    shard_name,
)
from rollback.system.durable import read_small_file
from rollback.system.small_json import fault_of, parse_json

MANIFEST_LIMIT = 16 << 20


class ShardRecord(BaseModel, frozen=True, extra="forbid"):
    file: str
    size: int = Field(ge=8)
    hash: str = Field(pattern=r"^[0-9a-f]{32}$")
    start: int | None = Field(None, ge=0)
    """Where it begins in a pack; None: the file is its own, and the manifest does not have the field."""

    @model_serializer(mode="wrap")
    def _without_start(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = handler(self)
        if self.start is None:
            del body["start"]
        return body

    @classmethod
    def of(cls, rank: int, written: Written) -> "ShardRecord":
        return cls(file=shard_name(rank), size=written.size, hash=written.digest)

    @property
    def written(self) -> Written:
        return Written(self.size, self.hash)


class FrozenRecord(BaseModel, frozen=True, extra="forbid"):
    """The file with the frozen weights of a run (`frozen`)."""

    size: int = Field(ge=8)
    hash: str = Field(pattern=r"^[0-9a-f]{32}$")

    @property
    def file(self) -> str:
        return f"{self.hash}.safetensors"

    @property
    def written(self) -> Written:
        return Written(self.size, self.hash)


@dataclass(frozen=True)
class CheckpointFile:
    """A file of a checkpoint, with the shards in it by rank: one, or in a pack several."""

    name: str
    shards: Mapping[int, ShardRecord]

    @property
    def contents(self) -> list[tuple[int, Written]]:
        """Where each shard begins, and what it is, in order."""
        return [(shard.start or 0, shard.written) for shard in self.shards.values()]

    @property
    def size(self) -> int:
        start, last = self.contents[-1]
        return start + last.size


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """Content of manifest.json; the fields are those of docs/format.md. over: it was taken behind the last batch of an
    epoch."""

    format: int = FORMAT
    name: str
    seq: int = Field(ge=0)
    step: int = Field(ge=0)
    batch: int = Field(ge=0)
    epoch: int = Field(ge=0)
    over: bool = False
    timeline: int = Field(ge=0)
    attempt: int = Field(ge=1)
    created: str
    world_size: int = Field(ge=1)
    shards: tuple[ShardRecord, ...]
    frozen: FrozenRecord | None = None

    def to_json(self) -> bytes:
        body = self.model_dump(mode="json")
        if (key := seal.present()) is not None:
            body["seal"] = key.of("manifest", _canonical(body))
        return json.dumps({**body, "check": check_of(body)}, indent=1).encode()

    @property
    def content(self) -> str:
        """A hash that tells this checkpoint from all others, whichever host's manifest it is: without `created`."""
        return check_of(self.model_dump(mode="json", exclude={"created"}))

    @property
    def sort_key(self) -> tuple[int, int]:
        """By which checkpoints are sorted, oldest first, as `CheckpointName.sort_key`."""
        return self.seq, self.step

    @property
    def bytes(self) -> int:
        """Of the shards; what the checkpoint shares with others does not count."""
        return sum(shard.size for shard in self.shards)

    @property
    def files(self) -> list[CheckpointFile]:
        """What holds the shards, in the order of the lowest rank in each."""
        found: dict[str, dict[int, ShardRecord]] = {}
        for rank, shard in enumerate(self.shards):
            found.setdefault(shard.file, {})[rank] = shard
        return [CheckpointFile(name, shards) for name, shards in found.items()]

    def packed(self, groups: Collection[Collection[int]] | None = None) -> "Manifest":
        """The same checkpoint, with the shards of each of these groups of ranks in one file (default: as it lies in the
        run directory). Unchanged where there are not so many ranks that packs are needed, and where it has them."""
        if not has_packs(self.world_size) or self.format == FORMAT_OF_PACKS:
            return self
        shards, groups = list(self.shards), packs.groups_in_run(self.world_size) if groups is None else groups
        for rank, place in packs.places([shard.size for shard in shards], groups).items():
            shards[rank] = shards[rank].model_copy(update={"file": place.file, "start": place.start})
        return self.model_copy(update={"format": FORMAT_OF_PACKS, "shards": tuple(shards)})


def check_of(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(_canonical(body).encode()).hexdigest()


def parse_checked(data: bytes) -> dict[str, Any]:
    """A JSON object without its check value, which is that of the rest. Raises ValueError where it is not."""
    body = parse_json(data)
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if body.pop("check", None) != check_of(body):
        raise ValueError("its check value does not match its content")
    return body


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def read_manifest(directory: Path, *, in_slot: bool = False) -> Manifest:
    """The manifest of a checkpoint directory. Raises CheckpointDamaged unless whole and consistent with its name;
    CheckpointUnreadable where the disk fails.

    in_slot: of the fast tier, where a directory's name says nothing of what is in it.
    """
    path = directory / MANIFEST

    def read() -> bytes:
        with reading_checkpoint(f"reading the manifest {path}"):
            return read_small_file(path, MANIFEST_LIMIT)

    try:
        data = once_more_if_unreadable(read)
    except ValueError as error:
        raise CheckpointDamaged(f"the manifest {path} is damaged: {error}") from error
    return parse_manifest(data, None if in_slot else directory.name, str(path))


def parse_manifest(data: bytes, name: str | None, where: str) -> Manifest:
    """The manifest of the checkpoint `name` (None: of any), found at `where`. Raises CheckpointDamaged."""
    try:
        body = parse_checked(data)
        on_it, key = body.pop("seal", None), seal.present()
        if key is not None and not key.is_on("manifest", _canonical(body), on_it):
            raise ValueError("its seal is missing, or not of this key")
        manifest = Manifest.model_validate(body)
    except ValueError as error:
        raise CheckpointDamaged(f"the manifest {where} is damaged: {fault_of(error)}") from error
    if manifest.format not in FORMATS:
        raise CheckpointDamaged(f"the manifest {where} has format {manifest.format}; this version reads {READS}")
    if name not in (None, manifest.name) or manifest.name != CheckpointName.of(manifest.seq, manifest.step):
        raise CheckpointDamaged(f"the manifest {where} is that of another checkpoint, {manifest.name!r}")
    # Counted first: a stated world size of a billion must not be spelt out.
    if len(manifest.shards) != manifest.world_size or not all(map(_is_as_written, manifest.files)):
        raise CheckpointDamaged(f"the manifest {where} does not list one shard for each of {manifest.world_size} ranks")
    return manifest


def _is_as_written(file: CheckpointFile) -> bool:
    """Whether the name of a file, and the places in it, are those that rollback gives."""
    shards = file.shards
    if [shard.start for shard in shards.values()] == [None]:
        return [file.name] == [shard_name(rank) for rank in shards]
    sizes = {rank: shard.size for rank, shard in shards.items()}
    found = {rank: packs.Place(file.name, shard.start) for rank, shard in shards.items()}
    return packs.places(sizes, [shards]) == found
