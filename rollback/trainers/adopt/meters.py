"""Objects of other files that add up what a training is told of, as an `AverageMeter` or a metric of torchmetrics: what
is in them has no name in the script, so nothing of it is put back."""

from typing import Any

from torch import nn

_TELLS = frozenset(("avg", "average", "global_avg", "compute"))
"""Names under which meters have their mean."""


def is_meter(value: Any) -> bool:
    """Also a list or a dict that has one. Not a module with a state: the guard keeps it."""
    match value:
        case dict():
            return any(map(is_meter, value.values()))
        case list() | tuple():
            return any(map(is_meter, value))
        case nn.Module() if value.state_dict():
            return False
    names = {*dir(value)}
    return "update" in names and not _TELLS.isdisjoint(names)
