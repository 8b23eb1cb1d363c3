"""States as trees: JSON with references to named tensors, as docs/format.md defines them. No pickle.

`encode` takes the result of a `state_dict()`; `decode` returns an equal value. `encode` refuses a value without an
exact JSON form, with its path, when the guard is made and not at the first snapshot.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from rollback.checkpoints.format import contents
from rollback.checkpoints.format.layout import DTYPE_NAME
from rollback.errors import UsageError
from rollback.system.lines import json_number
from rollback.train.sharded import is_sharded, local_of

Json = Any
_AS_IT_IS, _TEXT = frozenset((type(None), bool, str, int)), frozenset((str,))

_NAMES = 2  # of a path that say whose state it is: "objects/ema", "kept/history"

DTYPE: Mapping[str, torch.dtype] = {code: getattr(torch, name) for code, name in DTYPE_NAME.items()}
DTYPE_CODE: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPE.items()}


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """The JSON tree of `value`. Its tensors go into `tensors` under their paths, without a copy.

    Raises UsageError with the path of a value that cannot be kept.
    """
    try:
        return _encode(value, path, tensors)
    except RecursionError:
        raise UsageError(
            f"the state of {_too_deep(value, path)!r} contains itself, or is nested too deep to be kept",
            hint="let its state_dict() return what is flat, as a list of pairs in place of a tree",
        ) from None


def _too_deep(value: Any, path: str) -> str:
    """The path of what was handed over by a name of its own, and cannot be encoded for its depth."""
    for _ in range(_NAMES):
        for key, item in value.items() if isinstance(value, Mapping) else ():
            try:
                _encode(item, path, {})
            except RecursionError:
                value, path = item, f"{path}/{escape(str(key))}"
                break
    return path


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Json:
    """It runs at every step's end, so Python's own types are told by one look."""
    kind = type(value)
    if kind in _AS_IT_IS or (kind is float and math.isfinite(value)):
        return value
    if kind is dict and (len(value) != 1 or str(*value)[:1] != "$") and {*map(type, value)} <= _TEXT:
        return {
            key: item if type(item) in _AS_IT_IS or (type(item) is float and item - item == 0.0)
            else _encode(item, f"{path}/{key if key.isidentifier() else escape(key)}", tensors)
            for key, item in value.items()
        }  # fmt: skip
    match value:
        case list():
            return _encode_items(value, path, tensors)
        case tuple():
            return {"$tuple": _encode_items(value, path, tensors)}
        case np.generic() if value.dtype.name in contents.NUMBERS:  # some are floats of Python as well
            return {"$number": [value.dtype.name, _encode(value.item(), path, tensors)]}
        case str() | int():
            return value if isinstance(value, str) else int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": json_number(float(value))}
        case Tensor():
            return {"$sharded" if is_sharded(value) else "$tensor": _put(value, path, tensors)}
        case np.ndarray():
            return {"$array": _put(_from_numpy(value, path), path, tensors)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
        case Mapping():
            return _encode_mapping(value, path, tensors)
        case _:
            raise UsageError(
                f"the state of {path!r} holds a {type(value).__module__}.{type(value).__qualname__}, "
                "which a checkpoint without pickle cannot keep",
                hint="let its state_dict() return numbers, texts, lists, dicts, arrays and tensors only",
            )


def encode_once(value: Mapping[str, Tensor | None], path: str, tensors: dict[str, Tensor]) -> Json:
    """As `encode`, for named tensors. A tensor with several names is stored once, under the first name."""
    stored: dict[object, Json] = {}
    items = []
    for key, item in value.items():
        memory = memory_of(item) if isinstance(item, Tensor) and not is_lazy(item) else key
        if memory not in stored:
            stored[memory] = encode(item, f"{path}/{escape(key)}", tensors)
        items.append((key, stored[memory]))
    return _object(items, path)


def encode_each(found: Mapping[str, Mapping[str, Tensor | None]], path: str, tensors: dict[str, Tensor]) -> Json:
    """As `encode_once`, for the named tensors of each module."""
    return {owner: encode_once(items, f"{path}/{escape(owner)}", tensors) for owner, items in found.items()}


def memory_of(item: Tensor) -> tuple[Any, ...]:
    """A value that is equal for two tensors if they are the same memory. Of a sharded one, this rank's part counts."""
    item = local_of(item)
    return item.data_ptr(), item.device, item.dtype, tuple(item.shape), item.stride()


def is_storable(tensor: Tensor) -> bool:
    """Whether a checkpoint can keep a tensor of this kind."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPE_CODE:
        return False
    local = local_of(tensor)  # a subclass may only look like a tensor, and have others inside
    return not local.numel() or local.data_ptr() != 0


def _encode_items(value: Sequence[Any], path: str, tensors: dict[str, Tensor]) -> list[Json]:
    return [
        item if type(item) in _AS_IT_IS or (type(item) is float and item - item == 0.0)
        else _encode(item, f"{path}/{index}", tensors)
        for index, item in enumerate(value)
    ]  # fmt: skip


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Json:
    items = [(key, _encode(item, f"{path}/{escape(str(key))}", tensors)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"$counter": [[_encode_key(key, path), item] for key, item in items]}
    return _object(items, path)


def _object(items: list[tuple[Any, Json]], path: str) -> Json:
    plain = all(type(key) is str for key, _ in items)
    if plain and not (len(items) == 1 and items[0][0].startswith("$")):
        return dict(items)
    return {"$map": [[_encode_key(key, path), item] for key, item in items]}


def _encode_key(key: Any, path: str) -> Json:
    """Tensors are told apart by which object they are: nobody would find what comes back under the key of another."""
    if type(key) in _AS_IT_IS:
        return key
    tensors: dict[str, Tensor] = {}
    tree = _encode(key, path, tensors)
    if tensors:
        raise UsageError(
            f"the state of {path!r} is a dict whose keys are tensors: what is put back has other tensors, and none of "
            "its values would be found again",
            hint="let its state_dict() have names or numbers for them, as an optimizer of torch has for its parameters",
        )
    return tree


def decode(tree: Json, tensor: Callable[[str], Tensor], sharded: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON tree. tensor, sharded: return a tensor, and a sharded one, by name. Raises CheckpointDamaged
    at an unknown tag."""
    return contents.decode(tree, contents.Decoding(tensor, lambda name: tensor(name).numpy(), sharded or tensor))


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    if tensor.is_meta or is_lazy(tensor):
        raise UsageError(
            f"the tensor {path!r} has no values yet ({'it has no shape' if is_lazy(tensor) else 'device meta'})",
            hint="before the guard is made, run one batch through the model"
            if is_lazy(tensor)
            else "before the guard is made, give the model memory and values: model.to_empty(device=...), then its "
            "initialization",
        )
    if not is_storable(tensor):
        raise UsageError(
            f"the tensor {path!r} is a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}); a checkpoint keeps "
            f"dense tensors with memory of their own, of the types {', '.join(DTYPE)}",
            hint="convert it, or keep it in another form in state_dict()",
        )
    name = path
    while name in tensors:  # the keys 1 and "1" of one mapping read alike in a path
        name += "%"
    tensors[name] = tensor if is_sharded(tensor) else tensor.detach()
    return name


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape).copy())
    except (TypeError, ValueError) as error:  # an element type, or a byte order, that torch does not have
        raise UsageError(
            f"the array {path!r} has dtype {array.dtype}, which a checkpoint cannot keep",
            hint="convert it to a number type of this machine's byte order",
        ) from error


def escape(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")
