"""The small part of a rank's state at a step's end: what dies with the rank, and what a forward changes on all of them.

Between two updates the parameters and the optimizer's tensors stay as they are, so every survivor has them. The rest is
written into the rank's end mark: random states, position in the data, kept values, buffers, and what the other objects
and the parameter groups say. `SmallStateReader.read` runs at every step's end, so it takes microseconds.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from operator import is_
from typing import Any

from torch import Tensor, nn

from rollback.checkpoints.layout import ITEM_SIZE
from rollback.checkpoints.shard import ShardPiece
from rollback.train.data.raw_random import RawRandom, tree_of
from rollback.train.state import tree
from rollback.train.state.module_buffers import all_of
from rollback.train.state.state import TrainingState

_BUFFERS = ("local/buffers/", "local/nonpersistent_buffers/")
_PLACES = {
    "cursor": "local/cursor", "kept": "local/kept", "nonfinite": "local/nonfinite", "objects": "shared/objects",
    "counters": "shared/counters", "groups": "shared/optimizer/param_groups",
}  # fmt: skip
_OF_OTHERS = ("kept", "nonfinite")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class SmallStateReader:
    """Reads the small state of one rank. Nothing here is collective."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._random = RawRandom()
        self._opening: _Unchanged | None = None
        self._owners: list[dict[str, Tensor | None]] = []
        self._keys: list[str] = []
        self._items: list[Tensor | None] = []
        self._buffers: dict[str, Tensor] = {}
        self._of_buffers = ""
        self._found = False
        self.buffer_trees: dict[str, Any] = {}
        """The trees of the buffers, as they are in a checkpoint: the same at every step."""

    def read(self) -> bytes:
        """What a mark has. Raises UsageError for what a checkpoint cannot keep."""
        if not (self._found and all(map(is_, map(dict.get, self._owners, self._keys), self._items))):
            self._find_buffers()
        state, tensors = self._state, dict[str, Tensor]()
        random, parts = self._random.read()
        cursor, opening = state.cursor.state_dict(), None
        if cursor.get("opening") is not None:
            opening, cursor["opening"] = self._open(cursor["opening"]), None
        groups = [
            {key: item for key, item in group.items() if key != "params"} for group in state.optimizer.param_groups
        ]
        told: dict[str, Any] = {
            "cursor": cursor,
            "kept": state.memory.state_dict(),
            "nonfinite": state.finite.left_alone or {},
            "objects": {name: item.state_dict() for name, item in state.objects.items()},
            "counters": vars(state.counters),
            "groups": groups,
        }
        try:
            told = tree.encode_plain(told)
        except tree.NotPlain:
            told = {name: tree.encode(value, _PLACES[name], tensors) for name, value in told.items()}
        told["random"], told["parts"] = random, [len(part) for part in parts]
        texts = _encode(told), _encode(_table(tensors)), self._of_buffers, opening.text if opening else "null"
        text = "[{},{},{},{}]".format(*texts).encode()
        stored = opening.stored if opening else []
        held = map(_bytes_of, (*tensors.values(), *self._buffers.values()))
        return b"".join((len(text).to_bytes(8, "little"), text, *parts, *held, *stored))

    def _open(self, opening: Any) -> _Unchanged:
        """The random states at the epoch's opening. They stay the same until the next one."""
        if self._opening is None or self._opening.source is not opening:
            tensors: dict[str, Tensor] = {}
            encoded = tree.encode(opening, "local/cursor/opening", tensors)
            text = _encode([encoded, _table(tensors)])
            self._opening = _Unchanged(opening, text, [*map(_bytes_of, tensors.values())])
        return self._opening

    def _find_buffers(self) -> None:
        image = self._state.image()
        owned = [
            (owner._buffers, key, item)
            for module in self._state.modules.values() for owner in module.modules()
            for key, item in owner._buffers.items()
        ]  # fmt: skip
        self._owners, self._keys, self._items = ([row[place] for row in owned] for place in range(3))  # type: ignore[assignment]
        self._buffers = {name: item for name, item in image.local_tensors.items() if name.startswith(_BUFFERS)}
        self._of_buffers = _encode(_table(self._buffers))
        self.buffer_trees = {name: image.local[name] for name in ("buffers", "nonpersistent_buffers")}
        self._found = True

    def why_too_large(self) -> str | None:
        """Why the state of this job cannot be copied at every step, in words; None: it can."""
        modules = [
            name for name, item in self._state.modules.items() if name != "model" and isinstance(item, nn.Module)
        ]
        if modules:
            return f"{modules[0]!r} is a module of its own, too large to be copied at every step"
        if any(item.is_cuda for item in self._state.model.parameters()):
            return "the parameters are on a GPU"
        return None


@dataclass(frozen=True)
class _Unchanged:
    """A part that is the same at many steps, as text and bytes."""

    source: Any
    text: str
    stored: list[bytes]


def _table(tensors: Mapping[str, Tensor]) -> list[Any]:
    return [[name, tree.DTYPE_CODE[item.dtype], [*item.shape]] for name, item in tensors.items()]


def _bytes_of(item: Tensor) -> bytes:
    if item.is_cuda or not item.is_contiguous():
        item = item.cpu().contiguous()
    return ctypes.string_at(item.data_ptr(), item.nbytes)


@dataclass(frozen=True)
class SmallState:
    """A mark's content, read back. tensors: dtype code, shape and bytes, by name."""

    trees: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]]
    random: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: bytes) -> SmallState:
        """Raises ValueError, KeyError, TypeError for what is no mark's content."""
        start = 8 + int.from_bytes(body[:8], "little")
        told, dynamic, buffers, opening = json.loads(body[8:start])
        view, parts, tensors = memoryview(body), [], {}
        for length in told.pop("parts"):
            parts.append(bytes(view[start : start + length]))
            start += length
        if opening is not None:
            told["cursor"]["opening"] = opening[0]
        for name, code, shape in (*dynamic, *buffers, *(opening[1] if opening else ())):
            length = prod(shape) * ITEM_SIZE[code]
            tensors[name] = code, tuple(shape), view[start : start + length]
            start += length
        if start != len(body):
            raise ValueError(f"{len(body)} bytes, and {start} are told of")
        return cls(told, tensors, tree_of(told.pop("random"), parts))

    def local(self, buffer_trees: Mapping[str, Any]) -> tuple[dict[str, Any], list[ShardPiece]]:
        """The `local` tree of this rank's shard, and the tensors in it."""
        random: dict[str, Tensor] = {}
        local = {
            **buffer_trees, "random": tree.encode(dict(self.random), "local/random", random),
            "cursor": self.trees["cursor"], **{name: self.trees[name] for name in _OF_OTHERS},
        }  # fmt: skip
        pieces = [piece_of(name, item) for name, item in random.items()]
        return local, pieces + self._pieces("local/")

    def objects(self) -> list[ShardPiece]:
        """The tensors of the other objects and of the parameter groups."""
        return self._pieces("shared/")

    def _pieces(self, prefix: str) -> list[ShardPiece]:
        return [
            ShardPiece(name, code, shape, data)
            for name, (code, shape, data) in self.tensors.items() if name.startswith(prefix)
        ]  # fmt: skip


def piece_of(name: str, item: Tensor) -> ShardPiece:
    """A tensor for a shard, whose bytes are read when it is written."""
    return ShardPiece(name, tree.DTYPE_CODE[item.dtype], tuple(item.shape), lambda: [memoryview(_bytes_of(item))])


def large_state(state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is not in the marks, and the same on all ranks: the trees of parameters and optimizer, and their tensors.

    Any thread may call it: nothing is asked that another thread might be changing between two updates.
    """
    model, buffers = state.model.state_dict(), all_of(state.model)
    shared = {
        "model": {name: value for name, value in model.items() if name not in buffers},
        "optimizer": state.optimizer.state_dict(),
        "trained": state.trained_names(),
        "sentinel": state.sentinel.state_dict(),
    }
    tensors: dict[str, Tensor] = {}
    return tree.encode(shared, "shared", tensors), tensors


def shared_tree(large: Mapping[str, Any], small: SmallState, sentinel: Mapping[str, Any]) -> dict[str, Any]:
    """The `shared` tree: parameters and optimizer of one rank, the rest from its mark, and the sentinel's state."""
    optimizer = dict(large["optimizer"])
    optimizer["param_groups"] = [
        {**told, "params": group["params"]}
        for group, told in zip(optimizer["param_groups"], small.trees["groups"], strict=True)
    ]
    return {
        **large, "optimizer": optimizer, "objects": small.trees["objects"], "counters": small.trees["counters"],
        "sentinel": tree.encode(dict(sentinel), "shared/sentinel", {}),
    }  # fmt: skip
