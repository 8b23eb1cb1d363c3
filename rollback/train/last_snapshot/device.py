"""What a last snapshot needs of a GPU, which works behind its host: the host asks for a step's work and is further on
when it is done.

Three things make what the host knows true of the GPU too. Before an update the host waits until the GPU has all the
gradients (`await_gradients`): where a sum never comes, the update behind it was not asked for. What the GPU has at a
step's end it adds to the mark itself, in the order of its work (`add`): where that is there, it has made the update.
And what is kept is copied in a stream of its own (`read`): that of the training waits for a sum that never comes.
The communicator is not aborted for that. It writes to no parameter, and an abort would let the script go on.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.fast_tier import end_marks
from rollback.checkpoints.fast_tier.end_marks import EndMarkPaths, StepEnd
from rollback.system.region import Region
from rollback.system.threads import start_thread
from rollback.train.last_snapshot.proof import NotProved
from rollback.train.snapshots.capture import bytes_of
from rollback.train.snapshots.copy_stream import await_event, current, pin
from rollback.train.state.state import TrainingState

_BUFFER_BYTES = 32 << 20  # bytes that are copied at once: large enough for the link's full speed
_ANSWER = 10.0  # seconds for so many bytes
_CLOSING = 2.0  # seconds for what was asked of the GPU before this rank leaves
_URGENT = -1  # priority: torch hands streams of that one out for nothing else here, and NCCL has none of them

TensorReader = Callable[[Tensor], Tensor]
"""Gives a tensor as it is read on the host."""


class NoAnswer(NotProved):
    """A GPU did not answer in time, in words."""


def device_of(state: TrainingState) -> torch.device | None:
    """The GPU on which the parameters are; None: they are in the host's memory."""
    return next((item.device for item in state.model.parameters() if item.is_cuda), None)


class NoDevice:
    """In the place of a `Device` where the parameters are in the host's memory: nothing is behind the host."""

    def is_capturing(self) -> bool:
        return False

    def await_gradients(self) -> None: ...

    def note_update(self) -> None: ...

    def holding(self, told: bytes | Tensor) -> bytes | Tensor:
        return told

    def add(self, part: int, end: StepEnd, tensors: Sequence[Tensor], at: int = 0) -> None: ...

    def added(self, part: int, end: StepEnd, length: int, at: int = 0) -> bytes | None:
        return None

    def close(self) -> None: ...

    def read(self, item: Tensor) -> Tensor:
        return item


NO_DEVICE = NoDevice()


class Device(NoDevice):
    """One rank's GPU. The thread that trains calls everything but `read`. Raises OSError where there is no memory,
    and RollbackError where no thread can be made."""

    def __init__(self, device: torch.device, paths: EndMarkPaths, rank: int) -> None:
        self._device, on_gpu = device, device.type == "cuda"
        self._region = _memory(paths.added(rank))
        self._added = torch.frombuffer(self._region.view, dtype=torch.uint8)
        if on_gpu and not pin(self._region, device):
            raise OSError(f"{device} cannot copy into it without a wait of the host")
        try:
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
            self._stream: Any = torch.cuda.Stream(device, priority=_URGENT) if on_gpu else None  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # of the driver
            raise OSError(f"{device} would not register {_BUFFER_BYTES / 1e6:.0f} MB of memory: {error}") from error
        self._updated: Any = None
        self._last_added: Any = None
        self._one_reads, self._silent = threading.Lock(), False
        self._asked: queue.SimpleQueue[tuple[Tensor, Future[None]] | None] = queue.SimpleQueue()
        start_thread(threading.Thread(target=self._copy_what_is_asked, name="rollback-gpu", daemon=True))
        self.read(torch.zeros(1, device=device))  # a driver does at the first time what later would wait for the GPU

    # The thread that trains ------------------------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        """Whether the script records what it asks of the GPU as a graph, into which nothing else may come."""
        return self._stream is not None and torch.cuda.is_current_stream_capturing()

    def await_gradients(self) -> None:
        """Before an update: wait for all that was asked of the GPU so far."""
        if self._stream is not None and not self.is_capturing():
            await_event(torch.cuda.current_stream(self._device).record_event())

    def note_update(self) -> None:
        """Behind an update: what is added next comes behind it, in whatever stream it was made."""
        if self._stream is not None and not self.is_capturing():
            self._updated = torch.cuda.current_stream(self._device).record_event()

    def holding(self, told: bytes | Tensor) -> Tensor:
        """What is added, as the GPU has it."""
        if isinstance(told, bytes):
            told = (
                torch.frombuffer(bytearray(told), dtype=torch.uint8)
                if told
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        return told.to(self._device)

    def add(self, part: int, end: StepEnd, tensors: Sequence[Tensor], at: int = 0) -> None:
        """Have the GPU add these to that part of the mark, which is there already, once it has done all that was asked
        of it so far. The host does not wait. at: when it was left, of an early mark."""
        start, place = end_marks.place_of_added(part)
        if self._updated is not None:
            torch.cuda.current_stream(self._device).wait_event(self._updated)
        if tensors:
            told = torch.cat([_as_bytes(item) for item in tensors])
            self._added[place : place + len(told)].copy_(told, non_blocking=True)
        stamp = torch.full((1,), end_marks.stamp_of(end, at), dtype=torch.int64, device=self._device)
        self._added[start : start + stamp.nbytes].copy_(_as_bytes(stamp), non_blocking=True)
        if self._stream is not None:
            self._last_added = torch.cuda.current_stream(self._device).record_event()

    def added(self, part: int, end: StepEnd, length: int, at: int = 0) -> bytes | None:
        """What it has added there; None: it has not come so far."""
        start, place = end_marks.place_of_added(part)
        there = int(self._added[start : start + 8].view(torch.int64)) == end_marks.stamp_of(end, at)
        return self._added[place : place + length].numpy().tobytes() if there else None

    def close(self) -> None:
        """Nothing is added or read any more. Where the GPU does not come to an end, its memory stays as it is."""
        self._asked.put(None)
        with contextlib.suppress(RuntimeError):  # of a GPU on which everything fails since an error
            if self._last_added is None or await_event(self._last_added, _CLOSING):
                del self._added
                self._region.close()

    # Any thread ------------------------------------------------------------------------------------------------------

    def read(self, item: Tensor) -> Tensor:
        """A copy of a tensor of the GPU in the host's memory; of the host's, the tensor itself. Raises NoAnswer."""
        if item.device != self._device:
            return item
        item = item.detach()
        copied = torch.empty_strided(item.size(), item.stride(), dtype=item.dtype, device="cpu")
        source, target = _span(item), bytes_of(_span(copied))
        with self._one_reads:
            for start in range(0, len(source), _BUFFER_BYTES):
                part = source[start : start + _BUFFER_BYTES]
                self._have_copied(part)
                target[start : start + len(part)] = bytes_of(self._buffer[: len(part)])
        return copied

    def _have_copied(self, part: Tensor) -> None:
        """Into the buffer. A call of the driver itself may not return, so another thread makes it."""
        if not self._silent:
            copied: Future[None] = Future()
            self._asked.put((part, copied))
            try:
                return copied.result(_ANSWER)
            except futures.TimeoutError:
                self._silent = True
        raise NoAnswer(f"{self._device} has not copied {len(part) / 1e6:.1f} MB within {_ANSWER:g} s")

    def _copy_what_is_asked(self) -> None:
        with current(self._stream) if self._stream is not None else contextlib.nullcontext():
            while (asked := self._asked.get()) is not None:
                part, copied = asked
                try:
                    self._buffer[: len(part)].copy_(part, non_blocking=True)
                    if self._stream is not None:
                        await_event(self._stream.record_event())
                    copied.set_result(None)
                except Exception as error:  # noqa: BLE001 - who asked tells it
                    copied.set_exception(error)


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
