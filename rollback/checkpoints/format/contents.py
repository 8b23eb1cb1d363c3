"""What is in a checkpoint, without torch: its trees, with a reference wherever a tensor stands.

The tags are those of docs/format.md, "Shards". `rollback.train.state.tree` writes the trees and decodes them with this.
"""

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rollback.checkpoints.format.frozen import read_digests
from rollback.checkpoints.format.layout import ITEM_SIZE, TensorEntry, bytes_of
from rollback.checkpoints.format.parts import Box, Part, cover, read_parts, whole
from rollback.checkpoints.format.shard import ShardReader
from rollback.errors import CheckpointDamaged
from rollback.system.small_json import parse_json

_LATER_KEYS = ("nonpersistent_buffers", "object_buffers", "kept", "nonfinite", "broadcasts")
"""That once there were not: a checkpoint that lacks one has nothing there."""
_KEYS = {
    "shared": ("model", "optimizer", "objects", "sentinel", "counters"),
    "local": ("buffers", "random", "cursor", *_LATER_KEYS),
}
NUMBERS = frozenset((
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
))  # fmt: skip
"""Types of NumPy's single numbers that are kept as such."""
_BAND = 16 << 20  # bytes of a tensor that are read at once where it is copied elsewhere


@dataclass(frozen=True)
class Decoding:
    """What stands for tensors, NumPy arrays and sharded tensors in a decoded tree, made from their names."""

    tensor: Callable[[str], Any]
    array: Callable[[str], Any]
    sharded: Callable[[str], Any]


def decode(tree: Any, made: Decoding) -> Any:
    """The value of a JSON tree.

    Raises CheckpointDamaged at an unknown tag; what the body of a tag cannot be made into raises ValueError, TypeError
    or whatever `made` raises.
    """
    if isinstance(tree, list):
        return [decode(item, made) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and (tag := next(iter(tree))).startswith("$"):
        return _decode_tag(tag, tree[tag], made)
    return {key: decode(item, made) for key, item in tree.items()}


def _decode_tag(tag: str, body: Any, made: Decoding) -> Any:
    match tag:
        case "$tensor":
            return made.tensor(body)
        case "$array":
            return made.array(body)
        case "$sharded":
            return made.sharded(body)
        case "$float":
            return float(body)
        case "$number":
            kind, number = body
            return _number(kind, number, made)
        case "$bytes":
            return base64.b64decode(body)
        case "$tuple":
            return tuple(decode(item, made) for item in body)
        case "$map":
            return {decode(key, made): decode(item, made) for key, item in body}
        case "$counter":
            return Counter({decode(key, made): decode(item, made) for key, item in body})
        case _:
            raise CheckpointDamaged(f"a state tree has the unknown tag {tag!r}")


def _number(kind: str, number: Any, made: Decoding) -> Any:
    if kind not in NUMBERS:
        raise CheckpointDamaged(f"a state tree has a number of the unknown type {kind!r}")
    try:
        return np.dtype(kind).type(decode(number, made))
    except OverflowError as error:
        raise CheckpointDamaged(f"a state tree has the {kind} {number}") from error


class TensorFile(Protocol):
    """Something with the bytes of tensors: a shard, or what others have written."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...
    def read_into(self, name: str, memory: memoryview, start: int | None = None) -> None: ...
    def mapped(self, name: str) -> memoryview | None: ...


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies."""

    shard: TensorFile
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.shard.entries[self.name]

    def blocks(self) -> Iterator[memoryview]:
        """Its bytes in order, read anew each time, while the shard is open."""
        return _bands(self.entry, [(whole(self.entry.shape), self)])


@dataclass(frozen=True)
class StoredParts:
    """A sharded tensor: parts that are the whole of it together, each where it lies."""

    parts: Sequence[tuple[Part, Stored]]

    @property
    def entry(self) -> TensorEntry:
        """Of the whole tensor. It lies nowhere as a whole, so `start` means nothing."""
        (part, stored), *_ = self.parts
        dtype, shape = stored.entry.dtype, part.shape
        return TensorEntry(dtype, shape, 0, bytes_of(dtype, shape))

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of the whole tensor in order, read anew each time, while the shards are open."""
        return _bands(self.entry, self.parts)


def _bands(entry: TensorEntry, parts: Sequence[tuple[Part, Stored]]) -> Iterator[memoryview]:
    """The bytes of a whole tensor, some of its rows at a time, so that memory does not grow with it."""
    if not entry.nbytes:
        return
    shape = entry.shape or (1,)
    step = max(1, _BAND // (entry.nbytes // shape[0]))
    for first in range(0, shape[0], step):
        band = Box((first, *(0,) * len(shape[1:])), (min(step, shape[0] - first), *shape[1:]))
        room = np.empty((*band.shape, ITEM_SIZE[entry.dtype]), np.uint8)
        for part, stored in parts:
            box = part.box if entry.shape else band
            if (common := box.overlap(band)) is None:
                continue
            rows = np.empty((common.shape[0], *box.shape[1:], ITEM_SIZE[entry.dtype]), np.uint8)
            start = (common.at[0] - box.at[0]) * rows[0].nbytes
            stored.shard.read_into(stored.name, rows.reshape(-1).data, start)
            room[common.inside(band)] = rows[common.inside(Box((common.at[0], *box.at[1:]), rows.shape[:-1]))]
        yield room.reshape(-1).data


@dataclass(frozen=True)
class Contents:
    """Decoded trees. `shared` is the same on all ranks; `local` has one for each, in rank order."""

    shared: Mapping[str, Any]
    local: Sequence[Mapping[str, Any]]

    def model(self, rank: int) -> dict[str, Any]:
        """The model's state as that rank restores it: parameters, and its own buffers."""
        return {**self.shared["model"], **self.local[rank]["buffers"]}


def read_contents(shards: Sequence[ShardReader], frozen: ShardReader | None = None) -> Contents:
    """Decode all trees of a checkpoint from its open shards, in rank order, and from the file with its frozen weights.

    Raises CheckpointDamaged where a tree is missing, is no such tree, or refers to a tensor that none of these has.
    """
    everywhere = {name: shard for shard in shards for name in shard.entries}
    try:
        still = read_digests(shards[0].metadata) if frozen is not None else {}
        everywhere = {name: frozen for name in still if frozen and name in frozen.entries} | everywhere
        parts = parts_by_name(shards)
        sharded = {name: _whole(name, found) for name, found in parts.items()}
    except ValueError as error:
        raise CheckpointDamaged(f"the tensors of the checkpoint do not fit together: {error}") from error
    shared = _read_tree(shards[0], "shared", everywhere, sharded)
    # The names of local tensors are the same in every shard, so they are looked up in the rank's own.
    local = [_read_tree(shard, "local", dict.fromkeys(shard.entries, shard), {}) for shard in shards]
    return Contents(shared, local)


def parts_by_name(shards: Sequence[ShardReader]) -> dict[str, list[tuple[Part, Stored]]]:
    """All parts of each sharded tensor, replicas among them. Raises ValueError where a shard describes none that is."""
    found: dict[str, list[tuple[Part, Stored]]] = {}
    for shard in shards:
        shapes = {name: entry.shape for name, entry in shard.entries.items()}
        for name, part in read_parts(shard.metadata, shapes).items():
            found.setdefault(name, []).append((part, Stored(shard, name)))
    return found


def _whole(name: str, found: Sequence[tuple[Part, Stored]]) -> StoredParts:
    if len({stored.entry.dtype for _, stored in found}) > 1:
        raise ValueError(f"the parts of {name!r} differ in their type")
    chosen = [found[number] for number in cover(name, [part for part, _ in found])]
    return StoredParts(chosen or found[:1])


def require_keys(value: Any, which: str) -> None:
    """Raise CheckpointDamaged unless a decoded tree (`shared` or `local`) has all that a restore takes from it."""
    for key in _KEYS[which]:
        if not isinstance(value, dict) or not isinstance(value.get(key, {} if key in _LATER_KEYS else None), dict):
            raise CheckpointDamaged(f"the tree {which!r} has no {key!r}")


def _read_tree(
    shard: ShardReader, which: str, source: Mapping[str, ShardReader], sharded: Mapping[str, StoredParts]
) -> Mapping[str, Any]:
    def fetch(name: str) -> Stored:
        if name not in source:
            raise CheckpointDamaged(f"the tree {which!r} of {shard.path} refers to {name!r}, which no shard holds")
        return Stored(source[name], name)

    if which not in shard.metadata:
        raise CheckpointDamaged(f"the shard {shard.path} has no tree {which!r}")
    try:
        value = decode(parse_json(shard.metadata[which]), Decoding(fetch, fetch, sharded.__getitem__))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointDamaged(f"the tree {which!r} of {shard.path} cannot be read: {error}") from error
    require_keys(value, which)
    return dict(value)
