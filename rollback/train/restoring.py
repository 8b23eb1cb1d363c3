"""Restoring a checkpoint: verify on every rank, agree, and only then touch the live objects."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from rollback.errors import CheckpointDamaged
from rollback.rundir import ring
from rollback.rundir.contents import require_parts
from rollback.rundir.manifest import read_manifest
from rollback.rundir.paths import RunPaths
from rollback.rundir.shard import ShardReader
from rollback.train import tree
from rollback.train.ranks import Ranks
from rollback.train.state import TrainingState
from rollback.train.worlds import adopt, source_of


def restore(paths: RunPaths, name: str, ranks: Ranks, state: TrainingState) -> str | None:
    """Collective: put a checkpoint into the live objects of every rank, or into none.

    Returns None on success, else why it cannot be believed, in the words of the first rank that found fault; nothing
    was touched then.
    """
    decoded, fault = _read(paths, name, ranks.rank)
    for text in ranks.from_each(fault or ""):
        if text:
            return text
    assert decoded is not None
    state.load(*decoded)
    return None


def verify(paths: RunPaths, name: str, ranks: Ranks) -> str | None:
    """Collective: whether `restore` would succeed: None, or why not in the words of the first rank that found fault."""
    _, fault = _read(paths, name, ranks.rank)
    return next(filter(None, ranks.from_each(fault or "")), None)


def _read(paths: RunPaths, name: str, rank: int) -> tuple[tuple[Any, Any] | None, str | None]:
    try:
        # Read from disk even where the caller has a manifest: ranks that did not commit it do not know the hashes.
        readers = ring.open_shards(paths, read_manifest(paths.checkpoint(name)))
    except CheckpointDamaged as error:
        return None, error.message
    try:
        source = {key: reader for reader in readers for key in reader.entries}

        def fetch(key: str) -> Tensor:
            return _tensor(source[key], key)

        shared = tree.decode(json.loads(readers[0].metadata["shared"]), fetch)
        # The names of local tensors are the same in every shard, so they are looked up in this rank's own.
        own = readers[source_of(rank, len(readers))]
        local = tree.decode(json.loads(own.metadata["local"]), lambda key: _tensor(own, key))
        require_parts(shared, "shared")
        require_parts(local, "local")
        return (shared, adopt(local, rank, len(readers))), None
    except CheckpointDamaged as error:
        return None, error.message
    except (KeyError, IndexError, ValueError, TypeError, RecursionError) as error:
        return None, f"the trees of checkpoint {name} do not fit its tensors: {error!r}"
    finally:
        for reader in readers:
            reader.close()


def _tensor(reader: ShardReader, name: str) -> Tensor:
    """A tensor of its own memory: the optimizer keeps what it is given, and the file may be evicted."""
    entry = reader.entries[name]
    value = torch.empty(entry.shape, dtype=tree.DTYPE[entry.dtype])
    if entry.nbytes:
        flat = torch.frombuffer(reader.data(name), dtype=tree.DTYPE[entry.dtype])
        value.copy_(flat.reshape(entry.shape))
    return value
