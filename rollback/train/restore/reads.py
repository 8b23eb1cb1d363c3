"""Reading tensors from shards: into the live tensors where they fit, by as many threads as the host has cores; also
into those of a device."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.format.contents import Stored, TensorFile
from rollback.checkpoints.format.layout import TensorKind
from rollback.checkpoints.format.parts import Box, Part, cover
from rollback.errors import CheckpointDamaged
from rollback.system.cgroups import cores_here
from rollback.system.threads import Threads
from rollback.train.comm.ranks import Ranks
from rollback.train.snapshots.capture import bytes_of
from rollback.train.snapshots.copy_stream import current
from rollback.train.state import tree

_BUFFER_BYTES = 32 << 20  # bytes: large enough for the link's full speed
_MOST_THREADS = 16  # that one rank reads with, however many cores it has: some take all that a memory can give


def fitting(present: Tensor | None, kind: TensorKind) -> Tensor | None:
    """The existing tensor if it is of that kind, else None."""
    if present is None or (tree.DTYPE_CODE[present.dtype], tuple(present.shape)) != kind:
        return None
    return present


def fresh(kind: TensorKind, device: torch.device | None = None) -> Tensor:
    dtype, shape = kind
    return torch.empty(shape, dtype=tree.DTYPE[dtype], device=device or "cpu")


class Reads:
    """Tensors that are to be read from shards into memory."""

    def __init__(self) -> None:
        self.wanted: list[_Read] = []
        self.to_devices: list[DeviceRead] = []

    def want(self, shard: TensorFile, key: str, present: Tensor | None) -> Tensor:
        """A tensor that will be read later: the present one if it is of the stored kind, else a new one.

        Decoding a tree puts tensors into their places and does not read their values, so it may come before."""
        entry = shard.entries[key]
        kind = entry.dtype, entry.shape
        present = fitting(present, kind)
        if present is not None and present.is_cuda and present.is_contiguous():
            self.to_devices.append(DeviceRead(shard, key, present))
            return present
        if present is not None and not present.is_contiguous():
            read = fresh(kind)
            shard.read_into(key, bytes_of(read))
            return present.copy_(read)
        target = fresh(kind) if present is None else present
        self.wanted.append(_Read(shard, key, bytes_of(target)))
        if present is not None:
            torch.autograd.graph.increment_version(present)
        return target

    def want_part(
        self, parts: Sequence[tuple[Part, Stored]], wanted: Part, present: Tensor | None, on: Tensor
    ) -> Tensor:
        """As `want`, for this rank's part of a sharded tensor. The stored parts may be other ones.

        on: a tensor on the device that a new one has to be on.
        """
        for part, stored in parts:
            if part == wanted and (present is not None or not on.is_cuda):
                return self.want(stored.shard, stored.name, present)
        (first, stored), *_ = parts
        if first.shape != wanted.shape:
            raise CheckpointDamaged(
                f"{stored.name!r} has the shape {first.shape} in the checkpoint, not {wanted.shape}"
            )
        present = fitting(present, (stored.entry.dtype, wanted.box.shape))
        in_place = present is not None and not present.is_cuda and present.is_contiguous()
        target = present if present is not None and in_place else fresh((stored.entry.dtype, wanted.box.shape))
        whole_rows = []
        for number in cover(stored.name, [part for part, _ in parts]):
            part, stored = parts[number]
            if (common := part.box.overlap(wanted.box)) is None:
                continue
            rows = target[common.inside(wanted.box)]
            if rows.is_contiguous() and common.shape[1:] == part.box.shape[1:]:
                whole_rows.append(
                    _Read(stored.shard, stored.name, bytes_of(rows), _before(common, part.box) * rows.itemsize)
                )
            else:
                rows.copy_(_read_box(stored, part.box, common))
        if in_place or (present is None and not on.is_cuda):
            self.wanted += whole_rows
            torch.autograd.graph.increment_version(target)
            return target
        _read_all(whole_rows)
        return target.to(on.device) if present is None else present.copy_(target)


@dataclass(frozen=True)
class _Read:
    """Bytes of a tensor in a file, from `start` on, that are to fill some memory."""

    file: TensorFile
    name: str
    memory: memoryview
    start: int | None = None


def _before(box: Box, part: Box) -> int:
    """How many items of a part lie before a box of whole rows in it."""
    return (box.at[0] - part.at[0]) * prod(part.shape[1:]) if part.shape else 0


def _read_box(stored: Stored, part: Box, wanted: Box) -> Tensor:
    """A box of a stored part. Only the needed rows of the first dimension are read."""
    rows = fresh((stored.entry.dtype, (wanted.shape[0], *part.shape[1:])))
    stored.shard.read_into(stored.name, bytes_of(rows), _before(wanted, part) * rows.itemsize)
    return rows[wanted.inside(Box((wanted.at[0], *part.at[1:]), tuple(rows.shape)))]


def threads_of(ranks: Ranks) -> int:
    """The number of threads that read. The ranks of a host share all cores: nothing else runs during a restore."""
    return min(max(1, cores_here() // len(ranks.on_this_host)), _MOST_THREADS)


@contextmanager
def reading(ranks: Ranks) -> Iterator[Reads]:
    """At the end of the body, read all that was asked for. Raises CheckpointUnreadable, when all threads have ended."""
    reads, threads = Reads(), threads_of(ranks)
    yield reads
    _await_devices(reads.to_devices)
    with Threads(threads, "rollback-reader") as pool:
        begun = [pool.submit(_read_all, reads.wanted[part::threads]) for part in range(threads)]
        begun += [pool.submit(read_to_devices, reads.to_devices[part::threads]) for part in range(threads)]
        for ended in begun:
            ended.result()


def _read_all(wanted: Sequence[_Read]) -> None:
    for read in wanted:
        read.file.read_into(read.name, read.memory, read.start)


@dataclass(frozen=True)
class DeviceRead:
    """A tensor in a file that is to fill one on a device, which is contiguous.

    A shard that lies in memory which the driver has registered is copied at the speed of the link. Others go through
    two registered buffers of each thread that reads: one is filled from the file while the device copies the other.
    """

    file: TensorFile
    name: str
    target: Tensor


def _await_devices(wanted: Sequence[DeviceRead]) -> None:
    """Wait until nothing that was asked of their devices before still works on the tensors."""
    for device in {read.target.device for read in wanted if read.target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def read_to_devices(wanted: Sequence[DeviceRead]) -> None:
    """Carry the reads out, in this thread. When it returns the tensors are filled. Raises CheckpointUnreadable."""
    copiers = {device: _DeviceCopier(device) for device in {read.target.device for read in wanted}}
    try:
        for read in wanted:
            copiers[read.target.device].fill(read)
    finally:
        for copier in copiers.values():
            copier.await_copies()


class _DeviceCopier:
    """A thread's copies to one device, in a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._buffers: list[tuple[Tensor, Any]] = []

    def fill(self, read: DeviceRead) -> None:
        target = read.target.detach().reshape(-1).view(torch.uint8)
        if not len(target):
            return
        with self._in_stream():
            if (mapped := read.file.mapped(read.name)) is not None:
                target.copy_(torch.frombuffer(mapped, dtype=torch.uint8), non_blocking=True)
                return
            for start in range(0, len(target), _BUFFER_BYTES):
                part = target[start : start + _BUFFER_BYTES]
                buffer, copied = self._next_buffer()
                read.file.read_into(read.name, bytes_of(buffer[: len(part)]), start)
                part.copy_(buffer[: len(part)], non_blocking=True)
                if copied is not None:
                    copied.record(self._stream)

    def await_copies(self) -> None:
        """Wait until the device has all that was read."""
        if self._stream is not None:
            self._stream.synchronize()

    def _next_buffer(self) -> tuple[Tensor, Any]:
        """A buffer that the device does not copy from any more, and the event of the next copy from it."""
        if len(self._buffers) < 2:
            buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._cuda)
            copied = torch.cuda.Event() if self._cuda else None  # type: ignore[no-untyped-call]
        else:
            buffer, copied = self._buffers.pop(0)
            if copied is not None:
                copied.synchronize()
        self._buffers.append((buffer, copied))
        return buffer, copied

    def _in_stream(self) -> AbstractContextManager[object]:
        return current(self._stream) if self._stream is not None else nullcontext()
