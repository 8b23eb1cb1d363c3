"""Objects that the guard keeps: what they must have, and a state that one of them cannot load."""

from typing import Any, Protocol, runtime_checkable

from torch.optim import Optimizer

from rollback.errors import RollbackError
from rollback.rundir.failures import class_of_exception, qualified_name, text_of
from rollback.train.state.optimizer_state import load_optimizer
from rollback.wording import first_few

_SHOWN = 6


@runtime_checkable
class Stateful(Protocol):
    """An object that the guard can keep: checkpoints have its state_dict, and a restore loads it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class StateRefused(RollbackError):
    """An object did not load the state that the checkpoint has of it: mostly the state of an object of another kind."""


def load_into(name: str, item: Stateful, state: dict[str, Any]) -> None:
    """Load a stored state into an object. Raises StateRefused where its `load_state_dict` raises, but for errors of
    memory, hardware and peers, which say nothing of the state."""
    try:
        load_optimizer(item, state) if isinstance(item, Optimizer) else item.load_state_dict(state)
    except RollbackError:
        raise
    except Exception as error:
        kind = qualified_name(type(error))
        if class_of_exception(kind, text_of(error)) != "exception":
            raise
        raise StateRefused(
            f"the {type(item).__name__} {name!r} did not load the state that the checkpoint has by this name: its "
            f"load_state_dict raised {kind}: {text_of(error)}. That state has "
            f"{first_few([*map(repr, state)], _SHOWN)}: it may be of an object of another kind",
            hint=f"make {name!r} as the run made it, or start this job with its own run directory (--run DIR)",
        ) from error
