"""Loads an optimizer's state bit for bit.

torch gives each tensor of a parameter's state the type of the parameter when it loads them, but for `step`. Moments or
weights that an optimizer keeps in float32 for parameters in bfloat16 would be rounded, and counters and masks would
become fractions: from then on it is another training, and nothing shows it.
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def load_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Load what its `state_dict` gave, in the types that were stored.

    torch's `state_dict` gives the live states. One of an optimizer's own making gives copies, perhaps of other types;
    what its `load_state_dict` makes of them stays.
    """
    optimizer.load_state_dict(stored)
    loaded, then = optimizer.state_dict().get("state"), stored.get("state")
    if not (isinstance(loaded, dict) and isinstance(then, dict)):
        return
    for number, live in loaded.items():
        if isinstance(live, dict):
            live.update(_as_stored(live, then.get(number)))


def _as_stored(now: Any, then: Any) -> Any:
    """What was loaded, with the stored tensors in place of those that have another type now."""
    match now, then:
        case Tensor(), Tensor():
            return then.to(now.device) if now.dtype != then.dtype else now
        case dict(), dict():
            return {key: _as_stored(value, then.get(key)) for key, value in now.items()}
        case (list(), list()) | (tuple(), tuple()) if len(now) == len(then):
            return type(now)(map(_as_stored, now, then))
    return now
