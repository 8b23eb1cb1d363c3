"""Scalars of a TensorBoard event file, read with TensorBoard's own reader, which needs no TensorFlow."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollback.errors import UsageError
from rollback.terminal.extras import require_extra

_VERSION = b"brain.Event:"  # in the first record of every event file


def is_event_file(head: bytes | bytearray) -> bool:
    """Whether a file that begins so is an event file."""
    return _VERSION in head[:64]


def read_scalars(path: Path) -> dict[str, list[float | str | None]]:
    """Columns `step` and one for each scalar tag, a row for each step in order of first appearance.

    A record that is cut off ends the file: the writer was killed. Raises UsageError if a record in the middle is not
    what was written, and where TensorBoard cannot be imported.
    """
    require_extra("tensorboard.compat.proto.event_pb2", "reading an event file needs TensorBoard", "tensorboard")
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    rows: dict[int, dict[str, float]] = {}
    for record in _records(path):
        try:
            event = Event.FromString(record)
        except DecodeError as error:
            raise UsageError(f"{path} holds a record that is no event: {error}", hint="copy the file again") from error
        for value in event.summary.value:
            if value.tag and (number := _number(value)) is not None:
                rows.setdefault(event.step, {})[value.tag] = number
    tags = list(dict.fromkeys(tag for row in rows.values() for tag in row))
    table: dict[str, list[float | str | None]] = {"step": [float(step) for step in rows]}
    return table | {tag: [row.get(tag) for row in rows.values()] for tag in tags}


def _records(path: Path) -> Iterator[bytes]:
    from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    reader, begin = PyRecordReader_New(str(path.absolute())), 0
    while True:
        try:
            reader.GetNext()
        except OutOfRangeError:
            return
        except (DataLossError, MemoryError, OverflowError) as error:
            if "truncated" in str(error):
                return
            raise UsageError(
                f"{path} is damaged: the record that begins at byte {begin} has a wrong checksum, or no sane length",
                hint="copy the file again from where it was written",
            ) from error
        begin += len(reader.record()) + 16  # its length, and two checksums
        yield reader.record()


def _number(value: Any) -> float | None:
    """The number of a value: old writers store it as a float, new ones as a tensor of one element."""
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE, DT_FLOAT

    if value.WhichOneof("value") == "simple_value":
        return float(value.simple_value)
    tensor = value.tensor
    layout, listed = {DT_FLOAT: ("<f", tensor.float_val), DT_DOUBLE: ("<d", tensor.double_val)}.get(
        tensor.dtype, ("", ())
    )
    if layout and len(tensor.tensor_content) == struct.calcsize(layout):
        return float(struct.unpack(layout, tensor.tensor_content)[0])
    return float(listed[0]) if len(listed) == 1 else None
