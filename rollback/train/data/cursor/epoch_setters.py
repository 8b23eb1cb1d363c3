"""Repeats the script's `set_epoch` calls after a rollback over an epoch's start."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

_DEPTH = 4  # wrappers around wrappers
_MOST = 256  # attributes looked at; a data set may have a million


class EpochSetters:
    """The parts of a loader that have a `set_epoch` and keep its argument as `epoch`, or under a similar name.

    The user's loop calls `set_epoch` before each epoch. After a rollback from epoch 3 into epoch 2 the loop is still
    inside epoch 3 and does not call it again. So we repeat the call with the argument of the first time.
    """

    def __init__(self, *roots: Any) -> None:
        found = [thing for thing in parts_of(roots) if callable(getattr(thing, "set_epoch", None))]
        self._setters = [(thing, name) for thing in found if (name := _epoch_attribute(thing)) is not None]
        self.all_read = len(self._setters) == len(found)
        """Whether the epoch of each part can be read. If not, only the script can set it again, at its next epoch."""
        self._given: dict[int, list[int]] = {}
        self._left_at: list[int] | None = None

    def at_opening(self, epoch: int) -> list[int]:
        """The parts' values for `epoch`, which is about to begin. Repeats the user's call first, where it must."""
        if self._left_at == self._now() and epoch in self._given:
            self.give(epoch, self._given[epoch])
        else:  # the user has called set_epoch since, or has never left it to us
            self._left_at = None
        self._given[epoch] = self._now()
        return self._given[epoch]

    def give(self, epoch: int, values: list[int]) -> None:
        """Sets the parts to the values that they had at the opening of `epoch`."""
        self._set(values)
        self._given[epoch] = self._left_at = values

    def insist(self, values: list[int]) -> None:
        """Sets the parts once more to what the script has told them, where a state that was loaded since has others."""
        if self._now() != values:
            self._set(values)

    def _set(self, values: list[int]) -> None:
        if len(values) == len(self._setters):  # else the script is put together otherwise than it was
            for (setter, _), value in zip(self._setters, values, strict=True):
                setter.set_epoch(value)

    def leave(self) -> None:
        """To be called when the position is now between two epochs: the values may belong to a later epoch."""
        self._left_at = self._now()

    @property
    def told(self) -> int | None:
        """The user's argument to `set_epoch`, the largest of several; None if the values are those that we left."""
        return None if self._left_at == self._now() else max(self._now(), default=None)

    def _now(self) -> list[int]:
        return [int(getattr(setter, name)) for setter, name in self._setters]


def parts_of(roots: Iterable[Any]) -> list[Any]:
    """The loaders, samplers and data sets inside a loader, and everything else in it that has a `set_epoch`."""
    found: list[Any] = []
    waiting = [(root, 0) for root in roots]
    while waiting:
        thing, depth = waiting.pop(0)
        if any(thing is known for known in found):
            continue
        found.append(thing)
        if depth < _DEPTH and len(found) < _MOST:
            waiting += [(inner, depth + 1) for inner in _attributes(thing) if _takes_part(inner)]
    return found


def _attributes(thing: Any) -> list[Any]:
    held = list(getattr(thing, "__dict__", {}).values())[:_MOST]
    named = [getattr(thing, name, None) for name in ("dataset", "sampler", "batch_sampler")]
    listed = [item for several in held if type(several) in (list, tuple) for item in several[:_MOST]]  # ConcatDataset
    return [*held, *listed, *named]


def _takes_part(thing: Any) -> bool:
    return isinstance(thing, (DataLoader, Sampler, Dataset)) or callable(getattr(thing, "set_epoch", None))


def _epoch_attribute(thing: Any) -> str | None:
    """The attribute that holds the argument of `set_epoch`: `epoch`, else the only integer with "epoch" in it."""
    names: list[str] = [name for name in getattr(thing, "__dict__", {}) if "epoch" in name.lower()]
    for name in ["epoch", "_epoch", *names] if len(names) == 1 else ["epoch", "_epoch"]:
        value = getattr(thing, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return name
    return None
