"""The small part of a rank's state at a step's end.

Between two updates the parameters and the optimizer's tensors stay as they are, so every survivor has them. Of the
rest, what only the rank knows (random states, position in the data, kept values, buffers) goes into its marks. What is
the same on all ranks (other objects, parameter groups, counters) stays in its memory, for the case that it survives.
`SmallStateReader` reads at every step, so it takes microseconds.
"""

import ctypes
import json
import marshal
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rollback.checkpoints.format.layout import ITEM_SIZE
from rollback.checkpoints.format.shard import ShardPiece
from rollback.train.data.rng import RawRandom, tree_of
from rollback.train.last_snapshot.device import device_of
from rollback.train.snapshots.capture import piece_of
from rollback.train.state import tree
from rollback.train.state.image import BUFFERS
from rollback.train.state.kept_values import plain
from rollback.train.state.state import TrainingState

_LOCAL = {
    "of_data": "local/cursor", "nonfinite": "local/nonfinite",
    "cursor": "local/cursor", "opening": "local/cursor/opening", "random": "", "parts": "",
}  # fmt: skip
_MOVING = "offset", "batch", "last_indices"
"""What of a position is another one in each step: whole numbers and a text, or nothing."""
_LENGTHS = struct.Struct("<2Q")  # of a text, and of the bytes that it tells of; of all these, and of what was sent
_NOTHING = b"{}]"  # the end of a text that tells nothing of the step's end
KEPT = "kept at end"
_MOST = 1 << 20  # bytes of the tensors of another object
_AT_EACH = "would have to be copied at every step"
_MARSHAL = 2  # later versions of the format tell of references, too


def _encoder() -> Callable[[Any], str]:
    """As `json.JSONEncoder.encode`, which makes the encoder in C anew for each call."""
    plain = json.JSONEncoder(separators=(",", ":"), check_circular=False)
    if (make := getattr(json.encoder, "c_make_encoder", None)) is None:
        return plain.encode
    write = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(write(value, 0))


_encode = _encoder()


class LocalState(NamedTuple):
    """What only one rank knows. Two are equal where nothing of it has changed in between."""

    text: str
    stored: bytes
    unchanging: bytes = b""
    """What belongs behind `body`: the same object for as long as nothing of it changes."""

    def body(self, at_end: Mapping[str, Any], sent: bytes = b"") -> bytes:
        """A mark's content without what stays. at_end: what is known at a step's end alone. sent: what the rank has
        told the others of the step. An early mark has neither."""
        text, stored = f"[{self.text},{_encode(at_end) if at_end else '{}'}]".encode(), self.stored
        lengths = _LENGTHS.pack(len(text), len(stored))
        length = len(lengths) + len(text) + len(stored)
        return b"".join((_LENGTHS.pack(length, len(sent)), lengths, text, stored, sent))

    def kept(self) -> Any:
        """The values that are kept, as trees by name."""
        return SmallState.of(split(self.body({}) + self.unchanging)[1]).trees["kept"]


class SharedState:
    """What is small and the same on all ranks, apart from the sentinel, as it was when this was made.

    It is made at every step's end and mostly never asked, so plain values are copied as bytes at first. Making it or
    asking it raises UsageError for what a checkpoint cannot keep, which the guard has refused before.
    """

    def __init__(self, told: dict[str, Any], texts: Mapping[str, str], common_local: Mapping[str, Any]) -> None:
        self.texts = texts
        """Of the kept values, by name."""
        self.common_local = common_local
        """What is the same in the `local` trees of all ranks: which buffers there are, and whether the next forward
        broadcasts them. Nothing changes it."""
        self._told: bytes | tuple[dict[str, Any], dict[str, Tensor]]
        if (copied := _copy_of(told)) is not None:
            self._told = copied
        else:
            trees, tensors = _small(told, _place_of_shared)
            self._told = trees, {name: item.detach().clone() for name, item in tensors.items()}

    def encoded(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Trees, and the tensors that they refer to."""
        if isinstance(self._told, bytes):
            self._told = _small(marshal.loads(self._told), _place_of_shared)  # noqa: S302 - made here, of plain values
        return self._told


class SmallStateReader:
    """Reads the small state of one rank. Nothing here is collective. Raises UsageError for what a checkpoint cannot
    keep."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._random = RawRandom()
        self._rest = _Unchanged(None, "", b"")
        self._opening = _Unchanged.of(None, {"opening": None})
        self._position: tuple[tuple[int, int, int, bool], dict[str, Any], str] | None = None
        """Where the cursor stands in the step in progress, and what `_find_position` found there."""
        self._registers: _Registers | None = None
        self._views: list[memoryview] = []
        self._scattered: list[Tensor] = []
        self._instead = b""  # of what is on a GPU
        self.on_gpu: list[Tensor] = []
        """Buffers whose bytes `local` does not have: the GPU is further behind. There are as many zeros at its end."""
        self._of_buffers = ""
        self._unchanging = b""
        self._buffer_trees: dict[str, Any] = {}

    def coming(self) -> LocalState | None:
        """`local` at the end of the step in progress, in its last backward; None: it is not known."""
        coming = self._state.kept.coming()
        return None if coming is None else self.local(coming)

    def local(self, coming: dict[str, Any] | None = None) -> LocalState:
        """coming: the kept values at the end of the step in progress, while a batch is trained on, for a cursor that
        does not read ahead."""
        if self._registers is None or not self._registers.are_unchanged():
            self._find_buffers()
        state, in_step = self._state, coming is not None
        values = state.kept.of_rank() if coming is None else coming
        random, parts = self._random.read()
        kept = _copy_of(values)
        parts.append(marshal.dumps(plain(values), _MARSHAL) if kept is None else kept)
        cursor, position = state.cursor, self._position
        place = cursor.epoch, cursor.offset, cursor.batch, cursor.opened
        if position is None or in_step or position[0] != place:
            position = place, *self._find_position()
        self._position = position if in_step else None  # the step's end finds it again
        _, steady, moving = position
        told = {
            "of_data": cursor.of_data(), "random": random,
            "nonfinite": state.finite.left_alone or {}, "parts": [*map(len, parts)], "cursor": steady,
        }  # fmt: skip
        try:
            key = marshal.dumps(told, _MARSHAL)  # it tells the types and bits of plain values, and is never read
        except ValueError:  # there are tensors or the like in it
            key = None
        if key is None or key != self._rest.source:
            self._rest = _Unchanged.of(key, told)
        scattered = map(_bytes_of, self._scattered) if self._scattered else ()
        stored = b"".join((*parts, self._rest.stored, *self._views, *scattered, self._instead))
        return LocalState(f"{self._rest.text},{moving}", stored, self._unchanging)

    def _find_position(self) -> tuple[dict[str, Any], str]:
        """The cursor's position without the epoch's opening: what of it mostly stays, and as JSON what moves."""
        position = self._state.cursor.position()
        if (opening := position.pop("opening", None)) is not self._opening.source:
            self._opening = _Unchanged.of(opening, {"opening": opening})
            self._join_unchanging()
        moving = {}
        for name in _MOVING:
            if name in position:
                moving[name] = position.pop(name)
        return position, _encode(moving)

    def _join_unchanging(self) -> None:
        """Of which buffers there are bytes, and the epoch's opening."""
        text, stored = f"[{self._of_buffers},{self._opening.text}]".encode(), self._opening.stored
        self._unchanging = b"".join((_LENGTHS.pack(len(text), len(stored)), text, stored))

    def shared(self) -> SharedState:
        """A copy: nothing changes it later. What of it belongs to `local` is as when that was read."""
        state = self._state
        groups = [*map(dict.copy, state.optimizer.param_groups)]
        for group in groups:
            del group["params"]
        objects = {name: item.state_dict() for name, item in state.objects.items()} if state.objects else {}
        common_local = {**self._buffer_trees, "broadcasts": state.broadcasts.state_dict()}
        return SharedState({**state.small_shared(objects), "groups": groups}, state.kept.shared_texts(), common_local)

    def forget(self) -> None:
        """The cursor was put elsewhere, and the random states were restored."""
        self._position = None
        self._random.forget()

    def _find_buffers(self) -> None:
        image = self._state.image()
        self._registers = _Registers(self._state.modules.values())
        buffers = {name: item for name, item in image.local_tensors.items() if name.startswith(BUFFERS)}
        gpu = device_of(self._state)
        on_gpu = {name: buffers.pop(name) for name, item in [*buffers.items()] if item.device == gpu}
        scattered = {name: item for name, item in buffers.items() if not item.is_contiguous()}
        in_one_piece = {name: item for name, item in buffers.items() if name not in scattered}
        self._views = [item.reshape(-1).view(torch.uint8).numpy().data for item in in_one_piece.values()]
        self._scattered = [*scattered.values()]
        self.on_gpu = [*on_gpu.values()]
        self._instead = bytes(sum(item.nbytes for item in self.on_gpu))
        self._of_buffers = _encode(_table({**in_one_piece, **scattered, **on_gpu}))
        self._buffer_trees = {name: image.local[name] for name in ("buffers", "nonpersistent_buffers")}
        self._join_unchanging()

    def why_not_copied(self) -> str | None:
        """Why the state of this job is not copied at every step, in words; None: it is."""
        for name, item in self._state.modules.items():
            if name != "model":
                return (
                    f"beside the model the guard keeps another module, the {type(item).__name__} {name!r}: all of it "
                    + _AT_EACH
                )
        for name, other_object in self._state.objects.items():
            size = sum(leaf.nbytes for leaf in tree_leaves(other_object.state_dict()) if isinstance(leaf, Tensor))
            if size > _MOST:
                return f"beside the model the guard keeps {size >> 20} MiB of {name!r}: all of it {_AT_EACH}"
        if (other := self._of_another_kind()) is not None:
            return (
                f"the model's state has {other!r}, which is neither a parameter nor a buffer, and whether a forward "
                "changes that is not known"
            )
        return None

    def _of_another_kind(self) -> str | None:
        """What the model's state has beside parameters and buffers (`get_extra_state`), if there is something."""
        model = self._state.model
        known = {name: item for of in (model.named_parameters, model.named_buffers) for name, item in of()}
        memory = {tree.memory_of(item) for item in known.values() if tree.is_storable(item)}
        others = ((name, item) for name, item in model.state_dict().items() if name not in known)
        return next((name for name, item in others if not _is_one_of(item, memory)), None)


def _is_one_of(item: Any, memory: Container[tuple[Any, ...]]) -> bool:
    """Whether it is a tensor that is known by another name."""
    return isinstance(item, Tensor) and tree.is_storable(item) and tree.memory_of(item) in memory


class _Registers:
    """What modules have registered, of buffers and of modules, and where each tensor of it lies: a forward may make
    other buffers, or exchange modules."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        modules = [module for root in roots for module in root.modules()]
        self._all: list[dict[str, Any]] = [module._modules for module in modules]
        self._all += [module._buffers for module in modules]
        self._lengths = [*map(len, self._all)]
        self._filled = [register.values() for register in self._all if register]  # of others the length tells all
        self._items = [*chain.from_iterable(self._filled)]
        self._tensors = [item for item in self._items if isinstance(item, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._tensors)]

    def are_unchanged(self) -> bool:
        if [*map(len, self._all)] != self._lengths or not all(map(is_, chain.from_iterable(self._filled), self._items)):
            return False
        return [*map(Tensor.data_ptr, self._tensors)] == self._addresses


class _Unchanged(NamedTuple):
    """A part that stays the same for as long as `source` does, as text and bytes."""

    source: Any
    text: str
    stored: bytes

    @classmethod
    def of(cls, source: Any, told: dict[str, Any]) -> "_Unchanged":
        trees, tensors = _small(told, _LOCAL.__getitem__)
        text = f"[{_encode(trees)},{_encode(_table(tensors)) if tensors else '[]'}]"
        return cls(source, text, b"".join(map(_bytes_of, tensors.values())))


def _copy_of(told: Any) -> bytes | None:
    """Plain values as bytes, which `marshal` reads. None: there is something else in it.

    Numbers and arrays of NumPy would become bytes without a word. So what was written is read and compared.
    """
    try:
        copied = marshal.dumps(told, _MARSHAL)
        return copied if marshal.loads(copied) == told else None  # noqa: S302 - as above
    except (ValueError, TypeError):  # whether two arrays are equal is more than one answer, or none
        return None


def _small(told: dict[str, Any], place_of: Callable[[str], str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The trees of small states by name, and their tensors. place_of: gives the path of each."""
    tensors: dict[str, Tensor] = {}
    return {name: tree.encode(value, place_of(name), tensors) for name, value in told.items()}, tensors


def _place_of_shared(name: str) -> str:
    return "shared/optimizer/param_groups" if name == "groups" else f"shared/{name}"


def _table(tensors: Mapping[str, Tensor]) -> list[Any]:
    return [[name, tree.DTYPE_CODE[item.dtype], [*item.shape]] for name, item in tensors.items()]


def _bytes_of(item: Tensor) -> bytes:
    if item.is_cuda or not item.is_contiguous():
        item = item.cpu().contiguous()
    return ctypes.string_at(item.data_ptr(), item.nbytes)


class _Pieces:
    """Takes bytes apart. Raises ValueError where not all of them are told of."""

    def __init__(self, stored: bytes) -> None:
        self._left = memoryview(stored)

    def __call__(self, length: int) -> memoryview:
        piece, self._left = self._left[:length], self._left[length:]
        return piece

    def tensors(self, table: Sequence[tuple[str, str, list[int]]]) -> dict[str, "_Stored"]:
        """The rest, as tensors by name: dtype code, shape and bytes."""
        found = {name: (code, tuple(shape), self(prod(shape) * ITEM_SIZE[code])) for name, code, shape in table}
        if self._left:
            raise ValueError(f"{len(self._left)} bytes of which nothing is told")
        return found


_Stored = tuple[str, tuple[int, ...], memoryview]


@dataclass(frozen=True)
class SmallState:
    """A mark's content, read back. tensors: dtype code, shape and bytes, by name."""

    trees: Mapping[str, Any]
    tensors: Mapping[str, _Stored]
    random: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: bytes) -> "SmallState":
        """Raises ValueError, KeyError, TypeError, EOFError, struct.error for what is no mark's content."""
        text, stored, unchanging = _parted(body)
        (told, rest), moving, at_end = json.loads(text)
        late = marshal.loads(bytes.fromhex(at_end.pop(KEPT))) if KEPT in at_end else {}  # noqa: S302 - as below
        text, of_epoch, nothing = _parted(unchanging)
        buffers, (opening, of_opening) = json.loads(text)
        told["cursor"] |= moving | opening | told.pop("of_data") | at_end
        bytes_of = _Pieces(stored)
        *parts, kept = [bytes(bytes_of(length)) for length in told.pop("parts")]
        values = marshal.loads(kept)  # noqa: S302 - it runs nothing; who may write it: docs/trust.md
        told["kept"] = tree.encode(values | late, "local/kept", {})
        tensors = bytes_of.tensors((*rest, *buffers)) | _Pieces(of_epoch).tensors(of_opening)
        if nothing:
            raise ValueError(f"{len(nothing)} bytes of which nothing is told")
        return cls(told, tensors, tree_of(told.pop("random"), parts))

    @property
    def buffer_names(self) -> list[str]:
        return sorted(name for name in self.tensors if name.startswith(BUFFERS))

    def local(
        self, common_local: Mapping[str, Any], texts: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[ShardPiece]]:
        """The `local` tree of this rank's shard, and the tensors in it. common_local: what marks lack of it. texts:
        what they lack of the kept values."""
        random: dict[str, Tensor] = {}
        local = {
            **common_local, "random": tree.encode(dict(self.random), "local/random", random),
            "cursor": self.trees["cursor"], "nonfinite": self.trees["nonfinite"],
            "kept": {**self.trees["kept"], **texts},
        }  # fmt: skip
        pieces = [piece_of(name, item) for name, item in random.items()]
        return local, pieces + [ShardPiece(name, *told) for name, told in self.tensors.items()]


def same_but_for_next(early: bytes, end: bytes) -> bool:
    """Whether two contents of marks differ in nothing, or in what `early` does not tell of the step's end alone."""
    (told, *others), (told_end, *others_end) = map(_parted, (early, end))
    return others == others_end and told.endswith(_NOTHING) and told_end.startswith(told.removesuffix(_NOTHING))


def split(body: bytes) -> tuple[bytes, bytes]:
    """Both parts of a mark's content, where what stays is behind it: what was sent, and with what stays what only the
    rank knew. Raises ValueError."""
    local, sent, unchanging = _parted(body)
    return sent, local + unchanging


def _parted(joined: bytes) -> tuple[bytes, bytes, bytes]:
    """Two things, as a text and the bytes that it tells of, and what comes behind them. Raises ValueError."""
    first, second = _LENGTHS.unpack_from(joined)
    start, end = _LENGTHS.size + first, _LENGTHS.size + first + second
    if end > len(joined):
        raise ValueError(f"{len(joined)} bytes, and {end} are told of")
    return joined[_LENGTHS.size : start], joined[start:end], joined[end:]
