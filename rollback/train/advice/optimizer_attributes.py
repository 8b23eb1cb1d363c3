"""What an optimizer of the script's own kind keeps in attributes of its own (`self.t += 1`), in place of `self.state`.

Its state_dict has none of these, so a resume begins them anew. Most attributes are no state: settings, caches, what was
measured for a log. So only two kinds count: numbers that go on in each update by the same amount or the same factor, as
counts and powers of a beta do; and tensors that change in each update and are as large together as the parameters.
"""

import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from rollback.train.state.stateful import trained_by
from rollback.train.updates.hooks import weak_hook

_UPDATES = 4  # in a row, in all of which they must change, behind the first one: many attributes are made in that
_OF_TORCH = frozenset(("state", "param_groups", "defaults", "_step_count"))
"""In each optimizer; the last one by schedulers of earlier versions."""
_LARGEST = 1e300
"""A Python int may exceed each float, as one whose bits say which samples were seen. Such a number is no count."""
_Print = list[tuple["weakref.ref[Tensor]", int]]


class OptimizerAttributes:
    """Watches the first updates of an optimizer, by hooks of its own that go once it is known."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._left = 1 + _UPDATES
        self._within = 0  # `step` may call the one that it overrides, which has hooks of its own
        self._numbers: dict[str, list[float]] | None = None
        self._before: dict[str, _Print] = {}
        self._changing: dict[str, int] | None = None
        self._found: list[str] = []
        self._hooks = [
            optimizer.register_step_pre_hook(weak_hook(self._step_begins)),
            optimizer.register_step_post_hook(weak_hook(self._step_ended)),
        ]

    def found(self) -> list[str]:
        """The names of what it keeps so, once they have been seen. Ask it between two steps."""
        if not self._left:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
        return self._found

    def _step_begins(self, optimizer: Optimizer, *_: object) -> None:
        self._within += 1
        if self._within > 1 or not 0 < self._left <= _UPDATES:
            return
        found = _numbers_of(optimizer)
        known = {name: [value] for name, value in found.items()} if self._numbers is None else self._numbers
        # What the script itself has set since the last update, it sets again.
        self._numbers = {name: values for name, values in known.items() if found.get(name) == values[-1]}
        self._before = {name: _print(items) for name, items in _tensors_of(optimizer)}

    def _step_ended(self, optimizer: Optimizer, *_: object) -> None:
        self._within = max(0, self._within - 1)
        if self._within or not self._left:
            return
        self._left -= 1
        if self._numbers is None:
            return
        found = _numbers_of(optimizer)
        self._numbers = {name: [*values, found[name]] for name, values in self._numbers.items() if name in found}
        changed = {
            name: sum(item.numel() for item in items) for name, items in _tensors_of(optimizer)
            if not _is_print_of(self._before.get(name), items)
        }  # fmt: skip
        known = changed if self._changing is None else self._changing
        self._before, self._changing = {}, {name: changed[name] for name in known if name in changed}
        if not self._left:
            going_on = [name for name, values in self._numbers.items() if goes_on(values)]
            self._found = sorted([*going_on, *_as_large_as_the_parameters(self._changing, optimizer)])


def tells_itself(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's, or hands out its state in a way of its own."""
    kind: Any = type(optimizer)
    if kind.__module__.startswith("torch.") or "state_dict" in vars(optimizer):
        return True
    return kind.state_dict is not Optimizer.state_dict or bool(optimizer._optimizer_state_dict_post_hooks)


def numbers_of(thing: object) -> dict[str, float]:
    """Those that it has as attributes."""
    own = [*getattr(thing, "__dict__", {}).items()]
    return {name: value for name, value in own if type(value) in (int, float) and is_moderate(value)}


def is_moderate(number: object) -> TypeGuard[float]:
    """Whether it is a real number that may be reckoned with as a float."""
    return isinstance(number, int | float) and abs(number) <= _LARGEST


def _numbers_of(optimizer: Optimizer) -> dict[str, float]:
    return {name: value for name, value in numbers_of(optimizer).items() if name not in _OF_TORCH}


def _tensors_of(optimizer: Optimizer) -> Iterator[tuple[str, list[Tensor]]]:
    """Of each attribute those that are neither parameters nor gradients."""
    known = {id(item) for parameter in trained_by(optimizer) for item in (parameter, parameter.grad)}
    for name, value in vars(optimizer).items():
        if name not in _OF_TORCH and isinstance(value, Tensor | list | tuple | dict):
            items = [item for item in tree_leaves(value) if isinstance(item, Tensor) and id(item) not in known]
            if items:
                yield name, items


def _as_large_as_the_parameters(sizes: dict[str, int], optimizer: Optimizer) -> list[str]:
    """None where it keeps something of each parameter as is usual: then these may be what it only works with."""
    if any(isinstance(item, Tensor) and item.dim() for item in tree_leaves([*optimizer.state.values()])):
        return []
    whole = sum(item.numel() for item in trained_by(optimizer))
    return [name for name, size in sizes.items() if size >= whole > 0]


def _print(items: list[Tensor]) -> _Print:
    return [(weakref.ref(item), item._version) for item in items]


def _is_print_of(before: _Print | None, items: list[Tensor]) -> bool:
    if before is None or len(before) != len(items):
        return False
    return all(ref() is item and version == item._version for (ref, version), item in zip(before, items, strict=True))


def goes_on(values: Sequence[float]) -> bool:
    """Whether they change by the same amount or the same factor each time."""
    pairs = [*itertools.pairwise(values)]
    if any(after == before for before, after in pairs):
        return False
    steps = [after - before for before, after in pairs]
    factors = [after / before for before, after in pairs if before]
    return any(
        len(each) == len(pairs) and all(math.isclose(one, each[0], rel_tol=1e-6) for one in each)
        for each in (steps, factors)
    )
