"""Finds a script that loads a snapshot of its own although the guard resumes the run. Not collective.

torch is not patched, so a call of `load_state_dict` is not seen. It leaves traces. It writes to every parameter in
place, so a resumed start has one write more to each than the run's first start. A new optimizer has no updates in its
state. And a script that begins with a later epoch calls `set_epoch` with it (see `Passes`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollback.train.updates.advice import OWN_SNAPSHOT_AT_THE_START, OWN_SNAPSHOT_ON_RESUME


@dataclass(frozen=True)
class Traces:
    """What a script has done to its objects before it made the guard."""

    writes: int
    """In-place writes to all parameters, as torch counts them."""
    parameters: int
    """Number of parameters."""
    updated: bool
    """Whether the optimizer's state is that of an optimizer that has made updates."""

    def advice(self, first_writes: int | None, step: int | None) -> tuple[str, str] | None:
        """Advice about the traces. first_writes: writes at the run's first start; None: not on record. step: of the
        restored checkpoint; None: the run begins."""
        if step is None:
            return OWN_SNAPSHOT_AT_THE_START if self.updated else None
        reloaded = first_writes is not None and 0 < self.parameters <= self.writes - first_writes
        if not self.updated and not reloaded:
            return None
        code, text = OWN_SNAPSHOT_ON_RESUME
        done = "loaded the state of its optimizer" if self.updated else "written to all parameters of the model"
        return code, text.format(done=done, step=step)


def traces_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Traces:
    """The traces. Call it before anything is restored."""
    writes = [parameter._version for parameter in model.parameters()]
    return Traces(sum(writes), len(writes), any(_has_updates(state) for state in optimizer.state.values()))


def _has_updates(state: Any) -> bool:
    """Whether a parameter's optimizer state has updates. Some optimizers make an empty state at once."""
    if not isinstance(state, dict):
        return False
    if "step" in state:
        return float(state["step"]) > 0
    return any(isinstance(value, Tensor) for value in state.values())
