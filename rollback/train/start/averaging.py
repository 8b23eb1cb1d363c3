"""Whether DDP averages gradients by a hook that remembers what no checkpoint would have."""

import dis
from collections import deque
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType

import torch
from torch import Tensor, nn

from rollback.errors import UsageError

_VARIABLES = frozenset(("STORE_DEREF", "STORE_GLOBAL"))
_ATTRIBUTES = "STORE_ATTR"
_STATES = ("PowerSGDState", "PostLocalSGDState")


def check_averaging(model: nn.Module, objects: Mapping[str, object]) -> None:
    """Raise UsageError where DDP averages gradients by a hook with a state that no checkpoint would have.

    What such a state remembers differs between ranks, and lies there in the order of DDP's buckets. A new process makes
    other buckets in its first step, so it could not go on with it.
    """
    models = [model, *(item for item in objects.values() if isinstance(item, nn.Module))]
    given = {id(item) for item in objects.values()}
    for module in (module for each in models for module in each.modules()):
        for hook, state in getattr(module, "_comm_hooks", ()):
            writes = _VARIABLES if id(state) in given else _VARIABLES | {_ATTRIBUTES}  # those of its state are kept
            if (id(state) in given or _is_constant(state)) and not _Search(given, writes).remembers(hook):
                continue
            where = f"whose {type(state).__name__} remembers" if not _is_constant(state) else "which itself remembers"
            raise UsageError(
                f"DDP averages the gradients by {getattr(hook, '__qualname__', type(hook).__name__)}, {where} what no "
                "checkpoint would have: behind a rollback or a resume the updates would be other ones",
                hint="take the hook out, or use one whose state is None or a process group (fp16_compress_hook); what "
                "is the same on all ranks, as a count, may be in an object with state_dict and load_state_dict: hand "
                "that over by a name of its own, and register the hook with it as its state, or a method of it",
            )


def _is_constant(state: object) -> bool:
    """Whether the state of a communication hook only says how to average."""
    if isinstance(state, tuple):
        return all(map(_is_constant, state))
    if type(state).__module__.startswith(("torch.distributed.", "torch._C._distributed")):  # groups, streams of DDP
        return type(state).__name__ not in _STATES
    return isinstance(state, bool | int | float | str | torch.dtype | None)


class _Search:
    """For what a hook remembers. given: ids of what is handed over, and so kept. writes: the instructions that write
    to what outlives a call."""

    def __init__(self, given: Set[int], writes: Set[str]) -> None:
        self._seen, self._writes = {*given}, writes

    def remembers(self, thing: object) -> bool:
        """Whether a hook writes to a variable or an attribute that outlives its call, or uses tensors, or lists and
        dicts that may get some, from its closure, its defaults or its own object. A tensor of one value is a factor."""
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        match thing:
            case Tensor():
                return thing.numel() > 1
            case dict() | list() | deque() | set():
                items = thing.values() if isinstance(thing, dict) else thing
                return not items or any(map(self.remembers, items))
            case tuple():
                return any(map(self.remembers, thing))
            case partial():
                return any(map(self.remembers, (thing.func, thing.args, *thing.keywords.values())))
            case MethodType(__func__=FunctionType() as function):
                return id(thing.__self__) not in self._seen and self._in(function, thing.__self__)
            case FunctionType():
                return self._in(thing, None)
        called = getattr(type(thing), "__call__", None)  # noqa: B004 - not whether there is one, but which
        if isinstance(called, FunctionType) and not isinstance(thing, nn.Module):
            return self._in(called, thing)
        return type(thing).__name__ in _STATES

    def _in(self, function: FunctionType, owner: object) -> bool:
        return self._written(function) or any(map(self.remembers, _held(function, owner)))

    def _written(self, function: FunctionType) -> bool:
        if function.__module__.partition(".")[0] == "torch":
            return False
        outside = function.__code__.co_freevars
        steps = (step for code in _codes(function.__code__) for step in dis.get_instructions(code))
        found = (step for step in steps if step.opname in self._writes)
        return any(step.opname != "STORE_DEREF" or step.argval in outside for step in found)


def _held(function: FunctionType, owner: object) -> list[object]:
    """owner: whose method it is; None: of no object."""
    used = {name for code in _codes(function.__code__) for name in code.co_names}
    held = [value for name, value in getattr(owner, "__dict__", {}).items() if name in used]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing has been assigned yet
            held.append(cell.cell_contents)
    return [*held, *(function.__defaults__ or ())]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's, and those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
