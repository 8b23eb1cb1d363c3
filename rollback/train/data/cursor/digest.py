"""A batch's digest: a hash over the shapes, the types and a bounded part of the bytes of its tensors.

It tells whether a batch that is drawn again is the one that was drawn before. Tensors, NumPy arrays and numbers are
hashed. Strings are hashed only if the batch has no tensor: a path in a batch may lie on another disk after a restart
and still name the same sample.
"""

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

_BYTES = 1 << 16  # of each tensor; of a larger one, pieces all over it
_PIECES = 16
_LEAVES = 4096  # of one batch; what comes after them is left out
_DEPTH = 16


class Digest:
    """The hash of one batch.

    whole: whether everything in the batch was hashed; False if it holds objects of unknown types. Tensors on a device
    are copied to the host asynchronously; `value` waits for that.
    """

    def __init__(self, batch: Any) -> None:
        tensors: list[Tensor] = []
        numbers: list[Any] = []
        self.whole = _gather([batch], tensors, numbers)
        self._hash = xxhash.xxh3_64()
        self.coming: list[tuple[Tensor, Any]] = []
        """Copies that devices make, and the event behind each: `value` waits for them."""
        self._any = bool(tensors or numbers)
        if tensors and numbers:
            numbers = [item for item in numbers if isinstance(item, (int, float, complex))]
        self._hash.update(repr(numbers).encode())
        for tensor in tensors:
            self._hash.update(_kind(tensor.dtype, tensor.shape))
            if tensor.is_cpu and tensor.nbytes <= _BYTES and tensor.is_contiguous():
                self._hash.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))  # as `_add`, in one piece
            else:
                self._add(_sample(tensor.detach()))

    @property
    def value(self) -> int | None:
        """64 bits, never 0; None if nothing in the batch can be hashed."""
        for sample, event in self.coming:
            event.synchronize()
            self._hash.update(_bytes_of(sample))
        self.coming.clear()
        return (self._hash.intdigest() or 1) if self._any else None

    def _add(self, sample: Tensor) -> None:
        if sample.device.type == "cpu":
            self._hash.update(_bytes_of(sample))
        elif sample.is_cuda:
            host = torch.empty(sample.shape, dtype=sample.dtype, device="cpu", pin_memory=True)
            host.copy_(sample, non_blocking=True)
            # The batch may lie on another device than the one that this thread has chosen.
            self.coming.append((host, torch.cuda.current_stream(sample.device).record_event()))


def digest_of_indices(indices: Any) -> int | None:
    """Digest of what a sampler gave for one batch: integers, or any keys that can be hashed."""
    entries = indices if isinstance(indices, (list, tuple)) else [indices]
    if {*map(type, entries)} <= {int}:
        return xxhash.xxh3_64_intdigest(repr(list(entries)).encode()) or 1
    return Digest(entries).value


def hex_digest_of(indices: Any) -> str | None:
    """`digest_of_indices` as a hexadecimal string, for JSON."""
    digest = digest_of_indices(indices)
    return None if digest is None else f"{digest:016x}"


def is_in_one_piece(tensor: Tensor) -> bool:
    """Whether its bytes are those of its own memory. Of a nested tensor, or of one that only stands around others (a
    masked one, a DTensor), neither memory nor shape can be taken as a tensor's."""
    around_others = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.layout is torch.strided and not tensor.is_nested and not around_others


def _gather(items: Iterable[Any], tensors: list[Tensor], plain: list[Any], depth: int = 0) -> bool:
    """Add the tensors and the plain values of these, in order. False: there is something else in them."""
    whole = True
    for item in items:
        if depth > _DEPTH or len(tensors) + len(plain) >= _LEAVES:
            whole = False
        elif isinstance(item, Tensor):
            if is_in_one_piece(item) and not item.is_quantized and not item.is_meta:
                tensors.append(item)
            else:
                whole = False
        elif isinstance(item, np.ndarray) and item.dtype.kind in "biufc" and item.dtype.char not in "gG":  # long double
            tensors.append(torch.from_numpy(np.ascontiguousarray(item, dtype=item.dtype.newbyteorder("="))))
        elif item is None or isinstance(item, (bool, int, float, complex, str, bytes)):
            plain.append(item)
        elif isinstance(item, np.generic):
            plain.append(item.item())
        elif isinstance(item, (list, tuple)):
            whole &= _gather(item, tensors, plain, depth + 1)
        elif isinstance(item, Mapping):
            whole &= _gather(chain.from_iterable(item.items()), tensors, plain, depth + 1)
        elif is_dataclass(item):
            whole &= _gather([getattr(item, each.name, None) for each in fields(item)], tensors, plain, depth + 1)
        else:
            # Of other objects only the tensors: what else they hold may be of this process alone.
            held, kept, whole = getattr(item, "__dict__", {}).values(), len(plain), False
            inside = [value for value in held if isinstance(value, (Tensor, np.ndarray, Mapping, list, tuple))]
            _gather(inside, tensors, plain, depth + 1)
            del plain[kept:]
    return whole


@lru_cache(maxsize=256)  # batches are alike
def _kind(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _sample(tensor: Tensor) -> Tensor:
    """At most about `_BYTES` of its bytes, in one dimension. A large tensor is not copied as a whole."""
    if tensor.nbytes <= _BYTES:
        return tensor.reshape(-1)
    by_stride = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if not by_stride.is_contiguous():
        return torch.cat([_sample(tensor[row])[: _BYTES // _PIECES] for row in _spread(len(tensor), 1)])
    flat, length = by_stride.reshape(-1), max(1, _BYTES // _PIECES // tensor.element_size())
    return torch.cat([flat[start : start + length] for start in _spread(len(flat), length)])


def _spread(size: int, length: int) -> list[int]:
    """Starts of pieces of `length` that are spread evenly over `size`; the last piece ends at the end."""
    last, count = size - length, min(_PIECES, size)
    return sorted({last * index // max(1, count - 1) for index in range(count)})


def _bytes_of(sample: Tensor) -> Any:
    return sample.contiguous().view(torch.uint8).numpy() if sample.numel() else b""
