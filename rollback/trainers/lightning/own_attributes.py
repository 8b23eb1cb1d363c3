"""What a LightningModule has in attributes of its own, as plain data: the losses of the epoch so far, a temperature.

Kept are those that training changes. What is as it was when training began is a setting, or made of one, and the script
of a resumed run may have changed that.
"""

import marshal
from typing import Any

from torch import Tensor

from rollback.train.comm.recorder import say
from rollback.train.state.module_buffers import NUMBERS_KEPT
from rollback.trainers.variable_values import MISSES, decoded, is_history, state_of

_ABSENT = {"absent": True}


class OwnAttributes:
    """Of one module, on one rank. Make it when training is about to begin."""

    def __init__(self, module: Any) -> None:
        self._module = module
        vars(module)[NUMBERS_KEPT] = True
        kinds = (kind for kind in type(module).__mro__ if kind.__module__.endswith("core.module"))
        bare = next(kind for kind in kinds if kind.__name__ == "LightningModule")()
        own = {name: value for name, value in vars(module).items() if name not in vars(bare)}
        self._first = {name: state for name, value in own.items() if (state := _state_at_first(value))}
        self._others = {*vars(bare), *own} - {*self._first}
        """Those of Lightning, and those that hold objects or tensors: they are named where no checkpoint has them."""
        self._told_of: set[str] = set()
        self._loaded: set[str] = set()

    def begin(self) -> None:
        """Lightning has told the script that training begins. What that has set then, as the folder of a log, is a
        setting too, unless training had changed it where the run goes on."""
        found = {name: _state_at_first(value) for name, value in vars(self._module).items()}
        self._first |= {name: found[name] for name in found.keys() - self._others - self._loaded if found[name]}

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
        self._loaded, held, states = {*kept}, {**vars(self._module)}, {**self._first, **kept}
        for name in {**kept, **self.state_dict()}:
            present = held.get(name)
            here = (states.get(other, _ABSENT) for other, item in held.items() if item is present)
            values = {marshal.dumps(state, 2) for state in here if "value" in state}
            self._put(name, states.get(name, _ABSENT), present if len(values) == 1 else None)

    def _put(self, name: str, state: dict[str, Any], present: Any) -> None:
        """present: what it is, to be filled; None where it is another attribute, too, that is to have another value."""
        held = vars(self._module)
        if name in self._others:
            return  # the script of a resumed run has made an object of it
        if "value" in state:
            match present, decoded(state["value"]):
                case list() as present, list() as value:
                    present[:] = value
                case dict() as present, dict() as value:
                    present.clear()
                    present.update(value)
                case _, value:  # a tensor is not written to: it may be a view of a buffer
                    held[name] = value
        elif state == _ABSENT:
            held.pop(name, None)
        elif name not in self._told_of:
            self._told_of.add(name)
            say(
                f"{type(self._module).__name__}.{name} stays as it is behind a resume and a rollback: checkpoints have "
                "no attribute of more than 1,000 items (a number in a tensor counts as three), or on a GPU. What is "
                "logged of it is not that of the undisturbed run. self.log(..., on_epoch=True) and metrics of "
                "torchmetrics are kept"
            )


def _state_at_first(value: Any) -> dict[str, Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return {} if any(isinstance(part, Tensor) for part in parts) else state_of(lambda: value)


def _state(value: Any) -> dict[str, Any]:
    """Empty: it is an object, or has one in it; or a tensor of more than may be kept, as what a layer gave out, which
    each step makes anew."""
    state = state_of(lambda: value, of_graph=True)
    adds_up = value.numel() == 1 if isinstance(value, Tensor) else is_history(value)
    return state or ({MISSES: True} if adds_up else {})
