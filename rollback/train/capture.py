"""Copying what a rank stores of a state into memory that is laid out as the shard will be.

Two kinds of tensors. *Still* ones (parameters, optimizer state) change only inside `optimizer.step()`: they may be
copied by a thread while the next forward and backward run, until the optimizer begins. *Restless* ones (buffers, and
whatever other objects keep) are copied at once. Version counters tell whether a still one moved all the same; the
capture is torn then. What is written past them (`parameter.data`, or raw memory) is not seen.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor

from rollback.rundir.layout import Entry, Kind, Layout
from rollback.rundir.region import Region
from rollback.train import drift, tree
from rollback.train.ranks import Ranks
from rollback.train.state import Image, owners

PARAMETERS = "shared/model/"
_STILL = (PARAMETERS, "shared/optimizer/state/")
_CHUNK = 1 << 20  # is hashed while the copy has it in the processor's cache


@dataclass(frozen=True)
class Share:
    """What one rank stores of an image. parameters: all of them, also those that others store; for drift only."""

    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def kinds(self) -> dict[str, Kind]:
        return {name: (tree.DTYPE_CODE[item.dtype], tuple(item.shape)) for name, item in self.tensors.items()}


def share_of(image: Image, ranks: Ranks) -> Share:
    owner = owners(image.shared_tensors, ranks.world_size)
    mine = {name: item for name, item in image.shared_tensors.items() if owner[name] == ranks.rank}
    metadata = {"local": json.dumps(image.local)}
    if ranks.first:
        metadata["shared"] = json.dumps(image.shared)
    parameters = {
        name: item
        for name, item in image.shared_tensors.items()
        if name.startswith(PARAMETERS) and ranks.world_size > 1
    }
    return Share({**mine, **image.local_tensors}, parameters, metadata)


class Capture:
    """One copy under way. `begin` and `fence` belong to the thread that trains, `finish` to any one.

    digest: of the parameters of this rank, for `drift`; 0 until `finish` is through.
    """

    def __init__(self, share: Share, layout: Layout, region: Region) -> None:
        self.digest = 0
        self._share = share
        self._layout = layout
        self._region = region
        watched = {**share.parameters, **{name: item for name, item in share.tensors.items() if _is_still(name)}}
        self._watched = [(name, item, item._version) for name, item in watched.items()]
        self._stream: Any = None
        self._arrived: Any = None
        self._device_digest: Tensor | None = None

    def begin(self) -> None:
        """Copy what may change at any moment, and have the device begin to copy what it holds.

        Raises ValueError where the trees have outgrown the header's room.
        """
        self._region.view[: self._layout.room] = self._layout.head(self._share.metadata)
        for name, item in self._share.tensors.items():
            if not item.is_cuda and not _is_still(name):
                self._copy(name, item)
        on_device = [(name, item) for name, item in self._share.tensors.items() if item.is_cuda]
        if on_device:
            self._begin_on_device(on_device)

    def finish(self) -> None:
        """Copy the rest. When it returns all is in the region."""
        running = xxhash.xxh3_64()
        for name, item in self._share.parameters.items():
            if not item.is_cuda:
                self._copy(name, item, running)
        for name, item in self._share.tensors.items():
            if not item.is_cuda and _is_still(name) and name not in self._share.parameters:
                self._copy(name, item)
        if self._arrived is not None:
            self._arrived.synchronize()
        on_device = int(self._device_digest) if self._device_digest is not None else 0
        if self._share.parameters:
            self.digest = drift.fold(running.intdigest() ^ (on_device & ((1 << 64) - 1)))

    def fence(self) -> None:
        """What the training stream does from now on comes after the copy. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def moved(self) -> list[str]:
        """Names of still tensors that were written to since the beginning."""
        return [name for name, item, version in self._watched if item._version != version]

    def _copy(self, name: str, item: Tensor, running: Any = None) -> None:
        """Into the region, if this rank stores it, and into the running digest, if there is one."""
        entry = self._layout.entries.get(name) if name in self._share.tensors else None
        if not item.is_contiguous() or item.is_conj() or item.is_neg():
            item = item.resolve_conj().resolve_neg().contiguous()
        target, source, size = self._region.address + (entry.start if entry else 0), item.data_ptr(), item.nbytes
        if running is None:
            ctypes.memmove(target, source, size)
            return
        bits = bytes_of(item)
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            if entry is not None:
                ctypes.memmove(target + start, source + start, length)
            running.update(bits[start : start + length])

    def _begin_on_device(self, tensors: list[tuple[str, Tensor]]) -> None:
        device = tensors[0][1].device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, item in tensors:
                view(self._region, self._layout.entries[name]).copy_(item, non_blocking=True)
                item.record_stream(self._stream)
            held = [item for item in self._share.parameters.values() if item.is_cuda]
            if held:
                self._device_digest = torch.zeros((), dtype=torch.int64, pin_memory=True)
                self._device_digest.copy_(drift.on_device(held), non_blocking=True)
            self._arrived.record(self._stream)
        if any(not _is_still(name) for name, _ in tensors):
            self.fence()  # restless ones: the next kernel may change them


def view(region: Region, entry: Entry) -> Tensor:
    """A tensor over a place in the region."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=tree.DTYPE[entry.dtype])
    flat = torch.frombuffer(region.view[entry.start : entry.end], dtype=tree.DTYPE[entry.dtype])
    return flat.reshape(entry.shape)


def bytes_of(value: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as a view."""
    return value.detach().reshape(-1).view(torch.uint8).numpy().data


def pin(region: Region) -> None:
    """Let devices copy into a region without a detour, where there are devices and they can."""
    if region.size and torch.cuda.is_available():
        torch.cuda.cudart().cudaHostRegister(region.address, region.size, 0)  # type: ignore[no-untyped-call]


def unpin(region: Region) -> None:
    if region.size and torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(region.address)  # type: ignore[no-untyped-call]


def _is_still(name: str) -> bool:
    return name.startswith(_STILL)
