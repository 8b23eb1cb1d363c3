"""Reading from shards into tensors of a device.

A shard that lies in memory which the driver has registered is copied at the speed of the link. Others go through two
registered rooms of each thread that reads: one is filled from the file while the device copies from the other.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.format.contents import TensorFile
from rollback.train.snapshots.capture import bytes_of
from rollback.train.snapshots.copy_stream import current

_ROOM = 32 << 20  # bytes: large enough for the link's full speed


@dataclass(frozen=True)
class DeviceRead:
    """A tensor in a file that is to fill one on a device, which is contiguous."""

    file: TensorFile
    name: str
    target: Tensor


def await_devices(wanted: Sequence[DeviceRead]) -> None:
    """Wait until nothing that was asked of their devices before still works on the tensors."""
    for device in {read.target.device for read in wanted if read.target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def read_to_devices(wanted: Sequence[DeviceRead]) -> None:
    """Carry the reads out, in this thread. When it returns the tensors are filled. Raises CheckpointUnreadable."""
    ways = {device: _Way(device) for device in {read.target.device for read in wanted}}
    try:
        for read in wanted:
            ways[read.target.device].fill(read)
    finally:
        for way in ways.values():
            way.settle()


class _Way:
    """A thread's way to one device, in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._rooms: list[tuple[Tensor, Any]] = []

    def fill(self, read: DeviceRead) -> None:
        target = read.target.detach().reshape(-1).view(torch.uint8)
        if not len(target):
            return
        with self._in_stream():
            if (mapped := read.file.mapped(read.name)) is not None:
                target.copy_(torch.frombuffer(mapped, dtype=torch.uint8), non_blocking=True)
                return
            for start in range(0, len(target), _ROOM):
                part = target[start : start + _ROOM]
                room, copied = self._next_room()
                read.file.read_into(read.name, bytes_of(room[: len(part)]), start)
                part.copy_(room[: len(part)], non_blocking=True)
                if copied is not None:
                    copied.record(self._stream)

    def settle(self) -> None:
        """Wait until the device has all that was read."""
        if self._stream is not None:
            self._stream.synchronize()

    def _next_room(self) -> tuple[Tensor, Any]:
        """A room that the device does not copy from any more, and the event of the next copy from it."""
        if len(self._rooms) < 2:
            room = torch.empty(_ROOM, dtype=torch.uint8, device="cpu", pin_memory=self._cuda)
            copied = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
        else:
            room, copied = self._rooms.pop(0)
            if copied is not None:
                copied.synchronize()
        self._rooms.append((room, copied))
        return room, copied

    def _in_stream(self) -> AbstractContextManager[object]:
        return current(self._stream) if self._stream is not None else nullcontext()
