"""Tensors in variables of the script: copies of a model's weights in a list or a dict, as of an average, which are
found by their shapes; and others.

variables: see `rollback.train.introspection.own_variables`.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

Variables = Iterable[tuple[str, Any]]


def tensors_in(held: Any) -> list[Any]:
    """The values of a dict, the items of a list or a tuple."""
    return list(held.values() if isinstance(held, dict) else held)


class ModelCopies:
    """What copies of a model look like: tensors of their own, with the shapes of its parameters, of those that are
    trained, or of all that its state_dict has, in that order."""

    def __init__(self, model: nn.Module) -> None:
        own, state = list(model.parameters()), list(model.state_dict().values())
        wholes = own, [p for p in own if p.requires_grad], state
        self._shapes = [[getattr(item, "shape", None) for item in whole] for whole in wholes if whole]
        self._held = {id(item) for item in (*own, *model.buffers())}  # those of the state are for this moment

    def has(self, held: Any) -> bool:
        if not any(len(held) == len(shapes) for shapes in self._shapes):
            return False
        items = tensors_in(held)
        if not all(isinstance(item, Tensor) and not item.is_nested and id(item) not in self._held for item in items):
            return False
        return [item.shape for item in items] in self._shapes


def copies_of_script(model: nn.Module, others: Collection[Any], variables: Variables) -> dict[str, Any]:
    """Copies in lists and dicts, by their names. Without what `others` have: modules, and objects that keep such
    copies in their attributes, as an optimizer of the script's own may."""
    known = {id(item) for other in others if isinstance(other, nn.Module) for item in other.parameters()}
    known |= {id(value) for other in others for value in getattr(other, "__dict__", {}).values()}
    copies, found = ModelCopies(model), dict[str, Any]()
    for name, held in variables:
        if type(held) not in (list, tuple, dict) or id(held) in known or not copies.has(held):
            continue
        if not {*map(id, tensors_in(held))} <= known:
            found[name] = held
            known |= {id(held), *map(id, tensors_in(held))}
    return found


def modules_of_script(others: Iterable[Any], variables: Variables) -> dict[str, nn.Module]:
    """Modules, by their names, with parameters or buffers that none of the others has, as an average of the model."""
    known = {id(item) for other in others if isinstance(other, nn.Module) for item in tensors_of(other).values()}
    found = dict[str, nn.Module]()
    for name, held in variables:
        if issubclass(type(held), nn.Module) and not (own := {*map(id, tensors_of(held).values())}) <= known:
            found[name] = held
            known |= own
    return found


def tensors_of(held: Any) -> dict[str, Tensor]:
    """Of a module its buffers and its parameters, by name; of a list, tuple or dict its items; of a tensor that one."""
    if isinstance(held, nn.Module):
        named = [*held.named_buffers(), *held.named_parameters()]
    else:
        items = [held] if isinstance(held, Tensor) else tensors_in(held)
        named = [(str(place), item) for place, item in enumerate(items) if isinstance(item, Tensor)]
    return {name: item for name, item in named if _has_values(item)}


def _has_values(item: Tensor) -> bool:
    """And not those of a sparse, nested or quantized tensor, of which no checkpoint is made."""
    plain = item.layout == torch.strided and not item.is_nested
    return not is_lazy(item) and plain and not item.is_quantized and not item.is_meta


def tensors_of_script(variables: Variables) -> dict[str, Tensor]:
    """Those by their names that a state of the training may be in: of several numbers that are no whole ones."""
    found = {name: item for name, item in variables if type(item) is Tensor and not item.is_inference()}
    return {name: item for name, item in found.items() if item.numel() > 1 and item.is_floating_point()}
