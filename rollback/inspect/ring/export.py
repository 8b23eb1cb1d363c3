"""Exports the model weights of a checkpoint as a plain safetensors file (`rollback ring export`)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollback.checkpoints import ring
from rollback.checkpoints.contents import Contents, Stored, StoredParts, read_contents
from rollback.checkpoints.frozen import FrozenFiles
from rollback.checkpoints.manifest import Manifest
from rollback.checkpoints.shard import ShardPiece, write_shard
from rollback.checkpoints.tiers import held, locate
from rollback.errors import CheckpointDamaged, UsageError
from rollback.inspect.ring.at_url import ReadableRun
from rollback.inspect.ring.checkpoints import FINAL, best_word, choose, read_listing
from rollback.inspect.ring.verify import misfits
from rollback.rundir.identity import Identity, read_identity
from rollback.rundir.paths import RunPaths
from rollback.terminal.files import replacing


@dataclass(frozen=True)
class Exported:
    """What was written."""

    checkpoint: str
    step: int
    tensors: int
    bytes: int
    left_out: list[str]
    """Names in the model's state that are not tensors; the format cannot hold these."""
    notice: str | None = None
    """What the choice of the checkpoint passed over."""


def export(run: Path | ReadableRun, word: str | None, output: Path, *, force: bool = False) -> Exported:
    """Write the model of a checkpoint: parameters, and the buffers of rank 0, under the names of `model.state_dict()`.

    word: which checkpoint, see `choose`; default: `best_word`. The checkpoint is verified first. Tensors are copied one
    by one, so memory stays small. `output` is written whole or not at all. force: replace an existing file.

    Raises UsageError, NoUsableCheckpoint, CheckpointDamaged, RunDirectoryError, RunDoesNotFit or OutputNotWritten.
    """
    run = run if isinstance(run, ReadableRun) else ReadableRun(run, str(run))
    paths = RunPaths(run.root)
    listing = read_listing(run.root)
    chosen = word or best_word(listing)
    name = choose(listing, chosen)
    identity = read_identity(paths)
    if output.is_file() and not force:
        raise UsageError(f"{output} exists already", hint="--force replaces it")
    with replacing(output, run.root) as temporary, ExitStack() as stack:
        try:
            manifest, contents = _open(run, name, identity, stack)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(
                f"{error.message}; nothing was written",
                hint="`rollback ring verify` tells which checkpoints are intact",
            ) from error
        state = contents.model(rank=0)
        stored = {key: value for key, value in state.items() if isinstance(value, Stored | StoredParts)}
        pieces = [
            ShardPiece(key, item.entry.dtype, item.entry.shape, partial(getattr, item, "data"))
            for key, item in stored.items()
        ]
        metadata = {"format": "pt", "checkpoint": name, "step": str(manifest.step), "batch": str(manifest.batch)}
        if identity:
            metadata["run_id"] = identity.run_id
        size = write_shard(temporary, pieces, metadata).size
    left_out = [key for key in state if key not in stored]
    notice = None
    if word is None and listing.final is not None and chosen != FINAL:
        notice = f"the last step of the run was not judged healthy; its final state is {listing.final} (`{FINAL}`)"
    return Exported(name, manifest.step, len(state) - len(left_out), size, left_out, notice)


def _open(run: ReadableRun, name: str, identity: Identity | None, stack: ExitStack) -> tuple[Manifest, Contents]:
    """A verified checkpoint, open until the stack is closed: from the ring, else from memory, whose slot is then held.

    Raises CheckpointDamaged where every place has it damaged.
    """
    paths, faults = RunPaths(run.root), []
    places = [place for place in locate(paths) if place.name == name]
    for place in sorted(places, key=lambda place: place.tier == "fast"):
        with ExitStack() as attempt:
            try:
                attempt.enter_context(run.shards(name) if place.tier == "durable" else held(place))
                shards = ring.open_shards(place.directory, place.manifest)
                for shard in shards:
                    attempt.callback(shard.close)
                weights = attempt.enter_context(FrozenFiles(paths)).open(place.manifest.frozen)
                contents = read_contents(shards, weights)
                if identity and (differences := misfits(place.manifest, contents, identity.job)):
                    raise CheckpointDamaged(f"the checkpoint {name} does not fit its run: {differences[0]}")
            except CheckpointDamaged as error:
                faults.append(error.message)
            else:
                stack.enter_context(attempt.pop_all())
                return place.manifest, contents
    raise CheckpointDamaged("; ".join(faults) or f"the checkpoint {name} has left {run.name}, or has no sound manifest")
