"""Objects that the guard keeps: what they must have, and a state that one of them cannot load."""

from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from rollback.errors import RollbackError
from rollback.rundir.failure_class import class_of_exception
from rollback.rundir.failures import qualified_name, text_of

_SHOWN = 6
_LOADING = "state_dict", "load_state_dict"
_LOADING_HOOKS = (
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


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
        keys = [repr(key) for key in state]
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        raise StateRefused(
            f"the {type(item).__name__} {name!r} did not load the state that the checkpoint has by this name: its "
            f"load_state_dict raised {kind}: {text_of(error)}. That state has {', '.join(keys[:_SHOWN])}{more}: it "
            "may be of an object of another kind",
            hint=f"make {name!r} as the run made it, or start this job with its own run directory (--run DIR)",
        ) from error


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a stored state into an optimizer, each tensor in its own type.

    torch gives what it loads the type of the parameter: moments or a master copy in single precision, of a parameter in
    half precision, would be rounded by every restore. An optimizer that loads by itself knows what it does.
    """
    optimizer.load_state_dict({**state})
    if not _leaves_it_to_torch(optimizer):
        return
    numbers, parameters = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    for number, parameter in zip(numbers, parameters, strict=True):
        if number in state["state"]:
            optimizer.state[parameter] = _in_types_of(state["state"][number], optimizer.state[parameter])


def _leaves_it_to_torch(optimizer: Optimizer) -> bool:
    hooks = vars(optimizer)
    return all(getattr(type(optimizer), name) is getattr(Optimizer, name) for name in _LOADING) and not any(
        hooks.get(name) for name in _LOADING_HOOKS
    )


def _in_types_of(stored: Any, loaded: Any) -> Any:
    """`loaded`, with what is stored in place of each tensor that has been given another type."""
    match stored, loaded:
        case Tensor(), Tensor():
            return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
        case dict(), dict() if stored.keys() == loaded.keys():
            return type(loaded)((key, _in_types_of(item, loaded[key])) for key, item in stored.items())
        case ((list() | tuple()), (list() | tuple())) if len(stored) == len(loaded):
            return type(loaded)(map(_in_types_of, stored, loaded))
    return loaded
