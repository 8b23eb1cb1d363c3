"""What a script switches in mid-run: which parameters require a gradient, and which modules are in training mode. A
script that unfreezes layers, or puts its batch norms into eval mode, and is sent back to before that, must not train so
there. A mode is put back as it was at the same point of the script, in the guard between two batches; an evaluation
with a mode of its own sets and leaves it before or behind.

A checkpoint has what was changed since the guard was made, and by what the script began with. A new process begins with
what its script says, which may be something else on purpose, and so does a resume. Only a rollback within a process
puts back what a checkpoint has, and only if that began with the same as this process.

A checkpoint also has which parameters had a gradient then. It has no gradients, since their update is made. But an
optimizer passes over a parameter without one, and decays and moves one whose gradient is zero: that is what
`zero_grad(set_to_none=False)` leaves to a parameter that the next update does not use.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
import xxhash
from torch import nn

_gradient = attrgetter("grad")


class _Switches:
    """An attribute of each of some things, true or false, that a script may change."""

    def __init__(self, attribute: str, things: Mapping[str, Any]) -> None:
        self._attribute, self._of = attribute, attrgetter(attribute)
        self._names, self._things = [*things], [*things.values()]
        self._first = [*map(self._of, self._things)]
        told = "\n".join(name for name, on in zip(self._names, self._first, strict=True) if not on)
        self._digest = xxhash.xxh3_64_hexdigest(told.encode())

    def state_dict(self) -> dict[str, Any]:
        """A digest of the names for which it was false when this was made, and the names for which it has changed."""
        changed: list[str] = []
        if (now := [*map(self._of, self._things)]) != self._first:
            each = zip(self._names, now, self._first, strict=True)
            changed = [name for name, on, first in each if on != first]
        return {"first": self._digest, "changed": changed}

    def missing(self, told: Mapping[str, Any] | None) -> set[str]:
        """Names for which it had changed, where that is told of a script that began with the same, and has not now."""
        if told is None or told["first"] != self._digest:
            return set()
        return {*told["changed"]} - {*self.state_dict()["changed"]}

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Make it so again, where it is told of a script that began with the same. None: nothing is known."""
        if told is None or told["first"] != self._digest:
            return
        changed = {*told["changed"]}
        for name, thing, first in zip(self._names, self._things, self._first, strict=True):
            if self._of(thing) != (on := first != (name in changed)):
                setattr(thing, self._attribute, on)


class ModelSwitches:
    """Of the parameters and modules that there were when this was made, by name. Nothing here is collective."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._parameters = dict(_named(modules, "named_parameters"))
        self._wanted = _Switches("requires_grad", self._parameters)
        self._modes = _Switches("training", dict(_named(modules, "named_modules")))
        self.loaded: Mapping[str, Any] | None = None
        """What the last `load` has found; None: an older checkpoint, which has nothing of it."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: of `requires_grad` and of modes what began, and what has changed since; and the names of
        the parameters without a gradient; None: none has one. It is asked at every step's end."""
        without, gradients = None, [*map(_gradient, self._parameters.values())]
        if {*map(type, gradients)} - {type(None)}:
            each = zip(self._parameters, gradients, strict=True)
            without = [name for name, gradient in each if gradient is None or gradient.layout is not torch.strided]
        return {**self._wanted.state_dict(), "without": without, "modes": self._modes.state_dict()}

    def not_again(self) -> set[str]:
        """The parameters of which the script had changed `requires_grad` when what was loaded last was trained, and has
        not in this process."""
        return self._wanted.missing(self.loaded)

    def give_zeros(self, told: Mapping[str, Any] | None) -> None:
        """Give zeros to the parameters that had a gradient. An optimizer of sparse ones knows none but its own."""
        if told is None or (without := told.get("without")) is None:
            return
        without = {*without}
        for name, parameter in self._parameters.items():
            if name not in without:
                parameter.grad = torch.zeros_like(parameter)

    def put_back(self, told: Mapping[str, Any] | None) -> None:
        """Make both so again, as far as it is known. None: nothing is."""
        self._wanted.put_back(told)
        self._modes.put_back((told or {}).get("modes"))  # checkpoints had none once


def _named(modules: Mapping[str, nn.Module], what: str) -> Iterator[tuple[str, Any]]:
    """Parameters or modules by name; outside of the model it begins with that of the object."""
    for owner, module in modules.items():
        for name, item in getattr(module, what)():
            yield name if owner == "model" else f"{owner}.{name}", item
