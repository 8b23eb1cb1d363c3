"""Objects that the guard keeps: what they must have, how a state is loaded into one, and a state that one cannot load:
of another object, or of a model or optimizer that was put together otherwise."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rollback.errors import RollbackError, RunDoesNotFit, StateRefused
from rollback.rundir.failures import class_of_exception, qualified_name, text_of
from rollback.train.sharded import is_sharded
from rollback.wording import first_few

_SHOWN = 6
_CARRIED_OUT = "a rollback that was under way is carried out by the same command"
_AT_FIRST = f"from the first start of a run on; {_CARRIED_OUT}"


@runtime_checkable
class Stateful(Protocol):
    """An object that the guard can keep: checkpoints have its state_dict, and a restore loads it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def load_into(name: str, item: Stateful, state: Any) -> None:
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
        what = f"has {first_few([*map(repr, state)], _SHOWN)}" if isinstance(state, Mapping) else f"is {state!r:.60}"
        raise StateRefused(
            f"the {type(item).__name__} {name!r} did not load the state that the checkpoint has by this name: its "
            f"load_state_dict raised {kind}: {text_of(error)}. That state {what}: it may be of an object of another "
            "kind",
            hint=f"make {name!r} as the run made it, or start this job with its own run directory (--run DIR)",
        ) from error


def load_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    """Load what its `state_dict` gave, in the types that were stored. What has its parameter's shape gets the strides
    that it had here; in a new process those of the parameter, with which optimizers make it.

    torch gives each tensor of a parameter's state the type of the parameter when it loads them, but for `step`. Moments
    or weights that an optimizer keeps in float32 for parameters in bfloat16 would be rounded, and counters and masks
    would become fractions: from then on it is another training, and nothing shows it.

    A checkpoint has tensors in order, whatever their strides were. A fused optimizer goes through the memory of
    parameter and state side by side, so it would join numbers that do not belong together where a parameter lies in
    another order (`channels_last`).

    torch's `state_dict` gives the live states. One of an optimizer's own making gives copies, perhaps of other types;
    what its `load_state_dict` makes of them stays.

    torch puts new groups and a new `state` in place of those that were there. They come into the old ones here: whoever
    holds these would read and set them in vain from then on, as a wrapper that shares the `param_groups` of the
    optimizer inside (SAM) and a script that sets `group["lr"]`.
    """
    before = dict(optimizer.state)
    with _same_groups(optimizer):
        optimizer.load_state_dict(stored)
    loaded, then = optimizer.state_dict(), stored.get("state")
    if not (isinstance(loaded.get("state"), dict) and isinstance(then, dict)):
        return
    numbers = [number for group in loaded.get("param_groups", ()) for number in group["params"]]
    for number, parameter in zip(numbers, trained_by(optimizer), strict=False):
        if isinstance(live := loaded["state"].get(number), dict):
            live.update(_as_it_was(live, then.get(number), before.get(parameter), parameter))


@contextlib.contextmanager
def _same_groups(optimizer: Optimizer) -> Iterator[None]:
    """While a state is loaded: by a hook, since a wrapper's own `load_state_dict` hands the loaded groups on. It is the
    first one, since others may do so too. Groups of which there were none before stay those that were loaded.
    """
    own = vars(optimizer)
    if not {"param_groups", "state", "_optimizer_load_state_dict_post_hooks"} <= own.keys():
        yield  # it hands out those of another
        return
    groups, state = optimizer.param_groups, optimizer.state
    each = [*groups]

    def put_into_them(_: Optimizer) -> None:
        loaded = optimizer.param_groups
        for group, its in zip(each, loaded, strict=False):
            _fill(group, its)
        groups[:] = [*each[: len(loaded)], *loaded[len(each) :]]
        _fill(state, optimizer.state)
        optimizer.param_groups, optimizer.state = groups, state

    hook = optimizer.register_load_state_dict_post_hook(put_into_them, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def _fill(held: dict[Any, Any], loaded: Mapping[Any, Any]) -> None:
    if loaded is not held:
        held.clear()
        held.update(loaded)


def _as_it_was(now: Any, then: Any, before: Any, parameter: Tensor) -> Any:
    """What was loaded, with the stored tensors in place of those that have another type now. before: what was there."""
    match now, then:
        case Tensor(), Tensor():
            value = then.to(now.device) if now.dtype != then.dtype else now
            known = isinstance(before, Tensor) and before.shape == value.shape
            return _with_strides_of(before if known else parameter, value)
        case dict(), dict():
            had = before if isinstance(before, dict) else {}
            return {key: _as_it_was(value, then.get(key), had.get(key), parameter) for key, value in now.items()}
        case (list(), list()) | (tuple(), tuple()) if len(now) == len(then):
            each_had = before if isinstance(before, type(now)) and len(before) == len(now) else (None,) * len(now)
            return type(now)(_as_it_was(*each, parameter) for each in zip(now, then, each_had, strict=True))
    return now


def _with_strides_of(like: Tensor, value: Tensor) -> Tensor:
    if value.shape != like.shape or value.stride() == like.stride() or is_sharded(value) or is_sharded(like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def trained_by(optimizer: object) -> list[nn.Parameter]:
    """The parameters of an optimizer, in its order; of another object none."""
    return [item for group in getattr(optimizer, "param_groups", ()) for item in group["params"]]


def tensors_of_state(optimizer: object) -> list[Tensor]:
    """The tensors that an optimizer keeps of each parameter. Its state may have other things beside these, as a count
    of its own under a text; an object that is no optimizer has none."""
    found = getattr(optimizer, "state", None)
    states = found.values() if isinstance(found, dict) else ()
    return [item for state in states if isinstance(state, dict) for item in state.values() if isinstance(item, Tensor)]


def require_same_order(stored: Sequence[str | None], present: Sequence[str | None]) -> None:
    """Raise RunDoesNotFit where the optimizer has the parameters of the checkpoint in another order: it knows their
    states by their numbers, so each would get that of another one."""
    each = zip(stored, present, strict=False)
    if len(stored) == len(present) and (other := [(a, b) for a, b in each if a and b and a != b]):
        then, now = other[0]
        raise RunDoesNotFit(
            f"the optimizer has its parameters in another order than in the checkpoint: {now!r} in the place of "
            f"{then!r}. Its groups were put into another order, in the script or in mid-run",
            hint=f"make the optimizer with its groups in one order, and leave it so; {_CARRIED_OUT}",
        )


def require_same_groups(stored: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise RunDoesNotFit where the optimizer has other parameter groups than the checkpoint."""
    then, now = (
        [len(group["params"]) for group in groups] for groups in (stored["param_groups"], optimizer.param_groups)
    )
    if then != now:
        early = "make the optimizer with all its groups before the guard is made (lr=0 for one whose time comes later)"
        raise RunDoesNotFit(
            f"the checkpoint's optimizer has {then} parameters in its groups, this job's has {now}: a group was added "
            "in mid-run (add_param_group)",
            hint=early + ("; then the same command goes on" if len(then) > len(now) else f", {_AT_FIRST}"),
        )


def require_same_parameters(stored: Mapping[str, Any], model: nn.Module) -> None:
    """Raise RunDoesNotFit where the model has got more parameters since the checkpoint. Where it has fewer, it refuses
    the state itself."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if more := sorted(own & model.state_dict().keys() - stored.keys()):
        raise RunDoesNotFit(
            f"the checkpoint's model lacks parameters of this one: {', '.join(more[:_SHOWN])}. A module was added or "
            "changed in mid-run, as by pruning",
            hint=f"give the model all its parameters before the guard is made, {_AT_FIRST}",
        )
