"""What a last snapshot needs of a GPU, which works behind its host: the host asks for a step's work and is further on
when it is done.

Three things make what the host knows true of the GPU too. Before an update the host waits until the GPU has all the
gradients (`await_gradients`): where a sum never comes, the update behind it was not asked for. What the GPU has at a
step's end it adds to the mark itself, in the order of its work (`add`): where that is there, it has made the update.
And what is kept is copied in a stream of its own (`read`): that of the training waits for a sum that never comes.
The communicator is not aborted for that. It writes to no parameter, and an abort would let the script go on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.system.region import Region
from rollback.train.snapshots.capture import bytes_of
from rollback.train.snapshots.pinned import pin, unpin
from rollback.train.state.state import TrainingState

_ROOM = 32 << 20  # bytes that are copied at once: large enough for the link's full speed
_ANSWER = 10.0  # seconds for so many bytes
_POLL = 0.0001

Read = Callable[[Tensor], Tensor]
"""Gives a tensor as it is read on the host."""


class NoAnswer(Exception):
    """A GPU did not answer in time, in words."""


def as_it_is(item: Tensor) -> Tensor:
    """The `Read` where there is no GPU."""
    return item


def device_of(state: TrainingState) -> torch.device | None:
    """The GPU on which the parameters are; None: they are in the host's memory."""
    return next((item.device for item in state.model.parameters() if item.is_cuda), None)


class Device:
    """One rank's GPU. The thread that trains calls everything but `read`. Raises OSError where there is no memory."""

    def __init__(self, device: torch.device, paths: EndMarkPaths, rank: int) -> None:
        on_gpu = device.type == "cuda"
        self._device, self._registered = device, device if on_gpu else None
        self._region = _memory(paths.added(rank))
        self._added = torch.frombuffer(self._region.view, dtype=torch.uint8)
        pin(self._region, self._registered)
        try:
            self._room = torch.empty(_ROOM, dtype=torch.uint8, pin_memory=on_gpu)
            self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of the driver
            raise OSError(f"{device} would not register {_ROOM / 1e6:.0f} MB of memory: {error}") from error
        self._one_reads = threading.Lock()

    def holding(self, told: bytes | Tensor) -> Tensor:
        """What is added, as the GPU has it."""
        if isinstance(told, bytes):
            told = torch.frombuffer(bytearray(told), dtype=torch.uint8) if told else torch.empty(0, dtype=torch.uint8)
        return told.to(self._device)

    def await_gradients(self) -> None:
        """Before an update: wait for all that was asked of the GPU so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def add(self, half: int, end: StepEnd, tensors: Sequence[Tensor]) -> None:
        """Behind a step: have the GPU add these to that half of the mark, which is there already, once it has done all
        that was asked of it so far. The host does not wait."""
        at, place = end_marks.place_of_added(half)
        if tensors:
            told = torch.cat([_as_bytes(item) for item in tensors])
            self._added[place : place + len(told)].copy_(told, non_blocking=True)
        stamp = torch.full((1,), end_marks.stamp_of(end), dtype=torch.int64, device=self._device)
        self._added[at : at + stamp.nbytes].copy_(_as_bytes(stamp), non_blocking=True)

    def read(self, item: Tensor) -> Tensor:
        """A copy of a tensor of the GPU in the host's memory; of the host's, the tensor itself. Any thread.

        Raises NoAnswer.
        """
        if item.device != self._device:
            return item
        item = item.detach()
        copied = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype)
        source, target = _span(item), bytes_of(_span(copied))
        with self._one_reads:
            for start in range(0, len(source), _ROOM):
                part = source[start : start + _ROOM]
                self._copy_into_room(part)
                target[start : start + len(part)] = bytes_of(self._room[: len(part)])
        return copied

    def close(self) -> None:
        """Nothing is added any more."""
        self.await_gradients()
        unpin(self._region, self._registered)
        del self._added
        self._region.close()

    def _copy_into_room(self, part: Tensor) -> None:
        if self._stream is None:
            self._room[: len(part)].copy_(part)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._room[: len(part)].copy_(part, non_blocking=True)
            copied = self._stream.record_event()
        self._await(copied, len(part))

    def _await(self, copied: Any, size: int) -> None:
        """An event, and the bytes that are copied before it."""
        until = time.monotonic() + _ANSWER
        while not copied.query():
            if time.monotonic() > until:
                raise NoAnswer(f"{self._device} has not copied {size / 1e6:.1f} MB within {_ANSWER:g} s")
            time.sleep(_POLL)


def _memory(path: Path) -> Region:
    with end_marks.new_memory(path, end_marks.SIZE_ADDED) as fd:
        return Region(end_marks.SIZE_ADDED, fd)


def _as_bytes(item: Tensor) -> Tensor:
    return item.detach().reshape(-1).view(torch.uint8)


def _span(item: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, as bytes in their order: no kernel has to run for it."""
    if not item.numel():
        return item.new_empty(0, dtype=torch.uint8)
    size = 1 + sum((count - 1) * step for count, step in zip(item.size(), item.stride(), strict=True))
    return item.as_strided((size,), (1,), item.storage_offset()).view(torch.uint8)
