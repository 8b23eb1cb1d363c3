"""Writes the last snapshot: one rank writes the shards of all, since it has all that is shared, and all marks.

It becomes a checkpoint by the ordinary commit, and only if nothing has changed until then.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import xxhash

from rollback.checkpoints import ring
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.fast_tier.sizing import free_memory
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.facts.training import Tier
from rollback.rundir.paths import CheckpointName, shard_name
from rollback.system import files
from rollback.train.last_snapshot.small_state import SharedState, SmallState, large_state, piece_of, shared_tree
from rollback.train.run import AttachedRun
from rollback.train.snapshots.capture import PARAMETERS, as_it_is_stored, bytes_of, owners
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.snapshots.tier_choice import cores_here
from rollback.train.state.state import TrainingState

SLOTS = (90, 91)
"""The slots of last snapshots. They are apart from those that are written in turn: which of these is being written, a
rank that is gone may have known."""
_SPARE = 16 << 20


class NotProved(Exception):
    """Why the state is not known to be that of one step's end on all ranks, in words."""


def digest_of_parameters(state: TrainingState) -> int:
    """Of all bits of this rank's parameters, where they lie."""
    return digest_of_large_state(state, PARAMETERS)


def digest_of_large_state(state: TrainingState, only: str = "") -> int:
    """Of all bits of this rank's parameters and of the optimizer's tensors. only: what names begin with."""
    together = xxhash.xxh3_64()
    for name, item in sorted(large_state(state)[1].items()):
        if name.startswith(only):
            together.update(xxhash.xxh3_64_digest(bytes_of(as_it_is_stored(item))))
    return together.intdigest()


class LastWrite:
    """buffer_trees: the trees of the model's buffers at that step's end, which have to be the same on all ranks."""

    def __init__(
        self, run: AttachedRun, state: TrainingState, snapshots: Snapshots, buffer_trees: Mapping[str, Any]
    ) -> None:
        self._run, self._state, self._snapshots, self._buffer_trees = run, state, snapshots, buffer_trees

    def write(
        self,
        end: StepEnd,
        bodies: Sequence[bytes],
        small: SharedState,
        sentinel: Mapping[str, Any],
        digest: int,
        require_unchanged: Callable[[], None],
    ) -> tuple[Manifest, Tier]:
        """Write and commit the state at that step's end. bodies: what each rank alone knew. small: of this rank.

        digest: of the parameters. require_unchanged: raises NotProved if anything has begun to change the state. Raises
        NotProved, OSError.
        """
        marks = [SmallState.of(body) for body in bodies]
        if any(mark.buffer_names != marks[0].buffer_names for mark in marks):
            raise NotProved("the ranks have not the same buffers")
        shards, size = self._shards(marks, small, sentinel)
        require_unchanged()
        name = CheckpointName.of(self._snapshots.next_seq, end.step)
        slot = self._free_slot(size)
        directory = self._slot(slot) if slot is not None else ring.begin_writing(self._run.paths, name, end.attempt)
        try:
            written = [
                write_shard(directory / shard_name(rank), pieces, metadata)
                for rank, (pieces, metadata) in enumerate(shards)
            ]
            records = tuple(ShardRecord.of(rank, made) for rank, made in enumerate(written))
            self._require_copied(directory, records, digest)
            require_unchanged()
            manifest = self._manifest(end, name, records, marks[0])
            if slot is None:
                ring.commit(self._run.paths, manifest)
            else:
                slots.commit(self._snapshots.slots_of_host.paths, slot, manifest, range(len(records)))
        except BaseException:
            files.remove_directory(directory)
            raise
        return manifest, "durable" if slot is None else "fast"

    def _shards(
        self, marks: Sequence[SmallState], small: SharedState, sentinel: Mapping[str, Any]
    ) -> tuple[list[tuple[list[ShardPiece], dict[str, str]]], int]:
        """Tensors and metadata of each rank's shard, and the bytes of all."""
        (large, tensors), (_, small_tensors) = large_state(self._state), small.encoded()
        tensors = {name: item for name, item in tensors.items() if name not in small_tensors}
        if found := self._state.finite.found(tensors):
            raise NotProved(f"{self._state.finite.in_words(min(found))} has values that are not finite")
        owner = owners(tensors, range(len(marks)))
        shards: list[tuple[list[ShardPiece], dict[str, str]]] = []
        for rank, mark in enumerate(marks):
            local, pieces = mark.local(self._buffer_trees)
            pieces += [piece_of(name, item) for name, item in tensors.items() if owner[name] == rank]
            metadata = {"local": json.dumps(local)}
            if rank == 0:
                pieces += [piece_of(name, item) for name, item in small_tensors.items()]
                metadata["shared"] = json.dumps(shared_tree(large, small, sentinel))
            shards.append((pieces, metadata))
        held = (data[2].nbytes for mark in marks for data in mark.tensors.values())
        return shards, sum(item.nbytes for item in tensors.values()) + sum(held)

    def _require_copied(self, directory: Path, records: Sequence[ShardRecord], digest: int) -> None:
        """Raise NotProved unless the parameters in the files are those of the digest."""
        found: dict[str, bytes] = {}
        for record in records:
            with ShardReader(directory / record.file, record.written, threads=cores_here()) as shard:
                names = [name for name in shard.entries if name.startswith(PARAMETERS)]
                room = memoryview(bytearray(max((shard.entries[name].nbytes for name in names), default=0)))
                for name in names:
                    shard.read_into(name, read := room[: shard.entries[name].nbytes])
                    found[name] = xxhash.xxh3_64_digest(read)
        together = xxhash.xxh3_64(b"".join(part for _, part in sorted(found.items())))
        if together.intdigest() != digest:
            raise NotProved("the copy of the parameters is not what was compared")

    def _free_slot(self, size: int) -> int | None:
        """A slot that holds no checkpoint; None: the run directory gets it."""
        tier = self._snapshots.slots_of_host.paths
        if self._snapshots.tier != "fast" or free_memory(tier.root) < size + size // 8 + _SPARE:
            return None
        return next((number for number in SLOTS if not slots.is_committed(tier, number)), None)

    def _slot(self, number: int) -> Path:
        directory = self._snapshots.slots_of_host.paths.slot(number)
        files.remove_directory(directory)
        directory.mkdir(0o700)
        return directory

    def _manifest(
        self, end: StepEnd, name: CheckpointName, shards: tuple[ShardRecord, ...], mark: SmallState
    ) -> Manifest:
        return Manifest(
            name=name, seq=name.seq, step=end.step, batch=end.batch, epoch=mark.trees["cursor"]["epoch"],
            timeline=end.timeline, attempt=end.attempt, world_size=len(shards), shards=shards,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )  # fmt: skip
