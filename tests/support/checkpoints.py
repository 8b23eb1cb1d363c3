"""Small checkpoints for tests, made by the real protocol."""

from pathlib import Path

from rollback.checkpoints import ring
from rollback.checkpoints.format import frozen
from rollback.checkpoints.format.direct import BLOCK, write_direct
from rollback.checkpoints.format.layout import header_space_for, lay_out
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardPiece
from rollback.rundir.paths import CheckpointName, RunPaths, shard_name
from rollback.system.region import Region

RANKS = 2


def manifest_of(seq: int, step: int) -> Manifest:
    return Manifest(
        name=CheckpointName.of(seq, step), seq=seq, step=step, batch=2 * step, epoch=0, timeline=0, attempt=1,
        created="2030-01-01T00:00:00+00:00", world_size=RANKS, shards=(),
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


def write_checkpoint(paths: RunPaths, seq: int, step: int, *, still: str | None = None) -> str:
    """Every step of the protocol, by both ranks, as their threads take them. still: frozen weights that it names."""
    manifest = manifest_of(seq, step)
    if still is not None:
        pieces = [ShardPiece("still", "U8", (64,), memoryview(still.encode().ljust(64)))]
        record = frozen.describe(pieces)
        assert frozen.is_there(paths, record) or frozen.store(paths, record, pieces)
        manifest = manifest.model_copy(update={"frozen": record})
    shards = []
    for rank in range(RANKS):
        directory = ring.begin_writing(paths, manifest.name)
        shards.append(ShardRecord.of(rank, write_direct(directory / shard_name(rank), shard_of(rank, step).view)))
    ring.commit(paths, manifest.model_copy(update={"shards": tuple(shards)}))
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
    extra = {path.name for path in paths.checkpoint(name).iterdir()} - {"manifest.json", shard_name(0), shard_name(1)}
    return held == [content(rank, manifest.step) for rank in range(RANKS)] and not extra


def damage(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
