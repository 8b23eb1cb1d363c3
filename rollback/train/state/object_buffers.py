"""Buffers of the modules that the guard keeps beside the model: of a second network, of an average of the weights.

In DDP the forward of each rank writes to its own, as to those of the model: the statistics of BatchNorm differ between
ranks, and so does an average of them. So each rank stores its own.
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rollback.train.sharded import is_sharded
from rollback.train.state.module_buffers import all_of

_FEW = 1 << 20  # bytes


def apart(objects: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The states of objects without the buffers that are each rank's own, and these.

    A module with much more in buffers than in parameters holds weights in them, as some averages do: the same on all
    ranks, and as large as the model. It is not taken apart, since each rank would store all of it.
    """
    shared, own = dict(states), {}
    for owner, item in objects.items():
        state = states[owner]
        if not isinstance(item, nn.Module) or type(state) not in (dict, OrderedDict):
            continue
        names = all_of(item)
        found = {
            name: value
            for name, value in state.items()
            if name in names and isinstance(value, Tensor) and not is_sharded(value)
        }
        weight = sum(parameter.nbytes for parameter in item.parameters())
        if found and sum(value.nbytes for value in found.values()) <= max(weight, _FEW):
            own[owner] = found
            shared[owner] = {name: value for name, value in state.items() if name not in found}
    return shared, own


def together(shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """What `apart` took apart."""
    return {owner: {**state, **own[owner]} if owner in own else state for owner, state in shared.items()}
