"""The CPU in the place of a GPU, for the last snapshot: it does what it is asked for in order, and late."""

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rollback.checkpoints.fast_tier.end_marks import StepEnd
from rollback.train.last_snapshot import membership, small_state, writers
from rollback.train.last_snapshot.device import Device
from rollback.train.state.state import TrainingState

LATE = 0.01  # seconds


class LateGpu(Device):
    """What is added to a mark comes later, as it was when it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._behind: queue.SimpleQueue[tuple[int, StepEnd, list[Tensor]]] = queue.SimpleQueue()
        self._left = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def add(self, part: int, end: StepEnd, tensors: Sequence[Tensor], at: int = 0) -> None:
        if at:  # in a backward: a GPU gives its gradients to the sum behind it
            self.await_gradients()
            super().add(part, end, tensors, at)
            return
        with self._changed:
            self._left += 1
        self._behind.put((part, end, [item.detach().clone() for item in tensors]))

    def await_gradients(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._left)

    def close(self) -> None:
        self.await_gradients()
        super().close()

    def _work(self) -> None:
        while True:
            part, end, tensors = self._behind.get()
            time.sleep(LATE)
            super().add(part, end, tensors)
            with self._changed:
                self._left -= 1
                self._changed.notify_all()


def device_of(state: TrainingState) -> torch.device:
    return next(state.model.parameters()).device


def use_late_gpu(put: Any = setattr) -> None:
    """From now on the parameters count as lying on a GPU. put: as `setattr`."""
    for module in (membership, small_state, writers):
        put(module, "device_of", device_of)
    put(membership, "Device", LateGpu)
