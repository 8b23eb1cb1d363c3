"""How tensors lie in a shard: the safetensors format (https://github.com/huggingface/safetensors, README, "Format").

Eight bytes of header length, the JSON header padded with spaces, tensor data without gaps. Tensors that fill whole
pages come first, so that all of them begin at the same place in a page (see `region.copy`), then the others by item
size, largest first: so each is aligned. Nothing here knows torch or touches a file.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from rollback.system.small_json import parse_json, require_modest, require_shallow

_BY_SIZE: Mapping[int, Mapping[str, str]] = {
    1: {"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn"},
    2: {"I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16"},
    4: {"I32": "int32", "U32": "uint32", "F32": "float32"},
    8: {"I64": "int64", "U64": "uint64", "F64": "float64", "C64": "complex64"},
}
ITEM_SIZE: Mapping[str, int] = {code: size for size, names in _BY_SIZE.items() for code in names}
DTYPE_NAME: Mapping[str, str] = {code: name for names in _BY_SIZE.values() for code, name in names.items()}
"""What torch, and run.json with it, calls the type of a code."""
_PAGE = 4096
HEADER_LIMIT = 32 << 20
MOST_SPACE = HEADER_LIMIT - _PAGE
"""Bytes that a header is given at most."""

PADDING = "padding"
"""A tensor that means nothing: it keeps a file of the fast tier at its size, whatever is in it."""

TensorKind = tuple[str, tuple[int, ...]]
"""Dtype code and shape of a tensor."""


class NotReadBack(ValueError):
    """A header that no reader would believe: a checkpoint with it would be lost."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in a shard; `start` counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


@dataclass(frozen=True)
class Layout:
    entries: Mapping[str, TensorEntry]
    header_space: int
    """Bytes before the first of them."""
    size: int
    """Bytes of the file."""

    def head(self, metadata: Mapping[str, str]) -> bytes:
        """The file's first `header_space` bytes. Raises ValueError where the metadata are too long for them, and
        NotReadBack where no header can have them."""
        text, space = _header(self.entries, self.header_space, metadata), self.header_space - 8
        try:
            if len(text) > MOST_SPACE - 8:
                raise ValueError(f"it has {len(text)} bytes; at most {MOST_SPACE - 8} are believed")
            require_modest(text)
            for part in metadata.values():
                require_shallow(part)
        except ValueError as error:
            raise NotReadBack(str(error)) from None
        if len(text) > space:
            raise ValueError(f"a header of {len(text)} bytes in a room of {space}")
        return struct.pack("<Q", space) + text + b" " * (space - len(text))


def lay_out(kinds: Mapping[str, TensorKind], header_space: int, size: int | None = None) -> Layout:
    """The layout of these tensors behind `header_space` bytes, a multiple of eight.

    With `size` the file has that many bytes: a tensor `PADDING` takes what the others leave. Raises ValueError where
    they take more.
    """
    if size is not None:
        surplus = size - header_space - sum(bytes_of(*kind) for kind in kinds.values())
        if surplus < 0:
            raise ValueError(f"{-surplus} bytes more than there is room for")
        kinds = {**kinds, PADDING: ("U8", (surplus,))}
    entries: dict[str, TensorEntry] = {}
    position = header_space
    for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: _rank(*item)):
        nbytes = bytes_of(dtype, shape)
        entries[name] = TensorEntry(dtype, shape, position, nbytes)
        position += nbytes
    return Layout(entries, header_space, position)


def bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Of a tensor."""
    return prod(shape) * ITEM_SIZE[dtype]


def _rank(name: str, kind: TensorKind) -> tuple[bool, bool, int, str]:
    return name == PADDING, bytes_of(*kind) % _PAGE > 0, -ITEM_SIZE[kind[0]], name


def header_space_for(kinds: Mapping[str, TensorKind], metadata: Mapping[str, str], multiple: int = 8) -> int:
    """Bytes that a header takes, filled up to a multiple of so many."""
    needed = 8 + len(_header(lay_out(kinds, 0).entries, 0, metadata))
    return -(-needed // multiple) * multiple


def _header(entries: Mapping[str, TensorEntry], base: int, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, entry in entries.items():
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start - base, entry.end - base],
        }
    return json.dumps(header, separators=(",", ":")).encode()


def parse_header(text: bytes, size: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Entries and metadata from a header's JSON in a file of `size` bytes.

    Raises ValueError, KeyError, TypeError, or AttributeError unless offsets follow from dtypes and
    shapes and cover the file's data without gaps or overlaps.
    """
    base = 8 + len(text)
    header = parse_json(text)
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items()):
        raise ValueError("metadata that is not text")
    entries: dict[str, TensorEntry] = {}
    position = 0
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        start, end = item["data_offsets"]
        shape = tuple(item["shape"])
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
            raise ValueError(f"tensor {name!r} has a size that is not a natural number")
        if start != position or end - start != bytes_of(item["dtype"], shape):
            raise ValueError(f"tensor {name!r} does not lie where its dtype and shape say")
        entries[name] = TensorEntry(item["dtype"], shape, base + start, end - start)
        position = end
    if base + position != size:
        raise ValueError(f"{size - base - position} bytes belong to no tensor")
    return entries, metadata
