"""Restoring a checkpoint: verified and agreed on by all ranks first, then read straight into the live tensors.

Reading into a tensor that is there costs half of what reading into a new one and copying it costs. Where the live
objects have no such tensor (the optimizer of a new process has no state), one is made and handed to `load_state_dict`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollback.errors import CheckpointDamaged, CheckpointUnreadable
from rollback.rundir.contents import require_parts
from rollback.rundir.manifest import read_manifest
from rollback.rundir.shard import ShardReader
from rollback.train import tree
from rollback.train.capture import bytes_of
from rollback.train.ranks import Ranks
from rollback.train.state import TrainingState
from rollback.train.worlds import adopt, source_of

_TRIES = 2  # a disk that refuses may recover, but a checkpoint that cannot be read twice is bad


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies. memory: this rank's own shard of it, where this process has it mapped (fast tier)."""

    directory: Path
    in_slot: bool = False
    memory: memoryview | None = None


@dataclass
class Restoration:
    """How it went. place: where the state came from, None where no place was any good. faults: of the others."""

    place: Place | None = None
    faults: list[tuple[Place, str]] = field(default_factory=list)

    @property
    def fault(self) -> str:
        return "; ".join(text for _, text in self.faults)


def restore(name: str, places: Sequence[Place], ranks: Ranks, state: TrainingState) -> Restoration:
    """Collective: put a checkpoint into the live objects of every rank, from the first place that all can read.

    Nothing is touched before all ranks have found a place sound. If reading fails after that, twice, the live objects
    are in no state to train from: the caller must restore another checkpoint, or stop.
    """
    result = Restoration()
    for place in places:
        fault: str | None = None
        for _ in range(_TRIES):
            reading, fault = _verify(name, place, ranks)
            if (fault := ranks.first_fault(fault)) is not None:
                if reading is not None:
                    reading.close()
                break  # it is not what was written: no use in trying again
            assert reading is not None
            if (fault := ranks.first_fault(_load(reading, ranks.rank, state))) is None:
                result.place = place
                return result
        result.faults.append((place, fault or ""))
    return result


def verify(name: str, places: Sequence[Place], ranks: Ranks) -> str | None:
    """Collective: whether `restore` would find a place sound: None, or why not in the words of the first rank."""
    faults = []
    for place in places:
        reading, fault = _verify(name, place, ranks)
        if reading is not None:
            reading.close()
        if (fault := ranks.first_fault(fault)) is None:
            return None
        faults.append(fault)
    return "; ".join(faults)


@dataclass
class _Reading:
    """Open shards, verified by the ranks of this host between them."""

    shards: list[ShardReader]
    shared: Any
    local: Any

    def close(self) -> None:
        for shard in self.shards:
            shard.close()


def _verify(name: str, place: Place, ranks: Ranks) -> tuple[_Reading | None, str | None]:
    """The open shards, or what is wrong with them. Where the disk refuses, and only there, it is tried again."""
    fault = ""
    for _ in range(_TRIES):
        try:
            return _open(name, place, ranks), None
        except CheckpointUnreadable as error:
            fault = error.message
        except CheckpointDamaged as error:
            return None, error.message
        except (KeyError, IndexError, ValueError, TypeError, RecursionError) as error:
            return None, f"the trees of checkpoint {name} do not fit its tensors: {error!r}"
    return None, fault


def _open(name: str, place: Place, ranks: Ranks) -> _Reading:
    # Read from there even where the caller has a manifest: it may hold something else by now.
    manifest = read_manifest(place.directory, in_slot=place.in_slot)
    if manifest.name != name:
        raise CheckpointDamaged(f"{place.directory} holds {manifest.name}, not {name}")
    here = ranks.on_this_host
    shards: list[ShardReader] = []
    try:
        for number, record in enumerate(manifest.shards):
            others = here[number % len(here)] != ranks.rank  # somebody else on this host hashes it
            memory = place.memory if number == ranks.rank else None
            path = place.directory / record.file
            shards.append(ShardReader(path, record.written, hashed=others, memory=memory))
        shared = json.loads(shards[0].metadata["shared"])
        local = json.loads(shards[source_of(ranks.rank, len(shards))].metadata["local"])
        reading = _Reading(shards, shared, local)
        _decode(reading, ranks.rank, _stand_in)
    except BaseException:
        for shard in shards:
            shard.close()
        raise
    return reading


def _load(reading: _Reading, rank: int, state: TrainingState) -> str | None:
    """Read every tensor to where it belongs and load the rest. What failed, in words."""
    try:
        live = state.live_tensors()
        shared, local = _decode(reading, rank, lambda shard, key: _read(shard, key, live.get(key)))
        state.load(shared, adopt(local, rank, len(reading.shards)))
        return None
    except CheckpointDamaged as error:
        return error.message
    finally:
        reading.close()


def _decode(reading: _Reading, rank: int, fetch: Callable[[ShardReader, str], Tensor]) -> tuple[Any, Any]:
    source = {key: shard for shard in reading.shards for key in shard.entries}
    shared = tree.decode(reading.shared, lambda key: fetch(source[key], key))
    # The names of local tensors are the same in every shard, so they are looked up in this rank's own.
    own = reading.shards[source_of(rank, len(reading.shards))]
    local = tree.decode(reading.local, lambda key: fetch(own, key))
    require_parts(shared, "shared")
    require_parts(local, "local")
    return shared, local


def _stand_in(shard: ShardReader, key: str) -> Tensor:
    """In place of a tensor, when it is only asked whether a tree can be decoded."""
    shard.entries[key]
    return torch.empty(0)


def _read(shard: ShardReader, key: str, present: Tensor | None) -> Tensor:
    """A tensor with what is stored: the present one if it is of that kind, else a new one, which nobody else has."""
    entry = shard.entries[key]
    if present is not None and (tree.DTYPE_CODE[present.dtype], tuple(present.shape)) != (entry.dtype, entry.shape):
        present = None
    if present is not None and not present.is_cuda and present.is_contiguous():
        shard.read_into(key, bytes_of(present))
        torch.autograd.graph.increment_version(present)
        return present
    fresh = torch.empty(entry.shape, dtype=tree.DTYPE[entry.dtype])
    shard.read_into(key, bytes_of(fresh))
    return fresh if present is None else present.copy_(fresh)
