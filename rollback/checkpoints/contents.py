"""What is in a checkpoint, without torch: its trees, with a reference wherever a tensor stands.

The tags are those of docs/format.md, "Shards". `rollback.train.state.tree` writes the trees and decodes them with this.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollback.checkpoints.layout import TensorEntry
from rollback.checkpoints.shard import ShardReader
from rollback.errors import CheckpointDamaged
from rollback.system.small_json import parse_json

_PARTS = {
    "shared": ("model", "optimizer", "objects", "sentinel", "counters"),
    "local": ("buffers", "nonpersistent_buffers", "random", "cursor", "kept", "nonfinite"),
}
_WITHOUT: Mapping[str, Any] = {"kept": {}, "nonpersistent_buffers": {}, "nonfinite": {}}
"""What a checkpoint means that lacks a part: those that once there were not."""


def decode(tree: Any, tensor: Callable[[str], Any], array: Callable[[str], Any]) -> Any:
    """The value of a JSON tree; `tensor(name)` and `array(name)` make what stands for tensors and NumPy arrays.

    Raises CheckpointDamaged at an unknown tag; what the body of a tag cannot be made into raises ValueError, TypeError
    or whatever `tensor` and `array` raise.
    """
    if isinstance(tree, list):
        return [decode(item, tensor, array) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1 and (tag := next(iter(tree))).startswith("$"):
        return _decode_tag(tag, tree[tag], tensor, array)
    return {key: decode(item, tensor, array) for key, item in tree.items()}


def _decode_tag(tag: str, body: Any, tensor: Callable[[str], Any], array: Callable[[str], Any]) -> Any:
    match tag:
        case "$tensor":
            return tensor(body)
        case "$array":
            return array(body)
        case "$float":
            return float(body)
        case "$bytes":
            return base64.b64decode(body)
        case "$tuple":
            return tuple(decode(item, tensor, array) for item in body)
        case "$map":
            return {decode(key, tensor, array): decode(item, tensor, array) for key, item in body}
        case "$counter":
            return Counter({decode(key, tensor, array): decode(item, tensor, array) for key, item in body})
        case _:
            raise CheckpointDamaged(f"a state tree has the unknown tag {tag!r}")


@dataclass(frozen=True)
class Stored:
    """A tensor where it lies."""

    shard: ShardReader
    name: str

    @property
    def entry(self) -> TensorEntry:
        return self.shard.entries[self.name]

    @property
    def data(self) -> memoryview:
        """Its bytes, read anew each time, while the shard is open."""
        return self.shard.data(self.name)


@dataclass(frozen=True)
class Contents:
    """Decoded trees. `shared` is the same on all ranks; `local` has one for each, in rank order."""

    shared: Mapping[str, Any]
    local: Sequence[Mapping[str, Any]]

    def model(self, rank: int) -> dict[str, Any]:
        """The model's state as that rank restores it: parameters, and its own buffers."""
        return {**self.shared["model"], **self.local[rank]["buffers"]}


def read_contents(shards: Sequence[ShardReader]) -> Contents:
    """Decode all trees of a checkpoint from its open shards, in rank order.

    Raises CheckpointDamaged where a tree is missing, is no such tree, or refers to a tensor that no shard has.
    """
    everywhere = {name: shard for shard in shards for name in shard.entries}
    shared = _read_tree(shards[0], "shared", everywhere)
    # The names of local tensors are the same in every shard, so they are looked up in the rank's own.
    local = [_read_tree(shard, "local", dict.fromkeys(shard.entries, shard)) for shard in shards]
    return Contents(shared, local)


def require_parts(value: Any, which: str) -> None:
    """Raise CheckpointDamaged unless a decoded tree (`shared` or `local`) has all that a restore takes from it."""
    for part in _PARTS[which]:
        if not isinstance(value, dict) or not isinstance(value.get(part, _WITHOUT.get(part)), dict):
            raise CheckpointDamaged(f"the tree {which!r} has no {part!r}")


def _read_tree(shard: ShardReader, which: str, source: Mapping[str, ShardReader]) -> Mapping[str, Any]:
    def fetch(name: str) -> Stored:
        if name not in source:
            raise CheckpointDamaged(f"the tree {which!r} of {shard.path} refers to {name!r}, which no shard holds")
        return Stored(source[name], name)

    if which not in shard.metadata:
        raise CheckpointDamaged(f"the shard {shard.path} has no tree {which!r}")
    try:
        value = decode(parse_json(shard.metadata[which]), fetch, fetch)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"the tree {which!r} of {shard.path} cannot be read: {error}") from error
    require_parts(value, which)
    return dict(value)
