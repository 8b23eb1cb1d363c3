"""The cursor of a callable or an iterator whose batches are drawn: nanoGPT's `get_batch`, an endless generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from rollback.errors import UsageError
from rollback.train import rng
from rollback.train.cursor.base import Cursor, Indices


class DrawnCursor(Cursor):
    """Replays `draw` from the CPU random states (Python, NumPy, torch), which must be all that its batches depend on.

    The data have a random stream of their own. At the first batch it takes over the states of the process, so that the
    batches are those that an unguarded run would get if only the data drew from them; the process goes on from seeds
    drawn from the same states. From then on batch b is the same whatever the model draws. All is one endless epoch,
    unless `draw` raises StopIteration. `skip` draws a batch and drops it.

    A generator that walks through files, a counter in a closure, a `torch.Generator` of the callable's own or a draw on
    a GPU cannot be put back from here. To know before any harm is done, `open_epoch` draws the first batch of a run
    twice from the same states: if the two differ, UsageError.
    """

    kind = "drawn"
    has_epochs = False

    def __init__(self, draw: Callable[[], Any], *, name: str) -> None:
        super().__init__()
        self._draw = draw
        self._name = name
        self._stream: rng.Stream | None = None

    def _open(self) -> None:
        if self._stream is None:
            self._refuse_hidden_state()
            self._stream = rng.Stream.take_over()

    def _refuse_hidden_state(self) -> None:
        first, second = self._trial(), self._trial()
        if not _alike(first, second):
            raise UsageError(
                f"cannot go back in the batches of '{self._name}': drawn twice from the same random states, the first "
                "is not the same, so they depend on something else (a position or a generator of its own)",
                hint="draw from the global random states of Python, NumPy or torch (CPU) alone; or hand over an object "
                "with state_dict and load_state_dict, or one whose __iter__ begins anew each time",
            )

    def _trial(self) -> Any:
        with rng.preserved():
            try:
                return self._draw()
            except StopIteration:
                return StopIteration

    def _fetch(self) -> Any:
        assert self._stream is not None
        with self._stream:
            return self._draw()

    def _pass_over(self) -> Indices:
        assert self._stream is not None
        with self._stream:
            try:
                self._draw()
            except StopIteration:
                raise
            except Exception:  # noqa: BLE001 - it may be passed over for this very reason; the draws made still count
                pass
        return None

    def _state(self) -> dict[str, Any]:
        return {"stream": self._stream.state_dict() if self._stream else None}

    def _seek(self, state: dict[str, Any]) -> None:
        stream = state["stream"]
        self._stream = rng.Stream.from_state_dict(stream) if stream is not None else None

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "loader": self._name}


def _alike(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values. What cannot be compared is taken to be alike."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and one.dtype.kind in "biufc":
        return _alike(torch.from_numpy(one), torch.from_numpy(other))
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if is_dataclass(one):
        return all(_alike(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    if isinstance(one, (str, bytes, int, float)):
        return one == other or repr(one) == repr(other)  # NaN is alike to NaN
    return True
