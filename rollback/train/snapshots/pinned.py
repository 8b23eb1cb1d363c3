"""Memory that a CUDA device copies into by itself: a region that its driver has registered."""

import torch

from rollback.system.region import Region
from rollback.train.comm.recorder import say


def pin(region: Region, device: torch.device | None) -> None:
    """Register a region for copies from `device`; None: nothing is copied from a device. In any thread.

    The device is named, since a thread that has chosen none would make a context on the first one, in every rank. A
    driver that refuses costs speed, not the snapshot: what is copied into other memory holds the training up meanwhile.
    """
    if device is None or not region.size:
        return
    with torch.cuda.device(device):
        refused = torch.cuda.cudart().cudaHostRegister(region.address, region.size, 0)  # type: ignore[no-untyped-call]
    if int(refused):
        say(
            f"{device} would not register {region.size / 1e6:.1f} MB of memory for copies (error {int(refused)}, "
            "see `ulimit -l`); each snapshot holds the training up until it is copied"
        )


def unpin(region: Region, device: torch.device | None) -> None:
    """Undo `pin`, before the region is closed."""
    if device is None or not region.size:
        return
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(region.address)  # type: ignore[no-untyped-call]
