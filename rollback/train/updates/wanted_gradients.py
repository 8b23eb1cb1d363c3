"""Which parameters require a gradient. A script that unfreezes layers in mid-run, and is sent back to before that, must
not train them there.

A checkpoint has what was changed since the guard was made, and by what the script began with. A new process begins with
what its script says, which may be something else on purpose, and so does a resume. Only a rollback within a process
puts back what a checkpoint has, and only if that began with the same as this process.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import xxhash
from torch import nn

_of = attrgetter("requires_grad")


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
        """For a checkpoint: a digest of the names that required none when this was made, and the names that have
        changed since. It is asked at every step's end."""
        if (now := [*map(_of, self._parameters)]) == self._first:
            return {"first": self._digest, "changed": []}
        changed = zip(self._names, now, self._first, strict=True)
        return {"first": self._digest, "changed": [name for name, wanted, first in changed if wanted != first]}

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Make it so again, where it is told of a script that began with the same. None: nothing is known."""
        if told is None or told["first"] != self._digest:
            return
        changed = {*told["changed"]}
        for name, parameter, first in zip(self._names, self._parameters, self._first, strict=True):
            if parameter.requires_grad != (wanted := first != (name in changed)):
                parameter.requires_grad_(wanted)
