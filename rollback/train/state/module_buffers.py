"""Tensors of modules besides parameters: buffers, also those that no state_dict has, and plain attributes. And when DDP
broadcasts the buffers.

torch leaves buffers with `persistent=False` out of `state_dict()`. A model's output may depend on them (running
statistics, caches), so a checkpoint keeps them too. For plain attributes nobody can know whether they are state or left
from a forward. So they are not kept, and the user gets their names.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_leaves

from rollback.errors import RunDoesNotFit
from rollback.train.sharded import is_sharded, local_of
from rollback.train.state.tree import is_storable, memory_of
from rollback.wording import AdviceText

NOT_KEPT = AdviceText(
    "tensors-not-kept",
    "modules hold tensors that are neither parameters nor dense buffers: {names}. No checkpoint keeps them and no "
    "rollback brings them back. If one changes while training, make it a buffer: self.register_buffer(name, tensor), "
    "with persistent=False where the state_dict is to be without it; for a metric of torchmetrics, "
    "metric.persistent(True)",
)
NOT_IN_CHECKPOINT = AdviceText(
    "buffers-not-in-checkpoint",
    "checkpoint {checkpoint} has no values for the buffers {names}, which are in no state_dict: it was taken before "
    "they were kept, or before the model had them. They stay as they are now; checkpoints from here on have them",
)
KEPT_ELSEWHERE = "_rollback_keeps_its_tensors"
"""Attribute of a module whose tensors somebody else keeps."""
NUMBERS_KEPT = "_rollback_keeps_its_numbers"
"""An attribute of a module whose numbers, in attributes of its own, checkpoints have."""
_FEW = 1 << 20  # bytes
_LOOKED_INTO = 1000  # items of a list or mapping among a module's attributes


def all_of(module: nn.Module) -> set[str]:
    """The names of all buffers. One tensor may have several."""
    return {name for name, _ in module.named_buffers(remove_duplicate=False)}


def nonpersistent(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The buffers that are not in `state`, the module's state_dict, by name; None: registered without a tensor.

    A tensor that is also another buffer or parameter is listed once. Tensors that no checkpoint can keep (sparse ones)
    are left out.
    """
    found: dict[str, Tensor | None] = {}
    for name, owner, key in _registered(module):
        item, stored = owner._buffers[key], state.get(name)
        if item is not None and is_lazy(item):
            continue  # it is in the state, too, which is refused by its name
        same = isinstance(stored, Tensor) and item is not None and stored.data_ptr() == item.data_ptr() != 0
        if item is None or (not same and is_storable(item)):
            found[name] = item
    if all(item is None for item in found.values()):
        return found
    seen = {memory_of(item) for item in state.values() if isinstance(item, Tensor) and is_storable(item)}
    for name, item in list(found.items()):
        if item is not None and memory_of(item) in seen:
            del found[name]
        elif item is not None:
            seen.add(memory_of(item))
    return found


def register_buffers(
    module: nn.Module, persistent: Mapping[str, Tensor], others: Mapping[str, Tensor | None], own: Container[str]
) -> None:
    """Register the buffers of a checkpoint that this module has not, and remove those that the checkpoint has not: a
    forward has made them, since or then. `load_buffers` gives them their values. A module with a state_dict of its own
    making (an average of weights, a metric) loads what is in it by itself.

    persistent, others: the checkpoint's, by whether they were in the state_dict. own: the buffers that the module was
    made with: they stay. Raises RunDoesNotFit for a buffer of a module that is not there.
    """
    if type(module).state_dict is not nn.Module.state_dict:
        return
    state, there = module.state_dict(), all_of(module)
    kept = (there & state.keys()) | nonpersistent(module, state).keys()
    for name in kept - persistent.keys() - others.keys():
        if name not in own:
            path, _, key = name.rpartition(".")
            if key in (owner := module.get_submodule(path))._buffers:  # a module may have two names
                delattr(owner, key)
    for name, value in [*persistent.items(), *others.items()]:
        if name in there or name in state:  # a state_dict may have what is no buffer
            continue
        path, _, key = name.rpartition(".")
        try:
            owner = module.get_submodule(path)
            owner.register_buffer(key, None if value is None else value.to(_device(module)), name in persistent)
        except (AttributeError, KeyError) as error:
            raise RunDoesNotFit(
                f"the checkpoint has the buffer {name!r}, and the model cannot get it: {error}",
                hint="make the model with the same modules as in the first start of the run; buffers that a forward "
                "registers in them are restored",
            ) from error


def load_buffers(module: nn.Module, stored: Mapping[str, Tensor | None], own: Container[object]) -> list[str]:
    """Give buffers the values of a checkpoint. Returns the names of buffers without a value, which do not change.

    The values are copied into the present tensor, where possible, since other objects may refer to it. Else the buffer
    gets another tensor: its shape has changed, it had none, or it is one that a forward has put there, which need not
    be the module's alone: of `self.last = batch[-1]` a copy would write to the data. Names that the module does not
    have are ignored. own: the memory (`memory_of`) of those that the modules were made with.
    """
    device = _device(module)
    for name, owner, key in _registered(module):
        if name not in stored:
            continue
        value, present = stored[name], owner._buffers[key]
        if value is None or present is None:
            owner._buffers[key] = value if value is None else value.to(device)
        elif memory_of(value) == memory_of(present):
            continue  # the value was read into this very memory
        elif (
            (present.dtype, present.shape) == (value.dtype, value.shape)
            and memory_of(present) in own
            and can_be_written(present)
        ):
            with torch.no_grad():
                present.copy_(value)
        else:
            owner._buffers[key] = value.to(present.device)
    hidden = nonpersistent(module, module.state_dict())
    return [name for name, item in hidden.items() if item is not None and name not in stored]


def split_own_buffers(
    objects: Mapping[str, Any], states: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """The states of objects beside the model without the buffers that are each rank's own, and these: as of a second
    network, of an average of the weights.

    In DDP the forward of each rank writes to its own, as to those of the model: the statistics of BatchNorm differ
    between ranks, and so does an average of them. So each rank stores its own.

    A module with much more in buffers than in parameters holds weights in them, as some averages do: the same on all
    ranks, and as large as the model. It is not taken apart, since each rank would store all of it.
    """
    shared, own = dict(states), {}
    for owner, item in objects.items():
        state = states[owner]
        if not isinstance(item, nn.Module) or type(state) not in (dict, OrderedDict):
            continue
        names = all_of(item)
        found = {
            name: value
            for name, value in state.items()
            if name in names and isinstance(value, Tensor) and not is_sharded(value)
        }
        weight = sum(parameter.nbytes for parameter in item.parameters())
        if found and sum(value.nbytes for value in found.values()) <= max(weight, _FEW):
            own[owner] = found
            shared[owner] = {name: value for name, value in state.items() if name not in found}
    return shared, own


def join_own_buffers(shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """What `split_own_buffers` took apart."""
    return {owner: {**state, **own[owner]} if owner in own else state for owner, state in shared.items()}


def not_kept(module: nn.Module) -> list[str]:
    """Names of a module's tensors that no checkpoint keeps: plain attributes, buffers of unsupported kinds.

    Views of kept tensors are not among them.
    """
    return list(dict.fromkeys(name for name, _ in _unstored(module)))


def versions_of_unstored(module: nn.Module) -> list[tuple[str, int, int]]:
    """What changes when a module gets another such tensor, or writes to one."""
    return [(name, id(item), 0 if item.is_inference() else item._version) for name, item in _unstored(module)]


def _unstored(module: nn.Module) -> list[tuple[str, Tensor]]:
    state = (item for item in tree_leaves(module.state_dict()) if isinstance(item, Tensor))  # also of extra states
    held = {storage_of(item) for item in (*module.parameters(), *module.buffers(), *state) if is_storable(item)}
    odd = [(name, item) for name, item in module.named_buffers() if not is_storable(item)]
    plain = [
        (name, item) for name, item in _attributes(module) if not is_storable(item) or storage_of(item) not in held
    ]
    return odd + plain


def can_be_written(item: Tensor) -> bool:
    """Whether all elements have their own memory, unlike after `expand`."""
    return not any(size > 1 and stride == 0 for size, stride in zip(item.shape, item.stride(), strict=True))


def _device(module: nn.Module) -> torch.device:
    return next((item.device for item in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _registered(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """All buffers, also those without a tensor: the full name, the owner, and the name in the owner."""
    for prefix, owner in module.named_modules():
        for key in list(owner._buffers.keys()):  # TorchScript's are no dict: they have keys, and no iterator
            yield f"{prefix}.{key}" if prefix else key, owner, key


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, owner in module.named_modules():
        others = {"_parameters", "_buffers", "_modules", *_rebuilt(owner)}
        for key, value in vars(owner).items() if KEPT_ELSEWHERE not in vars(owner) else ():
            if key in others:
                continue
            name = f"{prefix}.{key}" if prefix else key
            items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
            yield from ((name, item) for item in (value, *islice(items, _LOOKED_INTO)) if isinstance(item, Tensor))


def _rebuilt(owner: nn.Module) -> set[str]:
    """The attributes that each forward of a module computes anew, by torch, before anything reads them."""
    hooks = getattr(owner, "_forward_pre_hooks", {}).values()  # TorchScript's may have none
    names = {hook.name for hook in hooks if isinstance(hook, WeightNorm | SpectralNorm)}
    return names | {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}


def storage_of(item: Tensor) -> object:
    """Equal for two tensors if the memory of one is part of the other's, or of what both are views of."""
    item = local_of(item)
    return item.untyped_storage().data_ptr(), item.device
