"""Copying what a rank stores of a state into memory that is laid out as the shard will be.

There are two kinds of tensors. *Still* ones (parameters, optimizer state) change only inside `optimizer.step()`. A
thread may copy them while the next forward and backward run, until the optimizer begins. *Restless* ones (buffers, and
what other objects keep) are copied at once. If a still tensor is written to before the optimizer begins, its version
counter tells, and the capture is torn. No counter tells of writes to `parameter.data`: `unseen_writes` looks for them.

For `drift` a rank digests all parameters, and of what the optimizer and other objects keep a sample, another one for
each snapshot: that is larger than the parameters. Of a sharded model it also digests what the optimizer keeps in plain
tensors, and all that other objects keep in tensors of a part's shape: one rank stores them for all, and where each of
them has its own part of a state in such a tensor, the others' would be lost.

Tensors that the rank stores are digested in the copy, at any time. The others are digested in place, before the
optimizer begins. Parameters that nothing trains are not copied: see `frozen`.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor

from rollback.checkpoints.format.frozen import METADATA as METADATA_FROZEN
from rollback.checkpoints.format.frozen import write_digests
from rollback.checkpoints.format.layout import Layout, TensorEntry, TensorKind
from rollback.checkpoints.format.parts import METADATA, Part, write_parts
from rollback.checkpoints.format.shard import ShardPiece
from rollback.facts.checkpoints import CaptureMode
from rollback.system.region import Region, copy
from rollback.train.comm.ranks import Ranks
from rollback.train.sharded import holders_of, version_of
from rollback.train.snapshots import drift
from rollback.train.snapshots.copy_stream import await_event, copy_stream, on_host
from rollback.train.state import tree
from rollback.train.state.image import PARAMETERS, STILL, Image

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class RankShare:
    """What one rank stores of an image.

    replicas: what all ranks have alike and compare: parameters, and of a sharded model what is kept beside them in
    plain tensors; empty if there is one rank. parts: this rank's parts of the sharded parameters, and where they lie in
    the whole. sharded: the tensors that the parts belong to. frozen: the parameters that no rank stores. spot_check: of
    the rest, what is compared this time; empty if there is one rank.
    """

    tensors: Mapping[str, Tensor]
    replicas: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    parts: Mapping[str, tuple[Part, Tensor]] = field(default_factory=dict)
    sharded: Mapping[str, Tensor] = field(default_factory=dict)
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    spot_check: Sequence[Tensor] = ()

    def kinds(self) -> dict[str, TensorKind]:
        return {name: (tree.DTYPE_CODE[item.dtype], tuple(item.shape)) for name, item in self.tensors.items()}


def share_of(image: Image, ranks: Ranks, frozen: Mapping[str, str] | None = None, turn: int = 0) -> RankShare:
    """What this rank stores. frozen: names and digests of the frozen weights that the snapshot leaves out; default:
    none. turn: of the samples that are compared."""
    frozen = frozen or {}
    shared = {name: item for name, item in image.shared_tensors.items() if name not in frozen}
    owner = owners(shared, range(ranks.world_size))
    alike: dict[tuple[int, ...], dict[str, Tensor]] = {}
    for name, item in image.sharded.items():
        alike.setdefault(holders_of(item), {})[name] = image.local_tensors[name]
    for holders, tensors in alike.items():
        owner |= owners(tensors, holders)
    there = {**shared, **image.local_tensors}
    stored = {name: item for name, item in there.items() if owner.get(name, ranks.rank) == ranks.rank}
    metadata = {"local": json.dumps(image.local)}
    if ranks.is_rank_0:
        metadata["shared"] = json.dumps(image.shared)
        if frozen:
            metadata[METADATA_FROZEN] = write_digests(frozen)
    if image.parts:
        metadata[METADATA] = write_parts({name: part for name, part in image.parts.items() if name in stored})
    compared = _compared(shared, image) if ranks.world_size > 1 else {}
    rest = {name: item for name, item in shared.items() if name not in compared}
    checked = drift.spot_check(rest, turn) if ranks.world_size > 1 else ()
    parts = {
        name: (part, image.local_tensors[name]) for name, part in image.parts.items() if name.startswith(PARAMETERS)
    }
    still = {name: image.shared_tensors[name] for name in frozen}
    return RankShare(stored, compared, metadata, parts, image.sharded, still, checked)


def _compared(shared: Mapping[str, Tensor], image: Image) -> dict[str, Tensor]:
    """What all ranks have alike and compare. Of a sharded model, what has the shape of a rank's part of something may
    be just that."""
    if not image.parts:
        return {name: item for name, item in shared.items() if name.startswith(PARAMETERS)}
    shapes = {image.local_tensors[name].shape for name in image.parts}
    return {name: item for name, item in shared.items() if name.startswith(STILL) or item.shape in shapes}


class Capture:
    """One copy in progress. The thread that trains calls `start` and `fence`; any thread may call the rest.

    mode: which part of the work `start` does. `finish` does the rest, and may run beside the training until the fence.
    """

    def __init__(self, share: RankShare, layout: Layout, region: Region, mode: CaptureMode) -> None:
        self._share = share
        self._layout = layout
        self._region = region
        self._mode = mode
        self._still = {name: item for name, item in share.tensors.items() if _is_still(name)}
        self._parts = {name: item for name, (_, item) in share.parts.items()}
        self._digests: dict[str, bytes] = {}
        compared = {**share.replicas, **self._parts}
        self._stored_by_others = {name: item for name, item in compared.items() if name not in share.tensors}
        self._still_of_others = {name: item for name, item in self._stored_by_others.items() if _is_still(name)}
        left: dict[str, Tensor] = {}
        if mode != "held":
            left |= self._still_of_others
        if mode == "overlapped":
            left |= self._still
        watched = {name: share.sharded.get(name, item) for name, item in left.items()}
        self._watched = [(name, item, version_of(item)) for name, item in watched.items()]
        self._unseen: set[tuple[Any, ...]] = set()
        self._stream: Any = None
        self._arrived: Any = None
        self._on_device: list[Tensor | int] = [0, 0, 0]
        """Digests of what the device holds of the replicas, of the parts, and of the sample."""
        self._of_spot_check = 0

    def start(self) -> None:
        """Copy the restless tensors, and make the device begin to copy the tensors that it holds.

        Raises ValueError if the trees do not fit into the space of the header any more.
        """
        self._region.view[: self._layout.header_space] = self._layout.head(self._share.metadata)
        self._copy({name: item for name, item in self._share.tensors.items() if name not in self._still})
        self._digest({name: item for name, item in self._stored_by_others.items() if not _is_still(name)})
        self._of_spot_check = int(drift.on_device(item for item in self._share.spot_check if not item.is_cuda))
        self._start_on_device()
        if self._mode != "overlapped":
            self._copy(self._still)
        if self._mode == "held":
            self._digest(self._still_of_others)

    def finish(self) -> None:
        """Do the rest of the copy. Afterwards everything is in the region, and live tensors are not read any more."""
        if self._mode == "overlapped":
            self._copy(self._still)
        if self._mode != "held":
            self._digest(self._still_of_others)
        if self._arrived is not None:
            with torch.cuda.device(self._stream.device):
                await_event(self._arrived)

    def digest(self) -> int:
        """The digest of this rank's replicas, for `drift`; 0 if there is one rank. Call it after `finish`."""
        return self._digest_of(self._share.replicas)

    def part_digest(self) -> tuple[int, int]:
        """Two digests of this rank's parts of sharded parameters: of where they lie, and of their values. 0 and 0 if
        there are none. Call it after `finish`."""
        if not self._parts:
            return 0, 0
        places = {name: part for name, (part, _) in sorted(self._share.parts.items())}
        return drift.narrowed(xxhash.xxh3_64_intdigest(write_parts(places).encode())), self._digest_of(self._parts)

    def spot_check_digest(self) -> int:
        """The digest of the sample. Call it after `finish`."""
        return drift.narrowed((self._of_spot_check ^ int(self._on_device[2])) & _MASK)

    def _digest_of(self, tensors: Mapping[str, Tensor]) -> int:
        if not tensors:
            return 0
        together = xxhash.xxh3_64()
        for name in sorted(tensors):
            if name in self._digests:
                together.update(self._digests[name])
            elif not tensors[name].is_cuda:
                entry = self._layout.entries[name]
                together.update(xxhash.xxh3_64_digest(self._region.view[entry.start : entry.end]))
        on_device = self._on_device[tensors is self._parts]
        return drift.narrowed(together.intdigest() ^ (int(on_device) & _MASK))

    def copies(self) -> dict[str, Tensor]:
        """The tensors of the copy. Call it after `finish`."""
        return {name: view(self._region, self._layout.entries[name]) for name in self._share.tensors}

    def fence(self) -> None:
        """Make the device's training stream wait for the copy. The host does not wait."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._arrived)

    def note_unseen_writes(self, items: Iterable[Tensor]) -> None:
        """These were written to since the capture began, and torch did not count it."""
        self._unseen |= set(map(tree.memory_of, items))

    def moved(self) -> list[str]:
        """Names of still tensors that were written to since the capture began."""
        return [
            name for name, item, version in self._watched
            if version_of(item) != version or tree.memory_of(item) in self._unseen
        ]  # fmt: skip

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, item in tensors.items():
            if not item.is_cuda:
                plain = as_it_is_stored(item)
                copy(self._region.address + self._layout.entries[name].start, plain.data_ptr(), plain.nbytes)

    def _digest(self, tensors: Mapping[str, Tensor]) -> None:
        for name, item in tensors.items():
            if not item.is_cuda:
                self._digests[name] = xxhash.xxh3_64_digest(bytes_of(as_it_is_stored(item)))

    def _start_on_device(self) -> None:
        """Make the device copy and digest the tensors that it holds, in a stream of its own."""
        tensors = {name: item for name, item in self._share.tensors.items() if item.is_cuda}
        compared = [
            *([items[name] for name in sorted(items) if items[name].is_cuda]
              for items in (self._share.replicas, self._parts)),
            [item for item in self._share.spot_check if item.is_cuda],
        ]  # fmt: skip
        device = next((item.device for items in (tensors.values(), *compared) for item in items), None)
        if device is None:
            return
        restless = {name: item for name, item in tensors.items() if not _is_still(name)}
        with copy_stream(device) as stream:
            self._stream = stream
            self._copy_on_device(restless)
            for place, items in enumerate(compared):
                if items:
                    made = torch.zeros((), dtype=torch.int64, device="cpu", pin_memory=True)
                    self._on_device[place] = made.copy_(drift.on_device(items), non_blocking=True)
            restless_done = stream.record_event()
            self._copy_on_device({name: item for name, item in tensors.items() if name not in restless})
            self._arrived = stream.record_event()
        if compared[2] or not all(map(_is_still, (*tensors, *self._share.replicas))):
            # The next kernel may change them. For the others, which take most of the time, it does not wait.
            torch.cuda.current_stream(device).wait_event(restless_done)

    def _copy_on_device(self, tensors: Mapping[str, Tensor]) -> None:
        for name, item in tensors.items():
            # Not a lazily conjugated one: of a copy that is not waited for torch conjugates what has not arrived yet.
            view(self._region, self._layout.entries[name]).copy_(as_it_is_stored(item), non_blocking=True)
            item.record_stream(self._stream)


def view(region: Region, entry: TensorEntry) -> Tensor:
    """A tensor whose memory is a place in the region."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=tree.DTYPE[entry.dtype], device="cpu")
    flat = torch.frombuffer(region.view[entry.start : entry.end], dtype=tree.DTYPE[entry.dtype])
    return flat.reshape(entry.shape)


def as_it_is_stored(item: Tensor) -> Tensor:
    """The tensor with its items in order in memory: in most cases the tensor itself."""
    if item.is_contiguous() and not item.is_conj() and not item.is_neg():
        return item
    return item.resolve_conj().resolve_neg().contiguous()


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view."""
    return value.detach().reshape(-1).view(torch.uint8).numpy().data


def piece_of(name: str, item: Tensor, read: Callable[[Tensor], Tensor] = on_host) -> ShardPiece:
    """A tensor for a file, whose bytes are read when it is written: where they lie, if they are in order there. read:
    gives it on the host."""
    dtype, shape = tree.DTYPE_CODE[item.dtype], tuple(item.shape)
    return ShardPiece(name, dtype, shape, lambda: [bytes_of(as_it_is_stored(read(item)))])


def _is_still(name: str) -> bool:
    return name.startswith(STILL)


def owners(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, int]:
    """The rank that stores each tensor, of these ranks that all have them: about the same number of bytes for each; the
    same on all of them."""
    loads = [(0, place) for place in range(len(ranks))]  # a heap: the one with the least is first
    owner: dict[str, int] = {}
    for name, value in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        load, place = loads[0]
        owner[name] = ranks[place]
        heapq.heapreplace(loads, (load + value.nbytes, place))
    return owner
