"""The probe batches of one rank: those of a few whole updates from the healthy time, with their loss then.

A batch is copied to host memory as it is handed out, and with it the random states of that moment: handed out again
with these, dropout leaves out the same elements. To keep the position instead and to read the batch again was rejected:
a loader that is read in order would read its epoch again, and workers would begin anew. A copy moves nothing.

All ranks keep the same updates. A rank that cannot copy a batch keeps the reason in its place.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollback.sentinel import Sentinel
from rollback.sentinel.probe import OpenQuestion
from rollback.train.data import rng
from rollback.train.events import RollbackApplied, RollbackCause
from rollback.train.incidents.decisions import StepSpan
from rollback.train.state.kept_values import ScriptState

KEPT_EVERY = 100
"""Steps between two updates that are kept."""
MOST = 64 << 20
"""Bytes of an update's batches."""
_HELD = 2  # a rise shows after 48 steps and more, when the newest may be of the rise itself
_AGAIN_AFTER = 10  # steps, where the last try was of an unfit time


class ProbeBatch:
    """A copy of a batch, and the random states as it was handed out. Raises ValueError where it cannot be copied.

    generators: the states of the script's own.
    """

    def __init__(self, batch: Any, most: int, generators: Mapping[str, Any]) -> None:
        found = list(_parts_of(batch))
        self.nbytes = sum(item.nbytes for item in found)
        if self.nbytes > most:
            raise ValueError(f"the batches of an update have more than {MOST >> 20} MiB")
        self._random, self.generators = rng.capture(), generators
        tensors = [item for item in found if isinstance(item, Tensor)]
        memo = {id(item): item.to("cpu", copy=True) for item in tensors}
        self._devices = [(memo[id(item)], item.device) for item in tensors]
        self._batch = copy.deepcopy(batch, memo)

    def again(self) -> Any:
        """The batch as it was, for one use; the random states of the process are those of that time then."""
        batch = copy.deepcopy(self._batch, {id(kept): kept.to(device, copy=True) for kept, device in self._devices})
        rng.restore(self._random)
        return batch


@dataclass
class ProbeUpdate:
    """The batches of one update."""

    step: int
    batches: list[ProbeBatch] = field(default_factory=list)
    loss: float | None = None
    """Its mean over batches and ranks, as judged; None: it is not judged yet."""
    level: float = 0.0
    """The level of the loss at that step."""
    unfit: str | None = None
    """Why a batch of it could not be copied on this rank."""


class ProbeUpdates:
    """Nothing here is collective. wanted: whether any are kept, and anything is asked."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.question: OpenQuestion | None = None
        """What the model is to be asked about, until it was or could not be."""
        self._from = 0
        self._open: ProbeUpdate | None = None
        self.held: list[ProbeUpdate] = []

    def keep(self, step: int, batch: Any, scripts: ScriptState) -> None:
        """A batch of this step is handed out. Call it where updates are `wanted`."""
        if step < self._from:
            return
        if self._open is None:
            self._open = ProbeUpdate(step)
        kept = self._open
        if kept.step == step and kept.unfit is None:  # else it is not judged yet
            try:
                left = MOST - sum(each.nbytes for each in kept.batches)
                kept.batches.append(ProbeBatch(batch, left, scripts.generators()))
            except (ValueError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
                kept.batches, kept.unfit = [], f"a batch cannot be kept: {error}"

    def judged(self, span: StepSpan, loss: float | None, sentinel: Sentinel) -> None:
        """A step was judged. loss: the mean over the ranks."""
        if self.wanted:
            if (kept := self._open) is not None and kept.step == span.step:
                self._hold(kept, span, loss, sentinel)
            self.question = sentinel.question(span.step) or self.question

    def _hold(self, kept: ProbeUpdate, span: StepSpan, loss: float | None, sentinel: Sentinel) -> None:
        """Hold the update of this step, if its batches are there and its loss is of a healthy time."""
        self._open = None
        level = sentinel.settled_level
        whole = span.batches == span.batches_per_step and (kept.unfit or len(kept.batches) == span.batches)
        if loss is None or not math.isfinite(loss) or level is None or not whole:
            self._from = span.step + _AGAIN_AFTER
            return
        kept.loss, kept.level = loss, level
        self._from = span.step + KEPT_EVERY
        self.held = [*self.held, kept][-_HELD:]

    def before(self, onset: int) -> ProbeUpdate | None:
        """The newest from before this step."""
        return next((kept for kept in reversed(self.held) if kept.step < onset), None)

    def rollback_applied(self, event: RollbackApplied) -> None:
        """What was kept behind that step was of an undone time."""
        if event.cause is RollbackCause.PROBE:
            return
        if event.cause is not RollbackCause.SCREEN:
            self.question = None
        self._open = None
        self.held = [kept for kept in self.held if kept.step < event.step]
        self._from = min(self._from, event.step + _AGAIN_AFTER)


def _parts_of(value: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """The tensors and arrays of a nested batch. Raises ValueError for what may have more than data."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return
        case Tensor() if type(value) is Tensor and not value.requires_grad and value.layout is torch.strided:
            yield value
        case np.ndarray() if value.dtype != object:
            yield value
        case Mapping():
            for item in value.values():
                yield from _parts_of(item)
        case list() | tuple():
            for item in value:
                yield from _parts_of(item)
        case _ if dataclasses.is_dataclass(value):
            for part in dataclasses.fields(value):
                yield from _parts_of(getattr(value, part.name))
        case _:
            raise ValueError(f"it has something of type {type(value).__name__}, which is not looked into")
