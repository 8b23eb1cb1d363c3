"""Numbers that a module or another object of the script's own kind has as attributes (`self.t *= 0.99`), and which no
checkpoint has. Most numbers are settings; those that go on in each update, as counts and temperatures do, are none."""

import math
from collections import deque
from collections.abc import Iterator

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rollback.train.advice.optimizer_attributes import goes_on, is_moderate, numbers_of
from rollback.train.introspection import is_of_own_file
from rollback.train.state.module_buffers import NUMBERS_KEPT
from rollback.train.state.state import TrainingState

_LOOKS = 5  # in all of which a number must go on


class OwnNumbers:
    """Looks at them behind each of the first updates. Nothing here is collective."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._of_modules: dict[str, deque[float]] = {}
        self._of_objects: dict[str, deque[float]] = {}

    def look(self) -> None:
        for seen, found in ((self._of_modules, self._in_modules()), (self._of_objects, self._in_objects())):
            for name, value in found:
                seen.setdefault(name, deque(maxlen=_LOOKS)).append(value)

    def of_modules(self) -> list[str]:
        """But for those that --adopt puts back, as where a loop of the script's changes them."""
        has = self._state.kept.has_attribute
        found = _going_on(self._of_modules)
        return [name for name, value in found.items() if not has(name.rpartition(".")[2], value)]

    def of_objects(self) -> list[str]:
        """But for those that the object's state has, by whatever name. An object is asked for its state only where it
        has numbers that go on."""
        going_on = _going_on(self._of_objects)
        owners = {name.rpartition(".")[0] for name in going_on}
        kept = {owner: [*_numbers_in(self._state.objects[owner].state_dict())] for owner in owners}

        def has(name: str, value: float) -> bool:
            return any(math.isclose(value, number, rel_tol=1e-6) for number in kept[name.rpartition(".")[0]])

        return [name for name, value in going_on.items() if not has(name, value)]

    def _in_modules(self) -> Iterator[tuple[str, float]]:
        """But for those of modules that hand out more than their tensors, and those that checkpoints have."""
        for owner, module in self._state.modules.items():
            for prefix, part in module.named_modules():
                kind = type(part)
                hands_out = kind.get_extra_state is not nn.Module.get_extra_state or NUMBERS_KEPT in vars(part)
                if is_of_own_file(kind) and not hands_out:
                    yield from _numbers_of(part, ".".join(filter(None, (owner, prefix))))

    def _in_objects(self) -> Iterator[tuple[str, float]]:
        """Of those that are neither modules nor optimizers, which are looked at in ways of their own."""
        for owner, item in self._state.objects.items():
            if not isinstance(item, nn.Module | Optimizer) and is_of_own_file(type(item)):
                yield from _numbers_of(item, owner)


def _numbers_of(thing: object, owner: str) -> Iterator[tuple[str, float]]:
    for name, value in numbers_of(thing).items():
        yield f"{owner}.{name}", value


def _going_on(seen: dict[str, deque[float]]) -> dict[str, float]:
    """Those that do, with their values now."""
    return {name: values[-1] for name, values in seen.items() if len(values) == _LOOKS and goes_on(values)}


def _numbers_in(state: object) -> Iterator[float]:
    for leaf in tree_leaves(state):
        number = leaf.item() if type(leaf) is Tensor and leaf.numel() == 1 else leaf
        if is_moderate(number):
            yield number
