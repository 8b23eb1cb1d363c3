"""Writes the last snapshot: one rank of each host writes the shards of its host's ranks, since it has their marks, and
all that is shared.

It becomes a checkpoint by the ordinary commit, and only if nothing has changed until then.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel
from torch import Tensor
from torch.optim import Optimizer

from rollback.checkpoints import ring
from rollback.checkpoints.fast_tier import slots
from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.checkpoints.fast_tier.sizing import free_memory
from rollback.checkpoints.fast_tier.slots import SlotPaths
from rollback.checkpoints.format.manifest import Manifest, ShardRecord
from rollback.checkpoints.format.shard import ShardPiece, ShardReader, write_shard
from rollback.facts.training import Tier
from rollback.rundir.metrics.metric_lines import metric_line
from rollback.rundir.paths import CheckpointName, shard_name
from rollback.system import files
from rollback.system.cgroups import cores_here
from rollback.train.last_snapshot.device import NO_DEVICE, TensorReader, device_of
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.last_snapshot.small_state import SharedState, SmallState
from rollback.train.run import AttachedRun
from rollback.train.snapshots import drift
from rollback.train.snapshots.buffers import FastTier
from rollback.train.snapshots.capture import as_it_is_stored, bytes_of, owners, piece_of
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state import tree
from rollback.train.state.image import PARAMETERS
from rollback.train.state.state import TrainingState
from rollback.train.state.stateful import tensors_of_state

SLOTS = (90, 91)
"""The slots of last snapshots. They are apart from those that are written in turn: which of these is being written, a
rank that is gone may have known."""
_SPARE = 16 << 20
_PART = 1 << 20  # of a file that is read back: it stays in the processor's cache
_version = attrgetter("_version")


@dataclass(frozen=True)
class JudgedAhead:
    """The sentinel once the last step is judged. metric: that step's line for the metrics, if it is not written yet."""

    sentinel: Mapping[str, Any]
    metric: str | None


def large_state(state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is not in the marks, and the same on all ranks: the trees of parameters and optimizer, and their tensors.
    Any thread may call it."""
    tensors: dict[str, Tensor] = {}
    return tree.encode(state.large_shared(), "shared", tensors), tensors


def shared_tree(large: Mapping[str, Any], small: SharedState, sentinel: Mapping[str, Any]) -> dict[str, Any]:
    """The `shared` tree: the parameters and the optimizer of one rank, its small state, and the sentinel's state."""
    optimizer, trees = dict(large["optimizer"]), dict(small.encoded()[0])
    optimizer["param_groups"] = [
        {**told, "params": group["params"]}
        for group, told in zip(optimizer["param_groups"], trees.pop("groups"), strict=True)
    ]
    sentinel_tree = tree.encode(dict(sentinel), "shared/sentinel", {})
    return {**large, **trees, "optimizer": optimizer, "sentinel": sentinel_tree}


def digests_of_parameters(state: TrainingState, read: TensorReader = NO_DEVICE.read) -> dict[str, bytes]:
    """Of all bits of this rank's parameters, by name."""
    parameters = {name: item for name, item in large_state(state)[1].items() if name.startswith(PARAMETERS)}
    return {name: _digest(read(item)) for name, item in parameters.items()}


def digest_of_large_state(state: TrainingState, read: TensorReader = NO_DEVICE.read) -> int:
    """Of all bits of this rank's parameters and of the optimizer's tensors, where they lie.

    On a GPU it is another kind of digest, which a GPU computes too; `read` does not change it.
    """
    digest = _digest if device_of(state) is None else _digest_by_gpu
    return combined_digest({name: digest(read(item)) for name, item in large_state(state)[1].items()})


def versions_of(parameters: Sequence[Tensor], optimizer: Optimizer) -> int:
    """Changes with every write in place to parameters, or to what the optimizer keeps of them, as torch counts.

    It is asked at every step's end. Torch's optimizers mostly keep nothing but tensors, and these are gone through
    without Python.
    """
    ours: int = sum(map(_version, parameters))
    kept: Iterable[Any] = chain.from_iterable(map(dict.values, optimizer.state.values()))
    try:
        of_optimizer: int = sum(map(_version, kept))
    except (AttributeError, TypeError):  # a number, None, a list, or a state that is no dict
        of_optimizer = sum(map(_version, tensors_of_state(optimizer)))
    return ours + of_optimizer


def combined_digest(digests: Mapping[str, bytes]) -> int:
    """One digest in place of many."""
    return xxhash.xxh3_64_intdigest(b"".join(digest for _, digest in sorted(digests.items())))


def _digest(item: Tensor) -> bytes:
    return xxhash.xxh3_64_digest(bytes_of(as_it_is_stored(item)))


def _digest_by_gpu(item: Tensor) -> bytes:
    return int(drift.on_device([item])).to_bytes(8, "little", signed=True)


def sweep_slots(tier: FastTier) -> None:
    """Before an attempt: remove what others of the hosts do not have, or what is half written. One rank of each host.

    Raises OSError.
    """
    for number in SLOTS:
        if not tier.holds(number) and slots.uncommit(tier.paths, number):
            slots.discard(tier.paths, number)


class SharedTensor(BaseModel, frozen=True, ser_json_bytes="base64", val_json_bytes="base64"):
    """A small tensor that is the same on all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class SharedPart(BaseModel, frozen=True):
    """What is small and the same on all ranks, as rank 0's shard has it."""

    tree: str
    """The `shared` tree, as JSON."""
    tensors: tuple[SharedTensor, ...]

    def pieces(self) -> list[ShardPiece]:
        return [ShardPiece(item.name, item.dtype, item.shape, memoryview(item.data)) for item in self.tensors]


class MarksWriter:
    """The shards of this host's ranks as they were at a step's end, with what each alone knew: nobody here has more.

    bodies: what that was, by rank. common_local, texts: the same on all ranks. Raises NotProved.
    """

    shared: SharedPart | None = None
    """For rank 0's shard, if that is written here."""

    def __init__(
        self, tier: SlotPaths, bodies: Mapping[int, bytes], common_local: Mapping[str, Any], texts: Mapping[str, str]
    ) -> None:
        self._tier, self.common_local, self.texts = tier, common_local, texts
        self._marks = {rank: SmallState.of(body) for rank, body in sorted(bodies.items())}
        names = next(iter(self._marks.values())).buffer_names
        if any(mark.buffer_names != names for mark in self._marks.values()):
            raise NotProved("the ranks have not the same buffers")
        self.buffers = xxhash.xxh3_64_hexdigest("\n".join(names).encode())
        """A digest of the names of the buffers."""

    def free_slots(self) -> list[int]:
        """The slots that hold no checkpoint, if there is memory for what is to be written."""
        size = self._size()
        if free_memory(self._tier.root) < size + size // 8 + _SPARE:
            return []
        return [number for number in SLOTS if not slots.is_committed(self._tier, number)]

    def write_part(self, slot: int, stores: Sequence[int]) -> dict[int, ShardRecord]:
        """Write this host's shards into a slot, where there are several hosts.

        stores: the ranks whose shards have, between them, what is large and the same on all. Raises NotProved, OSError;
        then there is nothing in the slot.
        """
        with _or_removed(directory := self._slot(slot)):
            return self._write(directory)

    def shared_part(self, sentinel: Mapping[str, Any]) -> SharedPart:
        """sentinel: its state once the step is judged. Raises NotProved where no rank stands."""
        raise NotProved("no rank is left here that has what is the same on all")

    def commit_part(self, slot: int, manifest: Manifest) -> None:
        """Raises OSError."""
        slots.commit(self._tier, slot, manifest, self._marks)

    def discard_part(self, slot: int) -> None:
        """Raises OSError."""
        if slots.uncommit(self._tier, slot):
            slots.discard(self._tier, slot)

    def _size(self) -> int:
        return sum(data[2].nbytes for mark in self._marks.values() for data in mark.tensors.values())

    def _write(self, directory: Path) -> dict[int, ShardRecord]:
        with ThreadPoolExecutor(cores_here()) as threads:  # who is gone left its core
            written = threads.map(lambda rank: self._write_shard(directory / shard_name(rank), rank), self._marks)
            return dict(zip(self._marks, written, strict=True))

    def _write_shard(self, path: Path, rank: int) -> ShardRecord:
        pieces, metadata = self._shard(rank)
        return ShardRecord.of(rank, write_shard(path, pieces, metadata))

    def _shard(self, rank: int) -> tuple[list[ShardPiece], dict[str, str]]:
        """Tensors and metadata of a rank's shard."""
        mark = self._marks[rank]
        for name, text in self.texts.items():
            if mark.trees["kept"][name] > text.count("\n"):
                raise NotProved(f"rank {rank} had lines of {name!r} that the rank which would keep them has not")
        local, pieces = mark.local(self.common_local, self.texts)
        metadata = {"local": json.dumps(local)}
        if rank == 0:
            assert self.shared is not None
            return pieces + self.shared.pieces(), {**metadata, "shared": self.shared.tree}
        return pieces, metadata

    def _slot(self, number: int) -> Path:
        directory = self._tier.slot(number)
        files.remove_directory(directory)
        directory.mkdir(0o700)
        return directory


class StateWriter(MarksWriter):
    """The same by a rank that stands there, and so has what is the same on all.

    small: of this rank. digests: of the parameters. read: gives tensors on the host. require_unchanged:
    raises NotProved if anything has begun to change the state. Raises NotProved.
    """

    def __init__(
        self,
        run: AttachedRun,
        state: TrainingState,
        snapshots: Snapshots,
        end: StepEnd,
        bodies: Mapping[int, bytes],
        small: SharedState,
        digests: Mapping[str, bytes],
        read: TensorReader,
        require_unchanged: Callable[[], None],
    ) -> None:
        super().__init__(snapshots.memory.fast_tier.paths, bodies, small.common_local, small.texts)
        self._run, self._state, self._snapshots, self._end, self._small = run, state, snapshots, end, small
        self._digests, self._read, self._require_unchanged = digests, read, require_unchanged
        (self._large, tensors), (_, self._small_tensors) = large_state(state), small.encoded()
        self._tensors = {name: item for name, item in tensors.items() if name not in self._small_tensors}
        self._assign(range(run.ranks.world_size))

    def write_alone(self, sentinel: Mapping[str, Any]) -> tuple[Manifest, Tier]:
        """Write and commit the state, on the only host there is. Raises NotProved, OSError."""
        manifest = self.manifest(self._snapshots.next_seq)
        slot = next(iter(self.free_slots()), None)
        self.shared = self.shared_part(sentinel)
        directory = (
            self._slot(slot)
            if slot is not None
            else ring.begin_writing(self._run.paths, manifest.name, self._end.attempt)
        )
        with _or_removed(directory):
            records = self._write(directory)
            manifest = manifest.model_copy(update={"shards": tuple(records[rank] for rank in sorted(records))})
            if slot is None:
                ring.commit(self._run.paths, manifest)
            else:
                slots.commit(self._tier, slot, manifest, self._marks)
        return manifest, "durable" if slot is None else "fast"

    def write_part(self, slot: int, stores: Sequence[int]) -> dict[int, ShardRecord]:
        self._assign(stores)
        return super().write_part(slot, stores)

    def metrics(self, judged_ahead: JudgedAhead | None) -> tuple[str, ...]:
        """The newest lines of the metrics. judged_ahead: where the last step was judged."""
        lines = tuple(metric_line(**row) for row in [*self._run.record.recent])  # the script may train on
        return (*lines, judged_ahead.metric) if judged_ahead is not None and judged_ahead.metric is not None else lines

    def shared_part(self, sentinel: Mapping[str, Any]) -> SharedPart:
        tensors = [
            SharedTensor(
                name=name, dtype=tree.DTYPE_CODE[item.dtype], shape=tuple(item.shape),
                data=bytes(bytes_of(as_it_is_stored(self._read(item)))),
            )
            for name, item in self._small_tensors.items()
        ]  # fmt: skip
        return SharedPart(tree=json.dumps(shared_tree(self._large, self._small, sentinel)), tensors=tuple(tensors))

    def free_slots(self) -> list[int]:
        return super().free_slots() if self._snapshots.memory.tier == "fast" else []

    def manifest(self, seq: int) -> Manifest:
        """Without its shards."""
        end, name = self._end, CheckpointName.of(seq, self._end.step)
        epoch = next(iter(self._marks.values())).trees["cursor"]["epoch"]  # of all ranks the same
        return Manifest(
            name=name, seq=seq, step=end.step, batch=end.batch, epoch=epoch,
            timeline=end.timeline, attempt=end.attempt, world_size=self._run.ranks.world_size, shards=(),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )  # fmt: skip

    def _assign(self, stores: Sequence[int]) -> None:
        owner = owners(self._tensors, stores)
        self._owned = {rank: [name for name in self._tensors if owner[name] == rank] for rank in self._marks}

    def _size(self) -> int:
        owned = (self._tensors[name].nbytes for names in self._owned.values() for name in names)
        return super()._size() + sum(owned)

    def _write(self, directory: Path) -> dict[int, ShardRecord]:
        """Nothing has changed until it returns. Raises NotProved, OSError."""
        self._require_unchanged()
        records = super()._write(directory)
        self._require_unchanged()
        return records

    def _write_shard(self, path: Path, rank: int) -> ShardRecord:
        record = super()._write_shard(path, rank)
        self._require_copied(path, rank, record)
        return record

    def _shard(self, rank: int) -> tuple[list[ShardPiece], dict[str, str]]:
        pieces, metadata = super()._shard(rank)
        pieces += [
            piece_of(name, self._tensors[name], lambda item, name=name: self._finite(name, item))  # type: ignore[misc]
            for name in self._owned[rank]
        ]
        return pieces, metadata

    def _finite(self, name: str, item: Tensor) -> Tensor:
        read = self._read(item)
        if self._state.finite.newly_nonfinite({name: read}):
            raise NotProved(f"{self._state.finite.in_words(name)} has values that are not finite")
        return read

    def _require_copied(self, path: Path, rank: int, record: ShardRecord) -> None:
        """Raise NotProved unless the parameters in the file are those of the digests.

        The hash of the whole file is for whoever restores it, as of every checkpoint: to look here too would cost as
        much as all that this reads, and the job stands still meanwhile.
        """
        buffer = memoryview(bytearray(_PART))
        with ShardReader(path, record.written, hashed=True) as shard:
            for name in (name for name in self._owned[rank] if name.startswith(PARAMETERS)):
                digest, size = xxhash.xxh3_64(), shard.entries[name].nbytes
                for start in range(0, size, _PART):
                    shard.read_into(name, part := buffer[: min(_PART, size - start)], start)
                    digest.update(part)
                if digest.digest() != self._digests[name]:
                    raise NotProved("the copy of the parameters is not what was compared")


@contextlib.contextmanager
def _or_removed(directory: Path) -> Iterator[None]:
    """Remove what is half written."""
    try:
        yield
    except BaseException:
        files.remove_directory(directory)
        raise
