"""Reads checkpoints of torch.distributed.checkpoint (DCP) without torch: which tensors there are, and their bytes.

A directory with `.metadata` (a pickle, read as data, see `pickled`) and data files. A tensor is stored in parts; each
part is what torch.save makes of it: a zip archive, somewhere in a data file, whose member `data/0` has the bytes as
they lie, uncompressed. So any rows of a part can be read alone.
"""

import io
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from rollback.checkpoints.format.contents import Stored
from rollback.checkpoints.format.layout import DTYPE_NAME, ITEM_SIZE, TensorEntry, bytes_of
from rollback.checkpoints.format.parts import Box, Part, cover
from rollback.checkpoints.outside.pickled import LIMIT, Named, Persistent, read_pickled
from rollback.errors import CheckpointDamaged, CheckpointUnreadable, reporting

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint."
_CODE = {f"torch.{name}": code for code, name in DTYPE_NAME.items()}
_STORAGES = {
    "torch.FloatStorage": "F32", "torch.DoubleStorage": "F64", "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16", "torch.LongStorage": "I64", "torch.IntStorage": "I32", "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8", "torch.ByteStorage": "U8", "torch.BoolStorage": "BOOL",
}  # fmt: skip
_PLAIN = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
"""The second also says the type, for types whose storage has no name of its own."""
_NOT_SOUND = (
    ValueError, LookupError, TypeError, AttributeError, EOFError, NotImplementedError, OverflowError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip
_PICKLE_LIMIT = 1 << 20  # bytes of a tensor's description


@dataclass(frozen=True)
class _Place:
    file: str
    offset: int
    length: int


class PartReader:
    """One stored part of a tensor. As of a shard, rows of it can be read."""

    def __init__(self, folder: Path, place: _Place, name: str, entry: TensorEntry) -> None:
        self._path, self._place, self._name = folder / place.file, place, name
        self.entries = {name: entry}
        self._start: int | None = None
        self._in_rows: memoryview | None = None
        """All of it, where it does not lie row by row."""

    def mapped(self, name: str) -> None:
        """They are in files alone."""

    def read_into(self, name: str, memory: memoryview, start: int | None = None) -> None:
        """Read a tensor into memory of exactly its size; with `start`, only as much of it as the memory has room for,
        from that byte on. Raises CheckpointDamaged where there is no such tensor, and CheckpointUnreadable where the
        disk fails."""
        flat = memory.cast("B") if memory.nbytes else memoryview(b"")
        with reporting(CheckpointUnreadable, f"reading {self._path}"), open(self._path, "rb", buffering=0) as file:
            if self._start is None:
                self._start, strides = self._find(file)
                if strides is not None:
                    self._in_rows = self._put_in_rows(file, strides)
            if self._in_rows is not None:
                flat[:] = self._in_rows[start or 0 :][: len(flat)]
            else:
                self._fill(file, flat, start or 0)

    def _fill(self, file: io.FileIO, flat: memoryview, start: int) -> None:
        done, base = 0, start + (self._start or 0)
        while done < len(flat):
            if not (got := os.preadv(file.fileno(), [flat[done:]], base + done)):
                raise CheckpointDamaged(f"{self._path} ends within the tensor {self._name!r}")
            done += got

    def _put_in_rows(self, file: io.FileIO, strides: Sequence[int]) -> memoryview:
        entry = self.entries[self._name]
        item = ITEM_SIZE[entry.dtype]
        as_it_lies = np.empty((entry.nbytes // item, item), np.uint8)
        self._fill(file, as_it_lies.reshape(-1).data, 0)
        steps = (*(stride * item for stride in strides), 1)
        in_order = np.lib.stride_tricks.as_strided(as_it_lies, (*entry.shape, item), steps)
        return np.ascontiguousarray(in_order).reshape(-1).data

    def _find(self, file: io.FileIO) -> tuple[int, Sequence[int] | None]:
        """The place of the first byte in the file, once what is there has been compared with what has to be there; and
        the strides, where it does not lie row by row."""
        try:
            with zipfile.ZipFile(_Slice(file, self._place)) as archive:
                members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
                description, data = members["data.pkl"], members["data/0"]
                if description.file_size > _PICKLE_LIMIT or not all(map(_lies_as_it_is, members.values())):
                    raise ValueError("it is compressed or encrypted, or no tensor")
                if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                    raise ValueError("its bytes are in another order")
                strides = self._compare(read_pickled(archive.read(description)), data.file_size)
                header = os.pread(file.fileno(), 30, self._place.offset + data.header_offset)
                start: int = data.header_offset + len(header) + sum(struct.unpack_from("<HH", header, 26))
        except _NOT_SOUND as error:
            raise CheckpointDamaged(f"the tensor {self._name!r} in {self._path} cannot be read: {error}") from error
        return self._place.offset + start, strides

    def _compare(self, tensor: Any, stored: int) -> Sequence[int] | None:
        """Raise ValueError unless the described tensor is the expected one. Its strides, unless it lies row by row."""
        entry = self.entries[self._name]
        while isinstance(tensor, Named) and tensor.name.endswith("_rebuild_parameter") and tensor.arguments:
            tensor = tensor.arguments[0]
        if not isinstance(tensor, Named) or tensor.name not in _PLAIN or not tensor.arguments:
            raise ValueError(f"it is a {getattr(tensor, 'name', type(tensor).__name__)}, not a plain tensor")
        storage, offset, shape, strides, *more = tensor.arguments
        typed = _STORAGES.get(storage.content[1].name) if isinstance(storage, Persistent) else None
        kind = typed or _CODE.get(more[2].name), tuple(shape)
        if kind != (entry.dtype, entry.shape):
            raise ValueError(f"it is a {kind}, and .metadata says {(entry.dtype, entry.shape)}")
        if offset or stored != entry.nbytes or len(strides) != len(shape):
            raise ValueError("it has other bytes than its own")
        if not entry.nbytes:
            return None
        in_rows = [prod(shape[place + 1 :]) for place in range(len(shape))]
        if all(length == 1 or one == other for length, one, other in zip(shape, strides, in_rows, strict=True)):
            return None
        reach = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        if not all(type(stride) is int and stride >= 0 for stride in strides) or reach >= prod(shape):
            raise ValueError("it does not lie in its bytes")
        return tuple(strides)


def _lies_as_it_is(member: zipfile.ZipInfo) -> bool:
    """Neither compressed nor encrypted, as torch.save writes it."""
    return member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1


class _Slice(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, file: io.FileIO, place: _Place) -> None:
        self._file, self._place, self._at = file, place, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._place.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory)[: max(0, self._place.length - self._at)]
        got = os.preadv(self._file.fileno(), [view], self._place.offset + self._at) if view else 0
        self._at += got
        return got


def read_contents_of(folder: Path) -> tuple[dict[str, list[tuple[Part, Stored]]], list[Path]]:
    """The parts of each tensor, and the files that have them. Nothing is read but `.metadata`.

    Raises OSError; ValueError where it is no such checkpoint, or the parts of a tensor are not the whole of it.
    """
    with open(folder / METADATA, "rb") as file:
        text = file.read(LIMIT + 1)
    if len(text) > LIMIT:
        raise ValueError(f"{METADATA} has more than {LIMIT} bytes")
    table = read_pickled(text)
    if not isinstance(table, Named) or table.name != f"{_MODULE}metadata.Metadata":
        raise ValueError(f"{METADATA} is not that of a DCP checkpoint")
    found: dict[str, list[tuple[Part, Stored]]] = {}
    try:
        places = _places(table["storage_data"])
        for name, item in _mapping(table["state_dict_metadata"]).items():
            if isinstance(item, Named) and item.name == f"{_MODULE}metadata.TensorStorageMetadata":
                found[str(name)] = list(_parts(folder, str(name), item, places))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{METADATA} has something in it that is not what it should be: {error}") from error
    return found, [folder / file for file in sorted({place.file for place in places.values()})]


def _places(table: Any) -> dict[tuple[str, tuple[int, ...] | None], _Place]:
    found = {}
    for index, info in _mapping(table).items():
        file, offset, length = (info[key] for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{METADATA} names the file {file!r}, which is not below it")
        if not all(type(number) is int and number >= 0 for number in (offset, length)):
            raise ValueError(f"{METADATA} names no place in {file}")
        if info.state.get("transform_descriptors"):
            raise ValueError(f"{file} is compressed or encrypted ({info.state['transform_descriptors']})")
        at = index.state.get("offset") if isinstance(index.state, dict) else None
        found[index["fqn"], None if at is None else _shape(at)] = _Place(file, offset, length)
    return found


def _parts(
    folder: Path, name: str, item: Named, places: Mapping[tuple[str, tuple[int, ...] | None], _Place]
) -> Sequence[tuple[Part, Stored]]:
    properties, shape = item["properties"], _shape(item["size"])
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties["dtype"]
    if not isinstance(dtype, Named) or dtype.name not in _CODE:
        raise ValueError(f"the tensor {name!r} has a type that is not known here")
    parts = []
    for chunk in item["chunks"]:
        box = Box(_shape(chunk["offsets"]), _shape(chunk["sizes"]))
        place = places.get((name, box.at)) or places.get((name, None))
        if place is None:
            raise ValueError(f"the part of {name!r} at {box.at} is nowhere")
        code = _CODE[dtype.name]
        entry = TensorEntry(code, box.shape, place.offset, bytes_of(code, box.shape))
        parts.append((Part(shape, box), Stored(PartReader(folder, place, name, entry), name)))
    list(cover(name, [part for part, _ in parts]))
    return parts


def _mapping(value: Any) -> dict[Any, Any]:
    if isinstance(value, Named):
        return dict(value.items)
    if not isinstance(value, dict):
        raise ValueError("a table in it is none")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    """Of a torch.Size."""
    sides = value.arguments[0] if isinstance(value, Named) and value.arguments else ()
    if isinstance(value, tuple):
        sides = value
    if not all(type(side) is int and side >= 0 for side in sides):
        raise ValueError("a shape in it is none")
    return tuple(sides)
