"""What a LightningModule has in attributes of its own, as plain data: the losses of the epoch so far, a temperature.

Kept are those that training changes. What is as it was when training began is a setting, or made of one, and the script
of a resumed run may have changed that.
"""

import marshal
from typing import Any

from torch import Tensor

from rollback.train.comm.recorder import say
from rollback.trainers.variable_values import MISSES, MOST_ITEMS, decoded, is_history, put, state_of

_ABSENT = {"absent": True}


class OwnAttributes:
    """Of one module, on one rank. Make it when training is about to begin."""

    def __init__(self, module: Any) -> None:
        self._module = module
        bare = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")()
        own = {name: value for name, value in vars(module).items() if name not in vars(bare)}
        self._first = {name: state for name, value in own.items() if (state := _state_at_first(value))}
        self._others = {*vars(bare), *own} - {*self._first}
        """Those of Lightning, and those that hold objects or tensors: they are named where no checkpoint has them."""
        self._told_of: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """The states of those that are not what they were when training began, by their names."""
        present = {name: _state(value) for name, value in vars(self._module).items() if name not in self._others}
        present |= dict.fromkeys(self._first.keys() - present.keys(), _ABSENT)
        return {
            name: state
            for name, state in present.items()
            if state and marshal.dumps(state, 2) != marshal.dumps(self._first.get(name, _ABSENT), 2)
        }

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name in {**kept, **self.state_dict()}:
            self._put(name, kept.get(name, self._first.get(name, _ABSENT)))

    def _put(self, name: str, state: dict[str, Any]) -> None:
        held = vars(self._module)
        if "value" in state:
            value = decoded(state["value"])
            if name not in held or put(held[name], value) is not held[name]:
                held[name] = value
        elif state == _ABSENT:
            held.pop(name, None)
        elif name not in self._told_of:
            self._told_of.add(name)
            say(
                f"{type(self._module).__name__}.{name} stays as it is behind a resume and a rollback: checkpoints have "
                "no attribute of more than 1,000 items, or on a GPU. What is logged of it is not that of the "
                "undisturbed run. self.log(..., on_epoch=True) and metrics of torchmetrics are kept"
            )


def _state_at_first(value: Any) -> dict[str, Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return {} if any(isinstance(part, Tensor) for part in parts) else state_of(lambda: value)


def _state(value: Any) -> dict[str, Any]:
    """Empty: it is an object, or has one in it."""
    detached = _detached(value)
    return state_of(lambda: detached) or ({MISSES: True} if isinstance(value, Tensor) or is_history(value) else {})


def _detached(value: Any) -> Any:
    """Its graph went with the backward of its step."""
    match value:
        case Tensor():
            return value.detach()
        case list() | tuple() if type(value) in (list, tuple):
            return type(value)(map(_detached, value)) if len(value) <= MOST_ITEMS else value
        case dict() if type(value) is dict:
            return {key: _detached(item) for key, item in value.items()} if len(value) <= MOST_ITEMS else value
    return value
