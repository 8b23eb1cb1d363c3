"""Memory that a CUDA device copies into by itself: a region that its driver has registered."""

import contextlib
from functools import partial

import torch

from rollback.system.region import Region
from rollback.train.comm.recorder import say


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
