"""The stream in which a device copies and digests for snapshots, beside the training; and memory that it copies into by
itself."""

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rollback.system.region import Region
from rollback.train.comm.recorder import say

_POLL = 0.0001


@contextmanager
def copy_stream(device: torch.device) -> Iterator[Any]:
    """That stream, current in this thread; it begins behind what the thread has asked of the device so far.

    There is one for each device. torch hands 32 of a device out in turn, to NCCL as well, so with a new one for each
    snapshot copies would now and then stand in front of the gradients' sums, and memory would be kept for all 32.
    """
    stream = _stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with current(stream):
        yield stream


@contextmanager
def current(stream: Any) -> Iterator[None]:
    """A stream, current in this thread, and so is its device.

    The device is named first: leaving a stream's block in a thread that has chosen no device would make a context on
    the first one, of half a gigabyte, in every rank.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def await_event(event: Any, seconds: float = float("inf")) -> bool:
    """Whether the device has come there, within that time. In any thread.

    By looking: a thread that waits in the driver keeps others out of it, so those that train could launch nothing for
    as long as a copy takes.
    """
    until = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def on_host(item: Tensor) -> Tensor:
    """A copy of a device's tensor in the host's memory; of the host's, the tensor itself. In any thread."""
    if not item.is_cuda:
        return item
    with copy_stream(item.device) as stream:
        item = item.resolve_conj().resolve_neg()  # else torch does that to a copy that has not arrived yet
        copied = torch.empty(item.shape, dtype=item.dtype, device="cpu", pin_memory=True)
        copied.copy_(item, non_blocking=True)
        await_event(stream.record_event())
    return copied


@cache
def _stream_of(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def pin(region: Region, device: torch.device | None) -> bool:
    """Register a region for copies from `device`, until it is closed; None: nothing is copied from a device. In any
    thread. Returns whether it is registered.

    The device is named, since a thread that has chosen none would make a context on the first one, in every rank. A
    driver that refuses costs speed, not the snapshot: what is copied into other memory holds the training up meanwhile.
    """
    if device is None or not region.size:
        return False
    with torch.cuda.device(device):
        refused = torch.cuda.cudart().cudaHostRegister(region.address, region.size, 0)  # type: ignore[no-untyped-call]
        if not int(refused):
            region.before_close = partial(_unpin, region.address, device)
            return True
        with contextlib.suppress(RuntimeError):  # torch raises a driver's last error at the next launch: here, then
            torch.zeros(1, device=device)
    say(
        f"{device} would not register {region.size / 1e6:.1f} MB of memory for copies (error {int(refused)}, "
        "see `ulimit -l`); each snapshot holds the training up until it is copied"
    )
    return False


def _unpin(address: int, device: torch.device) -> None:
    """Else the driver would take other memory for this one, that comes to lie at this address later."""
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
