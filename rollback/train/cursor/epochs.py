"""`set_epoch`, repeated by us where a rollback goes back over an epoch's start."""

from __future__ import annotations

from typing import Any


class EpochSetters:
    """The samplers and data sets of a loader that are told the epoch by `set_epoch` and keep it as `epoch`.

    The user's loop calls `set_epoch` before each epoch. After a rollback from epoch 3 into epoch 2 it is still inside
    epoch 3 and will not call it when the replay gets there: then what it gave the first time is given again.
    """

    def __init__(self, things: list[Any]) -> None:
        self._setters = [
            thing
            for thing in things
            if callable(getattr(thing, "set_epoch", None)) and isinstance(getattr(thing, "epoch", None), int)
        ]
        self._given: dict[int, list[int]] = {}
        self._left_at: list[int] | None = None

    def at_opening(self, epoch: int) -> list[int]:
        """What the setters hold for `epoch`, which is about to begin, once the user's call has been seen to."""
        if self._left_at == self._now() and epoch in self._given:
            self.give(epoch, self._given[epoch])
        else:  # the user has called set_epoch since, or has never left it to us
            self._left_at = None
        self._given[epoch] = self._now()
        return self._given[epoch]

    def give(self, epoch: int, values: list[int]) -> None:
        """Puts the setters where they were at the opening of `epoch`."""
        for setter, value in zip(self._setters, values, strict=True):
            setter.set_epoch(value)
        self._given[epoch] = self._left_at = values

    def leave(self) -> None:
        """Notes that the position has moved to between two epochs, so that what is set now may be of a later one."""
        self._left_at = self._now()

    @property
    def told(self) -> int | None:
        """What the user has called `set_epoch` with, unless we left it at that; the latest of several."""
        return None if self._left_at == self._now() else max(self._now(), default=None)

    def _now(self) -> list[int]:
        return [int(setter.epoch) for setter in self._setters]
