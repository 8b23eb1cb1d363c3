"""Sharded tensors: each rank has a part, and each shard says where the parts in it lie in the whole tensor.

A part is a box: an offset and a shape. What splits the tensor chooses the boxes; a reader need not know its rule.
Several ranks may have the same box (replicas). Nothing here knows torch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from rollback.system.small_json import parse_json

METADATA = "parts"
"""Key of a shard's metadata."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: offset of its first element, and shape."""

    at: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """What both have in common; None where that is no element."""
        first = tuple(map(max, self.at, other.at))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(self.at, self.shape, other.at, other.shape, strict=True))
        shape = tuple(end - start for start, end in zip(first, last, strict=True))
        return Box(first, shape) if all(length > 0 for length in shape) else None

    def inside(self, outer: "Box") -> tuple[slice, ...]:
        """The indices of this box in a tensor that has the elements of `outer`."""
        starts = (mine - its for mine, its in zip(self.at, outer.at, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))


@dataclass(frozen=True)
class Part:
    """One rank's part of a sharded tensor. shape: of the whole tensor."""

    shape: Shape
    box: Box


def whole(shape: Shape) -> Part:
    return Part(shape, Box((0,) * len(shape), shape))


def write_parts(parts: Mapping[str, Part]) -> str:
    """The text for a shard's metadata."""
    body = {name: {"shape": part.shape, "at": part.box.at} for name, part in parts.items()}
    return json.dumps(body, separators=(",", ":"))


def read_parts(metadata: Mapping[str, str], shapes: Mapping[str, Shape]) -> dict[str, Part]:
    """The parts in a shard, by name. shapes: of the shard's tensors. Raises ValueError where a part cannot be."""
    body: Any = parse_json(metadata.get(METADATA, "{}"))
    if not isinstance(body, dict):
        raise ValueError("the parts are not a JSON object")
    return {name: _part(name, item, shapes) for name, item in body.items()}


def _part(name: str, item: Any, shapes: Mapping[str, Shape]) -> Part:
    if name not in shapes or not isinstance(item, dict) or item.keys() != {"shape", "at"}:
        raise ValueError(f"the part {name!r} is not described, or not there")
    whole, at, shape = item["shape"], item["at"], shapes[name]
    sides = [side for side in (whole, at) if isinstance(side, list) and len(side) == len(shape)]
    if len(sides) < 2 or not all(type(number) is int and number >= 0 for side in sides for number in side):
        raise ValueError(f"the part {name!r} has no place in a tensor of its kind")
    if any(start + length > total for start, length, total in zip(at, shape, whole, strict=True)):
        raise ValueError(f"the part {name!r} of {shape} at {at} is outside of its tensor of {whole}")
    return Part(tuple(whole), Box(tuple(at), shape))


def cover(name: str, parts: Sequence[Part]) -> Iterator[int]:
    """Numbers of parts that are the whole tensor together, each element once.

    Raises ValueError where the parts are not of one tensor, overlap without being the same, or leave elements out.
    """
    seen: dict[Box, int] = {}
    for number, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise ValueError(f"the parts of {name!r} are of tensors of {part.shape} and of {parts[0].shape}")
        if part.box.size:
            seen.setdefault(part.box, number)
    boxes = list(seen)
    if sum(box.size for box in boxes) != prod(parts[0].shape) or _overlap(boxes):
        raise ValueError(f"the parts of {name!r} are not the whole of it: {len(boxes)} parts of {parts[0].shape}")
    yield from seen.values()


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two have an element in common: each is compared with those that begin before it ends."""
    ordered = sorted(boxes, key=lambda box: box.at)
    for place, box in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if box.at and other.at[0] >= box.at[0] + box.shape[0]:
                break
            if box.overlap(other) is not None:
                return True
    return False
