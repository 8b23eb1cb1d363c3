"""Scalars of a TensorBoard event file, read without TensorBoard.

An event file is a sequence of records: length (8 bytes), masked CRC of the length (4), data, masked CRC of the data
(4), all little endian. The data is a protocol buffer of type Event, of which four fields matter here: the step, the
summary in it, and in a summary's values the tag and the number, which old writers store as a float and new ones as a
tensor of one element. So little is needed that a dependency of a hundred megabytes is not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from rollback.errors import UsageError

_HEADER = struct.Struct("<QI")
_CRC_OF_DATA = 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DT_FLOAT, _DT_DOUBLE = 1, 2

_Field = tuple[int, int, int | bytes]


def is_event_file(head: bytes) -> bool:
    """Whether a file that begins so is an event file: the CRC of the first record's length is right."""
    if len(head) < _HEADER.size:
        return False
    length, crc = _HEADER.unpack_from(head)
    return bool(crc == _masked_crc(head[:8]) and length < 1 << 40)


def read_scalars(path: Path) -> dict[str, list[float | str | None]]:
    """Columns `step` and one for each scalar tag, a row for each step in order of first appearance.

    A record that is cut off ends the file: the writer was killed. Raises UsageError if a record in the middle is not
    what was written.
    """
    rows: dict[int, dict[str, float]] = {}
    for record in _records(path):
        step, values = _event(record, path)
        for tag, value in values:
            rows.setdefault(step, {})[tag] = value
    tags = list(dict.fromkeys(tag for row in rows.values() for tag in row))
    table: dict[str, list[float | str | None]] = {"step": [float(step) for step in rows]}
    return table | {tag: [row.get(tag) for row in rows.values()] for tag in tags}


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            length, crc = _HEADER.unpack(header)
            if crc != _masked_crc(header[:8]):
                raise UsageError(
                    f"{path} is damaged: the record that ends at byte {file.tell()} has a wrong checksum",
                    hint="copy the file again from where it was written",
                )
            data = file.read(length + _CRC_OF_DATA)
            if len(data) < length + _CRC_OF_DATA:
                return
            yield data[:length]


def _event(record: bytes, path: Path) -> tuple[int, list[tuple[str, float]]]:
    step = 0
    values: list[tuple[str, float]] = []
    try:
        for number, _, value in _fields(record):
            if number == 2 and isinstance(value, int):
                step = value if value < 1 << 63 else value - (1 << 64)
            elif number == 5 and isinstance(value, bytes):
                values += [found for _, _, raw in _fields(value) if isinstance(raw, bytes) and (found := _scalar(raw))]
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise UsageError(f"{path} holds a record that is no event: {error}", hint="copy the file again") from error
    return step, values


def _scalar(raw: bytes) -> tuple[str, float] | None:
    tag, number = "", None
    for field, wire, value in _fields(raw):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif field == 2 and wire == _FIXED32 and isinstance(value, bytes):
            number = float(struct.unpack("<f", value)[0])
        elif field == 8 and isinstance(value, bytes):
            number = _tensor(value)
    return (tag, number) if tag and number is not None else None


def _tensor(raw: bytes) -> float | None:
    """The number in a tensor of one element, or None for any other tensor."""
    kind, content = 0, b""
    for field, _, value in _fields(raw):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):  # raw content, packed floats, packed doubles
            content = value
    layout = {_DT_FLOAT: "<f", _DT_DOUBLE: "<d"}.get(kind)
    if layout is None or len(content) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, content)[0])


def _fields(message: bytes) -> Iterator[_Field]:
    """(field number, wire type, value) for each field of a protocol buffer: an integer, or the bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            integer, at = _varint(message, at)
            yield number, wire, integer
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise IndexError(f"wire type {wire}")
        if at + length > len(message):
            raise IndexError("field longer than its message")
        yield number, wire, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7


def _table() -> list[int]:
    entries = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)  # noqa: PLW2901 - CRC-32C, Castagnoli
        entries.append(entry)
    return entries


_CRC_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
