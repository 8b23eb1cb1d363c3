"""Writes to the weights within a step, outside of the optimizer's: where a script makes such, no snapshot is copied
beside the training; where torch does not count them, no last snapshot is kept.

Both go by version counters where they have to know whether the weights are still those of a step's end. A write
through `.data`, by NumPy or by another library's kernel is in no counter. So in the first steps of an attempt the
weights themselves are looked at. Until then each copy is waited for: docs/design.md, "Nobody waits for a disk".
"""

import torch
from torch import nn
from torch.optim import Optimizer

from rollback.train.sharded import local_of, version_of
from rollback.train.snapshots import drift
from rollback.train.snapshots.pipeline import Snapshots
from rollback.train.state.state import TrainingState
from rollback.train.updates.backward import BackwardWatch
from rollback.train.updates.hooks import before_update, weak_hook

FIRST_STEPS = 3
"""Steps of an attempt in which it is looked for."""
_LOOKS = 2  # in the backwards of each of them: of many micro-batches, each is trained on alike


class UnseenWrites:
    """Looks for such writes, for as long as this object lives. Not collective; only the script's threads call it.

    model: as the script calls it. telltale: a parameter by which a backward is noticed. looking: whether it is still
    looked for. found: whether there were such that torch did not count; a copy that is under way then is torn.
    """

    def __init__(
        self, state: TrainingState, snapshots: Snapshots, model: nn.Module, telltale: nn.Parameter | None
    ) -> None:
        self.looking, self.found = True, False
        self._snapshots = snapshots
        snapshots.unsure = True
        self._weights = [*state.model.parameters()]
        self._at_end: tuple[int, list[int]] | None = None
        """Versions and digests of the weights at the last step's end; None: they need not be those any more."""
        self._ends = self._looks = 0
        self._hooks = [
            state.optimizer.register_step_pre_hook(weak_hook(self._before_step)),
            before_update(state.optimizer, self._before_update),
        ]
        self._watch = BackwardWatch(model, telltale, self._in_backward)

    def at_end(self) -> None:
        """A step has ended, and the next batch is not read yet. Call it while it is still looked for."""
        if self.found or self._ends == FIRST_STEPS:
            self.looking, self._at_end, self._snapshots.unsure = False, None, False
            self._watch.remove()
            for hook in self._hooks:
                hook.remove()
            return
        self._at_end = self._versions(), self._digests()
        self._ends, self._looks = self._ends + 1, 0

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Before its closure runs: what an optimizer moves for that is its own, and is waited for anyway."""
        if self._at_end is not None and self._at_end[0] != self._versions():
            self._snapshots.mode = "held"

    def _before_update(self, optimizer: Optimizer) -> None:
        self._at_end = None

    def _in_backward(self, *_: object) -> None:
        if self._at_end is None or self._looks == _LOOKS or self.found or self._is_captured():
            return
        versions, digests = self._at_end
        self._looks += 1
        pairs = zip(self._weights, digests, self._digests(), strict=True)
        moved = [item for item, before, now in pairs if before != now] if versions == self._versions() else []
        if moved:
            self.found = True
            self._snapshots.note_unseen_writes(moved)

    def _versions(self) -> int:
        return sum(map(version_of, self._weights))

    def _digests(self) -> list[int]:
        return [int(drift.on_device([local_of(item)])) for item in self._weights]  # each where it lies

    def _is_captured(self) -> bool:
        """Whether this backward is recorded as a graph of a GPU, which cannot be asked for a value meanwhile."""
        return self._weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
