"""Small checkpoints for tests, made by the real protocol."""

from pathlib import Path

import pytest

from rollback.checkpoints import ring
from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.direct import BLOCK, write_direct
from rollback.checkpoints.format.layout import header_space_for, lay_out
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.packs import place_in_run
from rollback.checkpoints.format.shard import ShardPiece
from rollback.rundir import paths as names
from rollback.rundir.paths import CheckpointName, RunPaths, has_packs
from rollback.system.region import Region

RANKS = 2


LAYOUTS = ["files", "packs"]
"""Of a checkpoint: with a file for each shard, and as where there are too many ranks for that."""


def lay_out_as(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if layout == "packs":
        monkeypatch.setattr(names, "MOST_FILES", RANKS)


def manifest_of(seq: int, step: int, ranks: int = RANKS, attempt: int = 1) -> Manifest:
    return Manifest(
        name=CheckpointName.of(seq, step), seq=seq, step=step, batch=2 * step, epoch=0, timeline=0, attempt=attempt,
        created="2030-01-01T00:00:00+00:00", world_size=ranks, shards=(),
    )  # fmt: skip


def content(rank: int, step: int) -> bytes:
    return bytes((rank + step + place) % 256 for place in range(64))


def shard_of(rank: int, step: int) -> Region:
    """A shard in memory, as a rank leaves it for its thread to write: whole blocks, and a few bytes more."""
    kinds, metadata = {f"w{rank}": ("U8", (64,))}, {"local": "{}"}
    layout = lay_out(kinds, header_space_for(kinds, metadata, BLOCK))
    region = Region(layout.size)
    region.view[: layout.header_space] = layout.head(metadata)
    region.view[layout.header_space :] = content(rank, step)
    return region


def write_checkpoint(paths: RunPaths, seq: int, step: int, *, still: str | None = None, attempt: int = 1) -> str:
    """Every step of the protocol, by both ranks, as their threads take them. still: frozen weights that it names."""
    manifest = manifest_of(seq, step, attempt=attempt)
    if still is not None:
        pieces = [ShardPiece("still", "U8", (64,), memoryview(still.encode().ljust(64)))]
        record = frozen.describe(pieces)
        assert frozen.is_there(paths, record) or frozen.store(paths, record, pieces)
        manifest = manifest.model_copy(update={"frozen": record})
    shards = []
    regions = [shard_of(rank, step) for rank in range(RANKS)]
    sizes = [region.size for region in regions] if has_packs(RANKS) else None
    for rank, region in enumerate(regions):
        directory, place = ring.begin_writing(paths, manifest.name, manifest.attempt), place_in_run(rank, sizes)
        shards.append(ShardRecord.of(rank, write_direct(directory / place.file, region.view, place.start)))
    ring.commit(paths, manifest.model_copy(update={"shards": tuple(shards)}).packed())
    return manifest.name


def whole(paths: RunPaths, name: str) -> bool:
    """Whether a listed checkpoint is complete and holds what was written. Raises CheckpointDamaged where it is not."""
    sound, damaged = ring.manifests(paths)
    assert not damaged, damaged
    manifest = next(manifest for manifest in sound if manifest.name == name)
    readers = ring.open_shards(paths.checkpoint(name), manifest)
    held = [bytes(reader.data(f"w{rank}")) for rank, reader in enumerate(readers)]
    for reader in readers:
        reader.close()
    if manifest.frozen is not None:
        frozen.read_frozen(paths, manifest.frozen).close()
    expected = {"manifest.json", *(file.name for file in manifest.files)}
    extra = {path.name for path in paths.checkpoint(name).iterdir()} - expected
    return held == [content(rank, manifest.step) for rank in range(RANKS)] and not extra


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
