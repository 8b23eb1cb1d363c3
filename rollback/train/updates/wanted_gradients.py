"""Which parameters require a gradient, and which have one. A script that unfreezes layers in mid-run, and is sent back
to before that, must not train them there.

A checkpoint has what was changed since the guard was made, and by what the script began with. A new process begins with
what its script says, which may be something else on purpose, and so does a resume. Only a rollback within a process
puts back what a checkpoint has, and only if that began with the same as this process.

A checkpoint also has which parameters had a gradient then. It has no gradients, since their update is made. But an
optimizer passes over a parameter without one, and decays and moves one whose gradient is zero: that is what
`zero_grad(set_to_none=False)` leaves to a parameter that the next update does not use.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
import xxhash
from torch import nn

_of, _gradient = attrgetter("requires_grad"), attrgetter("grad")


class WantedGradients:
    """Of the parameters that the modules had when this was made, by name. Nothing here is collective."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        found = {
            name if owner == "model" else f"{owner}.{name}": parameter
            for owner, module in modules.items() for name, parameter in module.named_parameters()
        }  # fmt: skip
        self._names, self._parameters = [*found], [*found.values()]
        self._first = [*map(_of, self._parameters)]
        told = "\n".join(name for name, wanted in zip(self._names, self._first, strict=True) if not wanted)
        self._digest = xxhash.xxh3_64_hexdigest(told.encode())
        self.loaded: Mapping[str, Any] | None = None
        """What the last `load` has found; None: an older checkpoint, which has nothing of it."""

    def told(self) -> dict[str, Any]:
        """For a checkpoint: a digest of the names that required none when this was made, the names that have changed
        since, and the names of those without a gradient; None: none has one. It is asked at every step's end."""
        changed: list[str] = []
        if (now := [*map(_of, self._parameters)]) != self._first:
            each = zip(self._names, now, self._first, strict=True)
            changed = [name for name, wanted, first in each if wanted != first]
        return {"first": self._digest, "changed": changed, "without": self._without()}

    def _without(self) -> list[str] | None:
        gradients = [*map(_gradient, self._parameters)]
        if {*map(type, gradients)} <= {type(None)}:
            return None
        each = zip(self._names, gradients, strict=True)
        return [name for name, gradient in each if gradient is None or gradient.layout is not torch.strided]

    def give_zeros(self, told: Mapping[str, Any] | None) -> None:
        """Give zeros to the parameters that had a gradient. An optimizer of sparse ones knows none but its own."""
        if told is None or (without := told.get("without")) is None:
            return
        without = {*without}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name not in without:
                parameter.grad = torch.zeros_like(parameter)

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Make it so again, where it is told of a script that began with the same. None: nothing is known."""
        if told is None or told["first"] != self._digest:
            return
        changed = {*told["changed"]}
        for name, parameter, first in zip(self._names, self._parameters, self._first, strict=True):
            if parameter.requires_grad != (wanted := first != (name in changed)):
                parameter.requires_grad_(wanted)
